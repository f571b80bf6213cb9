"""mamba3_step: the recurrence by one token, as decoding needs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import compiled
from .autograd import differentiated, no_autocast
from .dispatch import backend
from .norm import rms_norm
from .reference import Mimo, mamba3_scan_reference, wrap_phase
from .state import Mamba3State
from .streams import broadcast_streams, complex_mul, complex_state_update, mix_streams


def mamba3_step(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a: Tensor,
    lam: Tensor,
    rate: Tensor,
    b_bias: Tensor,
    c_bias: Tensor,
    d: Tensor,
    z: Tensor | None = None,
    *,
    state: Mamba3State,
    mimo: Mimo | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    inplace: bool = False,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, Mamba3State]:
    """Advance every sequence by one token; the same function as `mamba3_scan` at L = 1.

    On a GPU, where nothing is differentiated, it is one Triton kernel. Nothing in it waits for the
    device, so with `inplace` a CUDA graph can record it.

    Args:
        x, b, c, dt, a, lam, rate, z: as in `mamba3_scan`, without the dimension L.
        b_bias, c_bias, d, mimo, norm_weight, norm_eps: as in `mamba3_scan`.
        state: the state of the B sequences, as returned here or by `mamba3_scan`; h may be kept in
            bfloat16, which halves what a step reads and writes.
        inplace: update the state's tensors where they are and return them, differentiating
            nothing. False (the default) is differentiable and leaves the state as it is.
        state_indices: (B,) int, with `inplace` only: the state is a pool of any number of slots,
            and row i reads and writes slot state_indices[i]. A row of -1 is skipped: its output
            is 0 and no slot changes. Two rows must not name the same slot. Numbers out of range
            are an error, which a GPU, where nothing waits to look, need not report.

    Returns:
        The output (B, H, P) in x's dtype, and the new state.

    Raises:
        ValueError: a state of another batch or of other sizes; `inplace` where gradients are
            recorded; state_indices that do not fit.
    """
    arguments = [x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z]
    tensors = [t for t in (*arguments, *(mimo or ()), norm_weight, *state) if t is not None]
    recorded = differentiated(*tensors)
    if inplace and recorded:
        raise ValueError(
            "inplace=True records no gradient, but an argument requires one: call it under "
            "torch.no_grad() or torch.inference_mode(), or leave inplace=False"
        )
    compiling = torch.compiler.is_compiling()
    if compiling and not recorded:
        more = (norm_weight, norm_eps, state, inplace, state_indices)
        return compiled.step(arguments, mimo, *more)
    if state_indices is not None:
        _check_indices(state_indices, x, state, inplace)
    _check_state(state, x, b, rate, len(x) if state_indices is None else state.batch_size)
    # Ops of torch are traced as they are, and have gradients of their own.
    chosen = "torch" if compiling else backend(x.device)
    # The kernel has no backward pass, and computes in float32.
    if chosen == "triton" and not recorded and all(t.dtype != torch.float64 for t in tensors):
        from .triton.step import step

        return step(*arguments, mimo, norm_weight, norm_eps, state, inplace, state_indices)
    if not inplace:
        return _on_torch(chosen, arguments, mimo, norm_weight, norm_eps, state)
    if state_indices is None:
        y, after = _on_torch(chosen, arguments, mimo, norm_weight, norm_eps, state)
        for own, new in zip(state, after, strict=True):
            own.copy_(new)
        return y, state
    rows = state.reorder(state_indices.clamp(min=0))
    y, after = _on_torch(chosen, arguments, mimo, norm_weight, norm_eps, rows)
    live = state_indices >= 0
    _scatter(state, state_indices, live, rows, after)
    return y.masked_fill(~live[:, None, None], 0), state


def _check_indices(indices: Tensor, x: Tensor, state: Mamba3State, inplace: bool) -> None:
    if not inplace:
        raise ValueError("state_indices name slots to update where they are: pass inplace=True")
    if indices.dtype not in (torch.int32, torch.int64) or indices.shape != x.shape[:1]:
        raise ValueError(
            f"state_indices must be int32 or int64 of shape ({len(x)},), one slot a row, got "
            f"{indices.dtype} of shape {tuple(indices.shape)}"
        )
    if indices.device != x.device:
        raise ValueError(f"state_indices are on {indices.device}, the input on {x.device}")
    # On a GPU this would wait for the device at every call.
    if indices.device.type == "cpu" and len(indices):
        low, high = (int(t) for t in torch.aminmax(indices))
        if low < -1 or high >= state.batch_size:
            raise ValueError(
                f"state_indices hold {low if low < -1 else high}, expected -1 (skip the row) or a "
                f"slot below {state.batch_size}"
            )


def _check_state(state: Mamba3State, x: Tensor, b: Tensor, rate: Tensor, sequences: int) -> None:
    _, heads, headdim = x.shape
    _, rank, _, d_state = b.shape
    fits = (
        state.h.shape == (sequences, heads, headdim, d_state)
        and state.phase.shape == (sequences, heads, rate.shape[-1])
        and state.k.shape == (sequences, rank, heads, d_state)
        and state.x.shape == (sequences, heads, headdim)
    )
    if not fits:
        state.check(Mamba3State.zeros_for(sequences, x, b, rate, device="meta"))


def _scatter(
    state: Mamba3State, indices: Tensor, live: Tensor, rows: Mamba3State, after: Mamba3State
) -> None:
    """Write each live row of `after` into its slot of the pool; `rows` is what was read there.

    A skipped row repeats the first live one, since its own write must change nothing and how many
    are live is not known here. Where no row is live, all repeat what the first one read.
    """
    leader = live.int().argmax()
    source = torch.where(live, torch.arange(len(live), device=live.device), leader)
    target = indices.long()[source].clamp(min=0)
    for pool, old, new in zip(state, rows, after, strict=True):
        written = torch.where(live.any(), new, old)[source]
        pool.index_copy_(0, target, written.to(pool.dtype))


def _on_torch(
    chosen: str,
    arguments: list[Tensor | None],
    mimo: Mimo | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    state: Mamba3State,
) -> tuple[Tensor, Mamba3State]:
    """The step by torch's ops or by the reference, in float32, or float64 if h is."""
    x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z = arguments
    stored, wide = state.h.dtype, torch.promote_types(state.h.dtype, torch.float32)
    if stored != wide:
        state = state.to(wide)
    tensors = [t if t.dtype == wide else t.to(wide) for t in (x, b, c, dt, a, lam, rate)]
    weights = [t if t.dtype == wide else t.to(wide) for t in (b_bias, c_bias, d)]
    z, norm_weight = (None if t is None else t.to(wide) for t in (z, norm_weight))
    if chosen == "reference":
        tensors = [t.unsqueeze(1) for t in tensors]
        z = None if z is None else z.unsqueeze(1)
        rest = (z, mimo, norm_weight, norm_eps, state)
        y, state = mamba3_scan_reference(*tensors, *weights, *rest)
        y = y.squeeze(1)
    else:
        y, state = _step(*tensors, *weights, z, mimo, norm_weight, norm_eps, state)
    if stored != wide:
        state = state._replace(h=state.h.to(stored))
    return y.to(x.dtype), state


