"""selective_scan and selective_step: the Mamba-1 recurrence, over sequences or one token on.

    code     paper / official    meaning                                    shape
    x        u, x                values                                     (B, L, D)
    dt       delta               step size, > 0                             (B, L, D)
    a        A                   decay rates, < 0                           (D, N)
    b, c     B, C                input and output maps, one for all D       (B, L, N)
    d        D                   skip weight                                (D,)
    z        z                   gate                                       (B, L, D)
    h        h                   state                                      (B, D, N)

Source: arXiv 2312.00752, section 3.2 with the simplified discretisation of the official code:

    h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t,    y_t = (c_t h_t + d x_t) silu(z_t)
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from . import autograd
from .autograd import differentiated, first_order, no_autocast, written
from .dispatch import backend, on_kernels
from .scan import checked_bounds, row_bounds

# Elements of a chunk's decays: 4 MB in float32. Smaller chunks launch more, larger leave the cache.
CHUNK_ELEMENTS = 1 << 20
# Triton's kernels hold gradients of the maps of all N in registers; wider states run on torch.
KERNEL_STATE = 128
LOG2_E = math.log2(math.e)


@no_autocast
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    *,
    softplus: bool = False,
    h: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run Mamba-1's selective scan, with its skip and gate.

    It computes in float32 (float64 when x is), differentiably in every tensor argument. Memory is
    linear in L: states are kept at the borders of chunks and made again in the backward pass.

    Args:
        x: values, (B, L, D).
        dt: step sizes, positive, (B, L, D).
        a: decay rates, negative, (D, N).
        b: input maps, (B, L, N).
        c: readout maps, (B, L, N).
        d: skip weights, (D,); None means no skip.
        z: gate, (B, L, D); None means no gate.
        softplus: step sizes are the softplus of `dt`, which may then have any sign.
        h: state to start from, (B, D, N); None is zeros. With `cu_seqlens`, B is the number of
            sequences.
        cu_seqlens: sequences packed in one row (B = 1): their boundaries, int, (sequences + 1,),
            from 0 to L, never decreasing.

    Returns:
        The output (B, L, D) in x's dtype, and the state after the last token (of every sequence).

    Raises:
        ValueError: shapes that do not fit, boundaries that do not cover the row.

    Example:
        >>> import torch
        >>> x, dt = torch.randn(2, 5, 3), torch.rand(2, 5, 3)
        >>> b, c = torch.randn(2, 2, 5, 4)
        >>> y, h = selective_scan(x, dt, -torch.rand(3, 4), b, c)
    """
    if torch.compiler.is_compiling():
        given = x, dt, a, b, c, d, z, h, cu_seqlens
        return tuple(torch.ops.mamba3.selective_scan(*given, softplus))
    _check_shapes(x, dt, a, b, c, d, z)
    wide = torch.promote_types(x.dtype, torch.float32)
    bounds = None if cu_seqlens is None else checked_bounds(cu_seqlens, x)
    sequences = x.shape[0] if bounds is None else len(bounds) - 1
    if h is not None and h.shape != (sequences, *a.shape):
        raise ValueError(f"the state has shape {tuple(h.shape)}, expected {(sequences, *a.shape)}")
    if on_kernels(x, dt, a, b, c, d, z, h) and a.shape[1] <= KERNEL_STATE:
        tokens = tuple(bounds or row_bounds(x))
        return autograd.run(_KernelScan, x, dt, a, b, c, d, z, h, tokens, softplus)
    if h is None:
        h = x.new_zeros((sequences, *a.shape), dtype=wide)
    if backend(x.device) == "reference":
        run = selective_scan_reference
    else:
        recorded = differentiated(x, dt, a, b, c, h)
        run = _ChunkedScan.apply if recorded else _chunked_scan
    values = x.to(wide)
    dt = F.softplus(dt.to(wide)) if softplus else dt.to(wide)
    a, b, c, h = (t.to(wide) for t in (a, b, c, h))
    if bounds is None:
        y, h = run(values, dt, b, c, a, h)
    else:
        ys, finals = [], []
        for i, (start, stop) in enumerate(pairwise(bounds)):
            final = h[i : i + 1]
            if stop > start:
                per_token = (t[:, start:stop] for t in (values, dt, b, c))
                y, final = run(*per_token, a, final)
                ys.append(y)
            finals.append(final)
        y, h = torch.cat(ys, 1), torch.cat(finals)
    return _skip_and_gate(y, values, d, z).to(x.dtype), h


