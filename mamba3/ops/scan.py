"""mamba3_scan: the Mamba-3 recurrence over whole sequences, from B, C and x to the gated output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from . import compiled
from .chunked import mamba3_scan_chunked
from .dispatch import backend
from .kernel_scan import has_kernel, mamba3_scan_kernels
from .recording import capturing
from .reference import Mimo, mamba3_scan_reference
from .state import Mamba3State


def mamba3_scan(
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
    mimo: Mimo | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    state: Mamba3State | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    return_state: bool = True,
) -> tuple[Tensor, Mamba3State | None]:
    """Run Mamba-3's recurrence: bias and rotate B and C, scan, add D, norm, gate, mix streams.

    It computes in float32 (float64 when x is), differentiably in every tensor argument, the
    state included. On a GPU, Triton kernels take matrix products of half-precision x in its own
    dtype, with float32 sums. Memory is linear in L.

    Args:
        x: values, (B, L, H, P).
        b: input maps after their RMSNorm, (B, L, R, G, N); N even. G groups serve H/G heads each.
        c: readout maps after their RMSNorm, (B, L, R, G, N).
        dt: step sizes, positive, (B, L, H).
        a: decay rates, negative, (B, L, H).
        lam: weight of the current token in the trapezoidal rule, in [0, 1], (B, L, H).
        rate: rotation in rad per unit of dt, (B, L, S), S <= N/2.
        b_bias: added to b per head, (H, R, N).
        c_bias: added to c per head, (H, R, N).
        d: skip weight per head, (H,).
        z: gate, (B, L, H, P); None means no gate.
        mimo: (mimo_x, mimo_z, mimo_o), each (H, R, P), which make R streams of x and of z and
            mix R outputs. None means SISO, R = 1. The rotation pairs channels (2i, 2i + 1) for
            SISO and (i, i + N/2) for MIMO.
        norm_weight: weight of an RMSNorm over each head's channels before the gate, (H, P).
        norm_eps: epsilon of that norm.
        state: (h (B, H, P, N), phase (B, H, S), k (B, R, H, N), x (B, H, P)) to start from, as
            returned; None is zeros. With `cu_seqlens`, B is the number of sequences.
        cu_seqlens: sequences packed in one row (B = 1): their boundaries, int, (sequences + 1,),
            from 0 to L, never decreasing.
        chunk_size: tokens a chunk; None takes what was measured to be fastest. Changes speed and
            memory only. The kernels round it to what their tiles allow.
        return_state: False saves the work of making the state.

    Returns:
        The output (B, L, H, P) in x's dtype, and the state after the last token (of every
        sequence), or None.

    Raises:
        ValueError: shapes that do not fit, boundaries that do not cover the row.

    Source: arXiv 2603.15569, exponential-trapezoidal recurrence with data-dependent rotation and
    its MIMO form. `mamba3.ops.reference` writes it out.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 6, 2, 4)
        >>> b, c = torch.randn(2, 1, 6, 1, 1, 8)
        >>> dt, lam, rate = torch.rand(1, 6, 2), torch.rand(1, 6, 2), torch.randn(1, 6, 2)
        >>> bias, d = torch.ones(2, 1, 8), torch.ones(2)
        >>> y, state = mamba3_scan(x, b, c, dt, -dt, lam, rate, bias, bias, d)
    """
    if torch.compiler.is_compiling():
        tensors = (x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z)
        options = (state, cu_seqlens, chunk_size, return_state)
        return compiled.scan(tensors, mimo, norm_weight, norm_eps, *options)
    _check_shapes(x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, or None, got {chunk_size}")
    chosen = backend(x.device)
    on_kernels = chosen == "triton" and has_kernel(x, b)
    if cu_seqlens is None:
        bounds = row_bounds(x)
    elif on_kernels and capturing(cu_seqlens.device):
        bounds = cu_seqlens  # which the host cannot read now
    else:
        bounds = checked_bounds(cu_seqlens, x)
    sequences = len(bounds) - 1
    if state is not None:
        state.check(Mamba3State.zeros_for(sequences, x, b, rate, device="meta"))
    wide = torch.promote_types(x.dtype, torch.float32)
    state = None if state is None else state.to(wide)
    tensors = [x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight, norm_eps]
    if on_kernels:
        more = (state, cu_seqlens, bounds, chunk_size, return_state)
        return mamba3_scan_kernels(*tensors, *more)

    tensors = [_widened(t, wide) for t in tensors]
    if state is None:
        state = Mamba3State.zeros_for(sequences, x, b, rate, device=x.device, dtype=wide)
    if chosen != "reference":
        y, state = mamba3_scan_chunked(*tensors, state, cu_seqlens, chunk_size)
    elif cu_seqlens is None:
        y, state = mamba3_scan_reference(*tensors, state)
    else:
        y, state = _each_sequence(tensors, state, bounds)
    return y.to(x.dtype), state if return_state else None


def _widened(t, dtype: torch.dtype):
    """Tensors, alone or in a tuple, in a dtype; anything else as it is."""
    if isinstance(t, tuple):
        return tuple(_widened(one, dtype) for one in t)
    return t.to(dtype) if isinstance(t, Tensor) else t


def _each_sequence(tensors: list, state: Mamba3State, bounds: Sequence[int]):
    """Run the reference on packed sequences, one by one."""
    ys, states = [], []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        final = Mamba3State(*(t[i : i + 1] for t in state))
        if stop > start:
            per_token = [t[:, start:stop] for t in tensors[:7]]
            z = None if tensors[10] is None else tensors[10][:, start:stop]
            y, final = mamba3_scan_reference(*per_token, *tensors[7:10], z, *tensors[11:], final)
            ys.append(y)
        states.append(final)
    return torch.cat(ys, 1), Mamba3State(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def _check_shapes(x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight) -> None:
    if x.dim() != 4 or b.dim() != 5 or rate.dim() != 3:
        raise ValueError(
            "expected x (B, L, H, P), b (B, L, R, G, N) and rate (B, L, S), got "
            f"{tuple(x.shape)}, {tuple(b.shape)} and {tuple(rate.shape)}"
        )
    batch, length, heads, headdim = x.shape
    rank, groups, d_state = b.shape[2:]
    if length == 0:
        raise ValueError(f"expected at least one token, got x of shape {tuple(x.shape)}")
    if heads % groups or d_state % 2 or 2 * rate.shape[2] > d_state:
        raise ValueError(
            "the groups must divide the heads, N must be even, and the angles S at most N/2: got "
            f"{heads} heads, {groups} groups, N = {d_state}, S = {rate.shape[2]}"
        )
    if mimo is None and rank != 1:
        raise ValueError(f"b has {rank} streams: pass mimo=(mimo_x, mimo_z, mimo_o)")
    per_token, per_stream = (batch, length, heads), (heads, rank, headdim)
    expected = {
        "b": (b, (batch, length, rank, groups, d_state)),
        "c": (c, b.shape),
        "dt": (dt, per_token),
        "a": (a, per_token),
        "lam": (lam, per_token),
        "rate": (rate, (batch, length, rate.shape[2])),
        "b_bias": (b_bias, (heads, rank, d_state)),
        "c_bias": (c_bias, (heads, rank, d_state)),
        "d": (d, (heads,)),
        "z": (z, x.shape),
        "norm_weight": (norm_weight, (heads, headdim)),
    }
    for name, t in zip(("mimo_x", "mimo_z", "mimo_o"), mimo or (), strict=False):
        expected[name] = (t, per_stream)
    for name, (t, shape) in expected.items():
        if t is not None and tuple(t.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {tuple(shape)}")


def row_bounds(x: Tensor) -> range:
    """Boundaries of the rows of x (B, L, ...) in its flattened tokens."""
    return range(0, x.shape[0] * x.shape[1] + 1, x.shape[1])


def checked_bounds(cu_seqlens: Tensor, x: Tensor) -> tuple[int, ...]:
    """The boundaries of packed sequences as numbers, or an error that says what is wrong."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype.is_floating_point:
        raise ValueError(
            "cu_seqlens must be a 1-D int tensor of at least 2 boundaries, got "
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if len(x) != 1:
        raise ValueError(
            f"cu_seqlens packs sequences in one row, so the batch must be 1, got {len(x)}"
        )
    if capturing(cu_seqlens.device):
        raise RuntimeError("the values of cu_seqlens cannot be read while a CUDA graph is recorded")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != x.shape[1] or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the row's length {x.shape[1]}, got {bounds}"
        )
    return tuple(bounds)