@no_autocast
def _step(x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight, norm_eps, state):
    """As `mamba3_step`, with streams behind heads: (B, H, R, ...)."""
    interleaved = mimo is None
    dt = dt.unsqueeze(2)
    phase = wrap_phase(torch.addcmul(state.phase, rate.unsqueeze(1), dt))
    cos, sin = phase.cos(), phase.sin()
    phasor = torch.stack((cos, sin), -1).flatten(-2) if interleaved else torch.cat((cos, sin), -1)
    maps = torch.stack((b, c), 1).transpose(2, 3)  # (B, 2, G, R, N)
    if maps.shape[2] > 1:
        maps = maps.repeat_interleave(len(d) // maps.shape[2], dim=2)
    maps = maps + torch.stack((b_bias, c_bias))
    k, q = complex_mul(maps, phasor[:, None, :, None], interleaved=interleaved).unbind(1)

    # Both tokens of the trapezoid enter together, as 2R outer products.
    alpha = torch.exp(dt * a.unsqueeze(2))
    gamma = lam.unsqueeze(2) * dt
    beta = (dt - gamma) * alpha
    values = torch.stack((x * gamma, state.x * beta), 1)  # (B, 2, H, P)
    if mimo is None:
        values, skip = values.transpose(1, 2), d[:, None, None]
    else:
        values = broadcast_streams(values, mimo[0]).transpose(1, 2).flatten(2, 3)
        skip = d[:, None, None] * mimo[0]
    keys = torch.cat((k, state.k.transpose(1, 2)), 2)
    h = complex_state_update(state.h, values, keys, alpha.squeeze(2))

    # q times h transposed: the other order, a matrix times a vector, is many times slower.
    y = torch.addcmul(q @ h.mT, x.unsqueeze(2), skip)
    if norm_weight is not None:
        y = rms_norm(y, norm_weight.unsqueeze(1), norm_eps)
    if mimo is None:
        y = y.squeeze(2)
        y = y if z is None else y * F.silu(z)
    else:
        y = y if z is None else y * F.silu(broadcast_streams(z, mimo[1]))
        y = mix_streams(y, mimo[2])
    return y, Mamba3State(h, phase, k.transpose(1, 2), x)