@no_autocast
def selective_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    *,
    h: Tensor,
    softplus: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `selective_scan` for every sequence.

    Args:
        x, dt, z: (B, D).
        b, c: (B, N).
        a, d, softplus: as in `selective_scan`.
        h: state, (B, D, N), float32 or wider.
        inplace: update `h` where it is and return it, recording no gradient.

    Returns:
        The output (B, D) in x's dtype, and the new state.
    """
    tensors = x, dt, a, b, c, d, z, h
    # The kernel has no backward pass.
    if not (torch.compiler.is_compiling() or differentiated(*tensors)) and on_kernels(*tensors):
        from .triton.selective_step import step

        before = h.contiguous()
        after = before if inplace else torch.empty_like(before)
        y = step(x, dt, a, b, c, d, z, before, after, softplus)
        return y, written(h, after) if inplace else after
    values = x.to(h.dtype)
    dt = F.softplus(dt.to(h.dtype)) if softplus else dt.to(h.dtype)
    decay = torch.exp(dt.unsqueeze(-1) * a.to(h.dtype))
    added = (dt * values).unsqueeze(-1) * b.to(h.dtype).unsqueeze(-2)
    if inplace:
        with torch.no_grad():
            h.mul_(decay).add_(added)
    else:
        h = torch.addcmul(added, decay, h)
    y = torch.einsum("bdn,bn->bd", h, c.to(h.dtype))
    return _skip_and_gate(y, values, d, z).to(x.dtype), h


def selective_scan_reference(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """The ground truth, token by token; torch differentiates it. No skip, no gate."""
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * a)
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        ys.append((h * c[:, t, None]).sum(-1))
    return torch.stack(ys, 1), h


class _KernelScan(torch.autograd.Function):
    """The scan with its skip and gate on Triton's kernels; they compute in float32."""

    @staticmethod
    def forward(ctx, x, dt, a, b, c, d, z, h, bounds, softplus):
        from .triton.selective_launch import Inputs, SelectiveScan

        ctx.dtypes = [None if t is None else t.dtype for t in (x, dt, a, b, c, d, z, h)]
        inputs = Inputs.of(x, dt, a, b, c, d, z, h)
        ctx.scan = SelectiveScan(inputs, bounds, softplus)
        y, final, *kept = ctx.scan.forward(inputs, training=any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, *kept)
        ctx.set_materialize_grads(False)
        return y, final.mT.contiguous()

    @staticmethod
    @first_order
    def backward(ctx, dy, d_final):
        from .triton.selective_launch import Inputs

        *inputs, maps, borders = ctx.saved_tensors
        inputs = Inputs(*inputs)
        dy = torch.zeros_like(inputs.x) if dy is None else dy
        d_final = None if d_final is None else d_final.mT.contiguous()
        grads = ctx.scan.backward(inputs, maps, borders, dy.contiguous(), d_final)
        cast = (
            None if t is None else t.to(dtype) for t, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return *cast, None, None


class _ChunkedScan(torch.autograd.Function):
    """`_chunked_scan`, which keeps the states at the borders of chunks for its backward pass."""

    @staticmethod
    def forward(ctx, x, dt, b, c, a, h):
        borders = h.new_empty(len(_chunks(x, h)), *h.mT.shape)
        y, final = _chunked_scan(x, dt, b, c, a, h, borders)
        ctx.save_for_backward(x, dt, b, c, a, borders)
        return y, final

    @staticmethod
    @first_order
    def backward(ctx, dy, dh):
        x, dt, b, c, a, borders = ctx.saved_tensors
        dh, a = dh.mT, a.T.contiguous()
        dx, d_dt, d_b, d_c = (torch.empty_like(t) for t in (x, dt, b, c))
        d_a = torch.zeros_like(a)
        rates = a * LOG2_E
        chunks = _chunks(x, dh)
        buffers = _buffers(3, chunks, dh)
        for border, some in reversed(list(zip(borders.unbind(), chunks, strict=True))):
            decay, states, grads = (t[:, : some.stop - some.start] for t in buffers)
            _decays_and_inputs(decay, states, x[:, some], dt[:, some], rates, b[:, some])
            _run(decay, states, border)
            d_c[:, some] = (states @ dy[:, some].unsqueeze(-1)).squeeze(-1)
            # Gradients of the states: dh_t = decay_{t+1} dh_{t+1} + dy_t c_t.
            torch.mul(c[:, some].unsqueeze(-1), dy[:, some].unsqueeze(-2), out=grads)
            grads[:, -1] += dh
            first, *factors = decay.unbind(1)
            later, *earlier = reversed(grads.unbind(1))
            for factor, grad in zip(reversed(factors), earlier, strict=True):
                later = grad.addcmul_(factor, later)
            dh = first * later
            # Of inputs dt x b, and of exponents dt a.
            d_product = (b[:, some].unsqueeze(-2) @ grads).squeeze(-2)
            d_b[:, some] = (grads @ (dt[:, some] * x[:, some]).unsqueeze(-1)).squeeze(-1)
            decay *= grads
            decay[:, 0] *= border
            decay[:, 1:] *= states[:, :-1]
            d_dt[:, some] = torch.mul(decay, a, out=states).sum(-2) + d_product * x[:, some]
            d_a += decay.mul_(dt[:, some].unsqueeze(-2)).sum((0, 1))
            dx[:, some] = d_product * dt[:, some]
        return dx, d_dt, d_b, d_c, d_a.T, dh.mT


def _chunked_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    h: Tensor,
    borders: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, a chunk of tokens at a time; `borders` takes the states before every chunk.

    Channels come last here: states are (B, L, N, D). A chunk's decays, inputs and readouts are made
    in one pass each; what is left for every token is one fused multiply and add over the state.
    Sequences come first, so that a thread meets the same ones in every pass, in its own cache.
    """
    rates, h = a.T.contiguous() * LOG2_E, h.mT.contiguous()
    chunks = _chunks(x, h)
    buffers = _buffers(2, chunks, h)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for i, some in enumerate(chunks):
        if borders is not None:
            borders[i] = h
        decay, states = (t[:, : some.stop - some.start] for t in buffers)
        _decays_and_inputs(decay, states, x[:, some], dt[:, some], rates, b[:, some])
        # A copy: the next chunk takes the buffer.
        h = _run(decay, states, h).clone()
        y[:, some] = (c[:, some].unsqueeze(-2) @ states).squeeze(-2)
    return y, h.mT.contiguous()


def _chunks(x: Tensor, h: Tensor) -> list[slice]:
    length, size = x.shape[1], max(1, CHUNK_ELEMENTS // max(1, h.numel()))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _buffers(count: int, chunks: list[slice], h: Tensor) -> list[Tensor]:
    """For what is (B, Q, N, D) in every chunk: fresh memory would cost more than to fill it."""
    return [h.new_empty(h.shape[0], chunks[0].stop, *h.shape[1:]) for _ in range(count)]


def _decays_and_inputs(
    decay: Tensor, states: Tensor, x: Tensor, dt: Tensor, rates: Tensor, b: Tensor
) -> None:
    """Write exp(dt a) and dt x b of a chunk, each (B, Q, N, D); rates are a / log 2."""
    # Of torch's exponentials a power of 2 is the fastest on a CPU, by a factor of three.
    torch.mul(dt.unsqueeze(-2), rates, out=decay).exp2_()
    torch.mul(b.unsqueeze(-1), (dt * x).unsqueeze(-2), out=states)


def _run(decay: Tensor, states: Tensor, h: Tensor) -> Tensor:
    """Turn a chunk's inputs into its states, in place; the last one."""
    for factor, state in zip(decay.unbind(1), states.unbind(1), strict=True):
        h = state.addcmul_(factor, h)
    return h


def _skip_and_gate(y: Tensor, x: Tensor, d: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + d x) silu(z); where no gradient is recorded, in place of y."""
    recorded = torch.is_grad_enabled()
    if d is not None:
        d = d.to(y.dtype)
        y = torch.addcmul(y, d, x) if recorded else y.addcmul_(d, x)
    if z is not None:
        gate = F.silu(z.to(y.dtype))
        y = y * gate if recorded else y.mul_(gate)
    return y


def _check_shapes(x, dt, a, b, c, d, z) -> None:
    if x.dim() != 3 or a.dim() != 2 or a.shape[0] != x.shape[-1] or not x.shape[1]:
        raise ValueError(
            f"expected x (B, L, D) with L >= 1 and a (D, N), got {tuple(x.shape)} and "
            f"{tuple(a.shape)}"
        )
    maps = (*x.shape[:2], a.shape[1])
    wanted = {"dt": x.shape, "b": maps, "c": maps, "d": x.shape[-1:], "z": x.shape}
    given = {"dt": dt, "b": b, "c": c, "d": d, "z": z}
    for name, t in given.items():
        if t is not None and t.shape != wanted[name]:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {tuple(wanted[name])}")
