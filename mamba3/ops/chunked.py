"""The chunked torch path: the fast one on a CPU, and a correct one on any device.

A sequence is cut into chunks of Q tokens. Inside a chunk the recurrence is a masked matrix
product, between chunks a state is handed on. Unrolled, token s enters h_t (t > s) with weight
scale_s * prod_{s+1..t} alpha, where scale_s = gamma_s + (1 - lam_{s+1}) dt_{s+1} also holds what
the trapezoid rule will add one step later; for t = s the weight is gamma_s alone. So for one head

    W = (q k^T) * M,    M_ts = exp(cum_t - cum_s) scale_s  (t > s),   M_tt = gamma_t
    y = W v + exp(cum_t) q h_in^T
    h_out = exp(cum_Q) h_in + sum_s exp(cum_Q - cum_s) scale_s v_s k_s^T

with cum the running sum of log alpha = dt a in the chunk. D sits on the diagonal of W.

    code     meaning                                             shape
    q, k     rotated C and B, rows ordered (stream, token)       (K, H, R*Q, N)
    v        values                                              (K, H, R*Q, P)
    y        outputs                                             (K, H, R*Q, P)
    log_a    log alpha                                           (K, H, Q)
    scale    see above                                           (K, H, Q)
    gamma    lam * dt                                            (K, H, Q)
    h_in     state a chunk starts from                           (K, H, P, N)

K counts the chunks of all sequences, ordered by their place in the sequence first, so that one
step of the recurrence over chunks is a contiguous slice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import first_order, no_autocast
from .boundary import closing_state, opening_h
from .chunk_scan import ChunkScan, widest
from .chunking import Chunking, SequenceEnds, blocks, default_chunk_size, empty_split, rows_of
from .norm import rms_norm
from .reference import Mimo, wrap_phase
from .state import Mamba3State


@no_autocast
def mamba3_scan_chunked(
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
    state: Mamba3State,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, Mamba3State]:
    """Run whole sequences chunk by chunk; arguments as in `mamba3.ops.mamba3_scan`."""
    batch, length = x.shape[:2]
    rank = b.shape[2]
    if cu_seqlens is None:
        size = chunk_size or default_chunk_size(rank, length)
        chunks = Chunking.dense(batch, length, size)
        ends = None
    else:
        lengths = cu_seqlens.diff()
        size = chunk_size or default_chunk_size(rank, int(lengths.max()))
        chunks = Chunking.packed(lengths, size, x.device)
        ends = SequenceEnds.of(cu_seqlens)

    phase = _Phase.apply(rate, dt, state.phase, cu_seqlens)

    # What the trapezoid adds to a token one step later.
    look_ahead = F.pad(((1 - lam) * dt)[:, 1:], (0, 0, 0, 1))
    if ends is not None:
        look_ahead = look_ahead.index_fill(1, ends.last_of_nonempty, 0.0)
    gamma = lam * dt
    h = opening_h(state, dt, lam, None if mimo is None else mimo[0], ends)
    y, h = ChunkScan.apply(
        chunks.split(x),
        chunks.split(b),
        chunks.split(c),
        b_bias,
        c_bias,
        None if mimo is None else mimo[0],
        chunks.heads(phase),
        chunks.weights(dt * a),
        chunks.weights(gamma + look_ahead),
        chunks.weights(gamma),
        d,
        chunks.sort(h),
        chunks.steps,
    )
    h = chunks.unsort(h)
    mimo_z = None if mimo is None or z is None else mimo[1]
    mimo_o = None if mimo is None else mimo[2]
    z = None if z is None else chunks.split(z)
    y = _GateMix.apply(
        y, z, mimo_z, mimo_o, norm_weight, norm_eps, chunks.steps, chunks.inner, size
    )
    y = chunks.join(y)

    last_phase = phase[:, -1] if ends is None else phase[0, ends.last]
    return y, closing_state(h, last_phase, x, b, b_bias, mimo is None, ends, state)


class _Phase(torch.autograd.Function):
    """Running sum of rate * dt over each sequence, reduced to [-pi, pi].

    The sum is taken in float64 where the device has it: in float32 it would be off by 1e-3 rad
    after some ten thousand turns.
    """

    @staticmethod
    def forward(ctx, rate, dt, phase0, cu_seqlens):
        ctx.save_for_backward(rate, dt)
        ctx.cu_seqlens = cu_seqlens
        wide = widest(rate.device)
        steps = rate.to(wide).unsqueeze(2) * dt.to(wide).unsqueeze(3)
        total = steps.cumsum(1)
        if cu_seqlens is None:
            total += phase0.unsqueeze(1)
        else:
            before = F.pad(total[0], (0, 0, 0, 0, 1, 0))[cu_seqlens[:-1]]
            total += (phase0 - before).repeat_interleave(cu_seqlens.diff(), 0)
        return wrap_phase(total).to(rate.dtype)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        rate, dt = ctx.saved_tensors
        after = grad.flip(1).cumsum(1).flip(1)
        if ctx.cu_seqlens is None:
            grad_phase0 = after[:, 0]
        else:
            # Sums over everything to the right also run over the sequences that follow.
            cu_seqlens = ctx.cu_seqlens
            after = F.pad(after[0], (0, 0, 0, 0, 0, 1))
            later = after[cu_seqlens[1:]]
            grad_phase0 = after[cu_seqlens[:-1]] - later
            after = (after[:-1] - later.repeat_interleave(cu_seqlens.diff(), 0)).unsqueeze(0)
        grad_rate = torch.einsum("blhs,blh->bls", after, dt)
        grad_dt = torch.einsum("blhs,bls->blh", after, rate)
        return grad_rate, grad_dt, grad_phase0, None


class _GateMix(torch.autograd.Function):
    """Head norm, gate and stream mix: y (K, H, R*Q, P), z (C, B', Q, H, P) -> (C, B', Q, H, P).

    The backward pass lets autograd work on one block at a time, so that what it keeps for R
    streams is never as long as the sequence.
    """

    @staticmethod
    def forward(ctx, y, z, mimo_z, mimo_o, norm_weight, norm_eps, steps, inner, size):
        ctx.save_for_backward(y, z, mimo_z, mimo_o, norm_weight)
        ctx.norm_eps, ctx.blocks = norm_eps, blocks(steps, y[0].numel(), y.device)
        out = empty_split((len(y) // inner, inner, size, y.shape[1], y.shape[3]), y)
        for block in ctx.blocks:
            rows, outer = rows_of(block), rows_of(block, inner)
            zb = None if z is None else z[outer]
            mixed = _gate_mix(y[rows], zb, mimo_z, mimo_o, norm_weight, norm_eps, size)
            out[outer] = mixed.unflatten(0, (-1, inner)).transpose(2, 3)
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        y, z, *weights = ctx.saved_tensors
        inner, size = grad.shape[1:3]
        # One gradient for y, z and every weight; None for what is not there.
        grads = [torch.empty_like(y), None if z is None else empty_split(z.shape, z)]
        grads += [None if t is None else torch.zeros_like(t) for t in weights]
        for block in ctx.blocks:
            rows, outer = rows_of(block), rows_of(block, inner)
            parts = [y[rows], None if z is None else z[outer], *weights]
            leaves = [None if t is None else t.detach().requires_grad_() for t in parts]
            with torch.enable_grad():
                mixed = _gate_mix(*leaves, ctx.norm_eps, size)
            gradb = grad[outer].transpose(2, 3).flatten(0, 1)
            used = [i for i, t in enumerate(leaves) if t is not None]
            found = torch.autograd.grad(mixed, [leaves[i] for i in used], gradb)
            for i, part in zip(used, found, strict=True):
                if i == 0:
                    grads[0][rows] = part
                elif i == 1:
                    grads[1][outer] = part
                else:
                    grads[i] += part
        return *grads, None, None, None, None


def _gate_mix(y, z, mimo_z, mimo_o, norm_weight, norm_eps, size: int) -> Tensor:
    """y (K, H, R*Q, P), z (C, B', Q, H, P) -> (K, H, Q, P)."""
    y = y.unflatten(2, (-1, size))
    if norm_weight is not None:
        y = rms_norm(y, norm_weight[:, None, None], norm_eps)
    if z is not None:
        z = z.transpose(2, 3).flatten(0, 1).unsqueeze(2)
        y = y * F.silu(z if mimo_z is None else z * mimo_z.unsqueeze(2))
    return y.squeeze(2) if mimo_o is None else (y * mimo_o.unsqueeze(2)).sum(2)
