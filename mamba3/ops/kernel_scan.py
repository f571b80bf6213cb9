"""The scan on Triton's kernels, with their autograd.Function; for GPUs.

Forward: weights and phases of chunks, states at their borders, outputs, then the gate. Backward:
the gate, gradients of the states, then all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .autograd import first_order, no_autocast, run
from .boundary import closing_state, opening_h
from .chunking import SequenceEnds
from .gate import gate_and_mix
from .reference import Mimo
from .state import Mamba3State
from .streams import pairs


@no_autocast
def mamba3_scan_kernels(
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
    z: Tensor | None,
    mimo: Mimo | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    state: Mamba3State | None,
    cu_seqlens: Tensor | None,
    bounds: Sequence[int] | Tensor,
    chunk_size: int | None,
    return_state: bool,
) -> tuple[Tensor, Mamba3State | None]:
    """Run whole sequences; arguments as in `mamba3.ops.mamba3_scan`.

    Args:
        bounds: boundaries of the sequences in the flattened tokens, packed or not; a tensor where
            the host cannot read them.
    """
    from .triton.launch import token_rows

    ends = None if cu_seqlens is None else SequenceEnds.of(cu_seqlens)
    mimo_x, mimo_z, mimo_o = mimo or (None, None, None)
    h0 = phase0 = None
    if state is not None:
        h0, phase0 = opening_h(state, dt, lam, mimo_x, ends), state.phase
        h0 = h0 if mimo else _swap_pairs(h0, (-1, 2))
    per_token = ((x, 2), (b, 3), (c, 3), (dt, 1), (a, 1), (lam, 1), (rate, 1))
    tokens = [token_rows(t, inner) for t, inner in per_token]
    weights = [None if t is None else t.float().contiguous() for t in (b_bias, c_bias, d, mimo_x)]
    y, h, phase = run(_KernelScan, *tokens, *weights, h0, phase0, bounds, chunk_size)
    y = gate_and_mix(y, z, mimo_z, mimo_o, norm_weight, norm_eps)
    if not return_state:
        return y, None
    h = h if mimo else _swap_pairs(h, (2, -1))
    return y, closing_state(h, phase, x, b, b_bias, mimo is None, ends, state)


def has_kernel(x: Tensor, b: Tensor) -> bool:
    """Whether the kernels do these dtypes and sizes; the torch path does the others.

    Args:
        x, b: of the scan.
    """
    return x.dtype != torch.float64 and b.shape[-1] <= 256 and b.shape[2] <= 64


def _swap_pairs(h: Tensor, sizes: tuple[int, int]) -> Tensor:
    """From interleaved pairs, sizes (-1, 2), to all real parts first, or with (2, -1) back."""
    return h.unflatten(-1, sizes).transpose(-1, -2).flatten(-2)


class _KernelScan(torch.autograd.Function):
    """(B, L, ...) -> y (B, L, H, R, P) before the gate, and every sequence's last h and phase.

    States, in and out, have the real parts of all pairs before the imaginary ones.
    """

    @staticmethod
    def forward(ctx, *args):
        from .triton.launch import on_device
        from .triton.scan import Inputs, Scan

        *inputs, h0, phase0, bounds, chunk_size = args
        inputs = Inputs(*inputs)
        h0, phase0 = (None if t is None else t.contiguous() for t in (h0, phase0))
        with on_device(inputs.x):
            scan = Scan.of(inputs, bounds, chunk_size)
            scan.prepare(training=any(ctx.needs_input_grad))
            chunks, phase = scan.chunks(inputs, phase0)
            states, h = scan.states(inputs, chunks, inputs.x, h0, reverse=False)
            y = scan.outputs(inputs, chunks, states)
        ctx.save_for_backward(*inputs, h0, h, *chunks, *states)
        ctx.scan = scan
        ctx.set_materialize_grads(False)
        return y, h, phase

    @staticmethod
    @first_order
    def backward(ctx, d_y, d_h, d_phase):
        from .triton.launch import on_device
        from .triton.scan import Chunks, Inputs, States

        saved, scan = ctx.saved_tensors, ctx.scan
        inputs, (h0, h) = Inputs(*saved[:11]), saved[11:13]
        chunks, states = Chunks(*saved[13:17]), States(*saved[17:])
        d_y = scan.no_outputs() if d_y is None else d_y.contiguous()
        if d_y.data_ptr() % 16:
            d_y = d_y.clone()
        d_h = None if d_h is None else d_h.contiguous()
        tail = _tail(h, d_h, d_phase, inputs.rate.shape[-1])
        with on_device(d_y):
            d_states, d_h0 = scan.states(inputs, chunks, d_y, d_h, reverse=True)
            grads = scan.gradients(inputs, chunks, d_y, states, d_states, tail)
        if h0 is None:
            return *grads, None, None, None, None
        d_phase0 = -_turning(h0, d_h0, inputs.rate.shape[-1])
        if tail is not None:
            d_phase0 = d_phase0 + tail[:, :, 0, :-1]
        return *grads, d_h0, d_phase0, None, None


def _tail(h: Tensor, d_h: Tensor | None, d_phase: Tensor | None, angles: int) -> Tensor | None:
    """What a sequence's end adds to the sums over later tokens; see `triton.scan_backward`.

    Args:
        h, d_h: final states and their gradient, (sequences, H, P, N).
        d_phase: gradient of the final phases, (sequences, H, S).

    Returns:
        (sequences, H, 2, S + 1), for inner chunks and the last one: of the phases, then of the
        decay. Turning all tokens turns the final state along; the last chunk's border is it.
    """
    if d_h is None and d_phase is None:
        return None
    tail = h.new_zeros(*h.shape[:2], 2, angles + 1)
    if d_phase is not None:
        tail[..., :-1] += d_phase.unsqueeze(2)
    if d_h is not None:
        tail[:, :, 0, :-1] += _turning(h, d_h, angles)
        tail[:, :, 1, -1] = (h * d_h).sum((2, 3))
    return tail


def _turning(h: Tensor, d_h: Tensor, angles: int) -> Tensor:
    """Gradient of turning the states h (..., P, N), given theirs: (..., S)."""
    re, im = pairs(h, angles, interleaved=False)
    d_re, d_im = pairs(d_h, angles, interleaved=False)
    return (re * d_im - im * d_re).sum(-2)
