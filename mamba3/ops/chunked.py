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

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import first_order, no_autocast
from .reference import TAU_HIGH, TAU_LOW, Mimo, rotate
from .state import Mamba3State
from .streams import complex_state_update, pairs, turn_

# One block of chunks is worked on at a time, so that what it touches stays in a core's cache.
BLOCK_ELEMENTS = 1 << 17


def default_chunk_size(rank: int, length: int) -> int:
    """Chunk size measured to be fastest on a CPU for a rank, never more than the length."""
    return max(1, min(length, 32 if rank == 1 else 16 if rank <= 4 else 8))


class Step(NamedTuple):
    """A step of the recurrence over chunks: chunks start..stop, of which `going` have a next."""

    start: int
    stop: int
    going: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunking:
    """How tokens (B, L) are laid out in chunks (C, B', Q), dense or packed.

    Dense: every row has C chunks, B' = B. Packed: K chunks in all, C = K and B' = 1; every
    sequence starts on a chunk of its own, longer sequences first.
    """

    size: int
    n_tokens: int
    inner: int
    steps: tuple[Step, ...]
    order: Tensor | None = None
    gather: Tensor | None = None
    scatter: Tensor | None = None
    valid: Tensor | None = None

    @classmethod
    def dense(cls, batch: int, length: int, size: int) -> Chunking:
        return cls(size, length, batch, _steps([batch] * -(-length // size)))

    @classmethod
    def packed(cls, lengths: Tensor, size: int, device: torch.device) -> Chunking:
        """Layout of sequences that follow one another in a single row of tokens."""
        lengths = lengths.cpu()
        order = torch.argsort(lengths, descending=True, stable=True)
        starts = torch.cumsum(lengths, 0) - lengths
        counts = (lengths[order] + size - 1) // size
        per_step, chunk_starts, chunk_lengths = [], [], []
        for i in range(int(counts.max())):
            alive = order[: int((counts > i).sum())]
            per_step.append(len(alive))
            chunk_starts.append(starts[alive] + i * size)
            chunk_lengths.append((lengths[alive] - i * size).clamp(max=size))
        offsets = torch.arange(size)
        index = torch.cat(chunk_starts)[:, None] + offsets
        valid = offsets < torch.cat(chunk_lengths)[:, None]
        scatter = torch.empty(int(lengths.sum()), dtype=torch.long)
        scatter[index[valid]] = torch.arange(valid.numel())[valid.flatten()]
        return cls(
            size,
            len(scatter),
            1,
            _steps(per_step),
            order.to(device),
            # Places after a sequence's end repeat some token; their weights are masked to zero.
            index.clamp(max=len(scatter) - 1).flatten().to(device),
            scatter.to(device),
            valid[:, None].to(device),
        )

    def split(self, t: Tensor) -> Tensor:
        """(B, L, ...) -> (C, B', Q, ...); a view where the layout allows it."""
        if self.gather is not None:
            return t.flatten(0, 1).index_select(0, self.gather).unflatten(0, (-1, 1, self.size))
        if missing := -t.shape[1] % self.size:
            t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, missing))
        return t.unflatten(1, (-1, self.size)).transpose(0, 1)

    def join(self, t: Tensor) -> Tensor:
        """(C, B', Q, ...) -> (B, L, ...)."""
        if self.scatter is not None:
            return t.flatten(0, 2).index_select(0, self.scatter).unsqueeze(0)
        return t.transpose(0, 1).flatten(1, 2)[:, : self.n_tokens]

    def heads(self, t: Tensor) -> Tensor:
        """(B, L, H, ...) -> (K, H, Q, ...), contiguous."""
        return self.split(t).transpose(2, 3).flatten(0, 1).contiguous()

    def weights(self, t: Tensor) -> Tensor:
        """Per-token weights (B, L, H) -> (K, H, Q), zero where a chunk has no token."""
        return self.heads(t) if self.valid is None else self.heads(t) * self.valid


def _steps(counts: list[int]) -> tuple[Step, ...]:
    ends = list(accumulate(counts))
    return tuple(
        Step(end - count, end, going)
        for count, end, going in zip(counts, ends, [*counts[1:], 0], strict=True)
    )


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
    batch, length, heads, _ = x.shape
    rank = b.shape[2]
    h, phase0, k_prev, x_prev = state
    if cu_seqlens is None:
        size = chunk_size or default_chunk_size(rank, length)
        chunks = Chunking.dense(batch, length, size)
        ends = None
    else:
        lengths = cu_seqlens.diff()
        size = chunk_size or default_chunk_size(rank, int(lengths.max()))
        chunks = Chunking.packed(lengths, size, x.device)
        ends = SequenceEnds.of(cu_seqlens)

    phase = _Phase.apply(rate, dt, phase0, cu_seqlens)

    # What the trapezoid adds to a token one step later, and to the incoming state at once.
    late = (1 - lam) * dt
    look_ahead = F.pad(late[:, 1:], (0, 0, 0, 1))
    if ends is None:
        late_first = late[:, 0]
    else:
        look_ahead = look_ahead.index_fill(1, ends.last_of_nonempty, 0.0)
        late_first = late[0, ends.first] * ends.nonempty[:, None]
    gamma = lam * dt
    v_prev = x_prev.unsqueeze(2) if mimo is None else x_prev.unsqueeze(2) * mimo[0]
    h = complex_state_update(
        h, v_prev * late_first[..., None, None], k_prev.transpose(1, 2), torch.ones_like(late_first)
    )
    y, h = _ChunkScan.apply(
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
        _take(h, chunks.order),
        chunks.steps,
    )
    h = _untake(h, chunks.order)
    mimo_z = None if mimo is None or z is None else mimo[1]
    mimo_o = None if mimo is None else mimo[2]
    z = None if z is None else chunks.split(z)
    y = _GateMix.apply(
        y, z, mimo_z, mimo_o, norm_weight, norm_eps, chunks.steps, chunks.inner, size
    )
    y = chunks.join(y)

    if ends is None:
        last = (b[:, -1], phase[:, -1], x[:, -1])
    else:
        last = (b[0, ends.last], phase[0, ends.last], x[0, ends.last])
    per_group = heads // b.shape[3]
    b_last = last[0].repeat_interleave(per_group, dim=2) + b_bias.transpose(0, 1)
    k_last = rotate(b_last, last[1][:, None], interleaved=mimo is None)
    final = Mamba3State(h, last[1], k_last, last[2])
    if ends is not None:
        final = Mamba3State(*map(ends.where_nonempty, final, state))
    return y, final


@dataclass(frozen=True)
class SequenceEnds:
    """First and last token of every packed sequence; an empty one points at some token."""

    first: Tensor
    last: Tensor
    nonempty: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> SequenceEnds:
        starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
        limit = cu_seqlens[-1] - 1
        return cls(starts.minimum(limit), (stops - 1).clamp(min=0), stops > starts)

    @property
    def last_of_nonempty(self) -> Tensor:
        return self.last[self.nonempty]

    def where_nonempty(self, new: Tensor, old: Tensor) -> Tensor:
        mask = self.nonempty.view(-1, *(1,) * (new.dim() - 1))
        return torch.where(mask, new, old.to(new.dtype))


def _take(t: Tensor, order: Tensor | None) -> Tensor:
    return t if order is None else t.index_select(0, order)


def _untake(t: Tensor, order: Tensor | None) -> Tensor:
    return t if order is None else t.index_select(0, torch.argsort(order))


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
        turns = torch.round(total * (1 / (TAU_HIGH + TAU_LOW)))
        total.sub_(turns, alpha=TAU_HIGH).sub_(turns, alpha=TAU_LOW)
        return total.to(rate.dtype)

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


class _ChunkScan(torch.autograd.Function):
    """Bias, rotation, streams and the recurrence, block by block; symbols as in the legend.

    Only the state every chunk starts from is kept for the backward pass. Rotated maps, masks and
    scores are computed again: they are read while they are in cache, and are larger by the number
    of heads, streams or the chunk than what they come from.
    """

    @staticmethod
    def forward(ctx, x, b, c, b_bias, c_bias, mimo_x, phase, log_a, scale, gamma, d, h0, steps):
        inputs = (x, b, c, b_bias, c_bias, mimo_x, phase.cos(), phase.sin())
        weights = (log_a, scale, gamma)
        heads, rank, n = b_bias.shape
        size, headdim = log_a.shape[2], x.shape[-1]
        y = x.new_empty(len(log_a), heads, rank * size, headdim)
        h_in = h0.new_empty(len(log_a), heads, headdim, n)
        final = h0.clone()
        if steps:
            h_in[: steps[0].count] = h0[: steps[0].count]
        per_chunk = heads * rank * size * max(n, headdim, rank * size)
        for block in _blocks(steps, per_chunk):
            rows = _rows(block)
            q, k, v = _Maps(inputs, rows).forward()
            mask = _Mask(*(t[rows] for t in weights), rank)
            added = torch.bmm(v.transpose(1, 2), k * mask.out).view_as(h_in[rows])
            for step in block:
                here = slice(step.start - rows.start, step.stop - rows.start)
                parts = added[here], h_in[step.start : step.stop], mask.decay[here]
                going = (t[: step.going] for t in parts)
                torch.addcmul(*going, out=h_in[step.stop : step.stop + step.going])
                final[step.going : step.count] = torch.addcmul(*(t[step.going :] for t in parts))
            w = torch.bmm(q, k.transpose(1, 2))
            mask.apply_(w)
            w.diagonal(dim1=1, dim2=2).add_(mask.per_head(d))
            yb = y[rows].flatten(0, 1)
            torch.bmm(q, h_in[rows].flatten(0, 1).transpose(1, 2), out=yb)
            yb.mul_(mask.into).baddbmm_(w, v)
        ctx.save_for_backward(*inputs, *weights, d, h_in)
        ctx.steps = steps
        return y, final

    @staticmethod
    @first_order
    def backward(ctx, grad_y, grad_final):
        *inputs, log_a, scale, gamma, d, h_in = ctx.saved_tensors
        weights = (log_a, scale, gamma)
        heads, rank, n = inputs[3].shape
        size, headdim = log_a.shape[2], inputs[0].shape[-1]
        grad_y = grad_y.contiguous()
        grads = _Maps.zero_grads(inputs)
        grad_log_a, grad_scale, grad_gamma = (torch.empty_like(log_a) for _ in weights)
        grad_d = torch.zeros_like(d)
        grad_h = grad_final.clone()
        per_chunk = heads * rank * size * max(n, headdim, rank * size)
        for block in reversed(_blocks(ctx.steps, per_chunk)):
            rows = _rows(block)
            maps = _Maps(inputs, rows)
            q, k, v = maps.forward()
            mask = _Mask(*(t[rows] for t in weights), rank)
            gy, h = grad_y[rows].flatten(0, 1), h_in[rows].flatten(0, 1)

            # States: walk the chunks backwards.
            gy_in = gy * mask.into
            read = torch.bmm(gy_in.transpose(1, 2), q).view_as(h_in[rows])
            grad_out = torch.empty_like(read)
            for step in reversed(block):
                here = slice(step.start - rows.start, step.stop - rows.start)
                grad_out[here] = grad_h[: step.count]
                torch.addcmul(
                    read[here], grad_out[here], mask.decay[here], out=grad_h[: step.count]
                )
            grad_total = (grad_out * h_in[rows]).sum((2, 3)).mul_(mask.decay[..., 0, 0])
            grad_out = grad_out.flatten(0, 1)

            # Scores, then the three matrix arguments.
            w = torch.bmm(q, k.transpose(1, 2))
            grad_w = torch.bmm(gy, v.transpose(1, 2))
            grad_d += grad_w.diagonal(dim1=1, dim2=2).sum(1).view(-1, heads).sum(0)
            grad_mask = mask.reduce(w * grad_w)
            mask.apply_(w)
            mask.apply_(grad_w)
            gk = torch.bmm(v, grad_out)
            grad_out_weight = mask.sum_rows(gk * k)
            gk.mul_(mask.out).baddbmm_(grad_w.transpose(1, 2), q)
            gq = torch.bmm(gy_in, h)
            grad_cum = mask.sum_rows(gq * q)
            gq.baddbmm_(grad_w, k)
            w.diagonal(dim1=1, dim2=2).add_(mask.per_head(d))
            gv = torch.bmm(k * mask.out, grad_out.transpose(1, 2))
            gv.baddbmm_(w.transpose(1, 2), gy)
            maps.backward(q, k, gq, gk, gv, grads)

            # Weights.
            grad_gamma[rows] = grad_mask.diagonal(dim1=2, dim2=3)
            grad_mask.mul_(mask.strict)
            by_source = grad_mask.sum(2)
            grad_scale[rows] = by_source + grad_out_weight * mask.carry
            grad_late = grad_out_weight * mask.carry * scale[rows]
            grad_cum += (grad_mask @ scale[rows].unsqueeze(3)).squeeze(3)
            grad_cum -= by_source * scale[rows] + grad_late
            grad_cum[..., -1] += grad_late.sum(-1) + grad_total
            grad_log_a[rows] = grad_cum.flip(-1).cumsum(-1).flip(-1)
        return *grads, grad_log_a, grad_scale, grad_gamma, grad_d, grad_h, None


class _Maps:
    """q, k and v of a block of chunks, from what the layer projects, and the way back.

    x (C, B', Q, H, P) and b, c (C, B', Q, R, G, N) become v (K*H, R*Q, P) and k, q (K*H, R*Q, N):
    bias and rotation per head, streams of x for MIMO. Only the first dimension is cut in blocks.
    """

    def __init__(self, inputs, rows: slice):
        x, b, c, self.b_bias, self.c_bias, self.mimo_x, cos, sin = inputs
        self.outer = slice(rows.start // x.shape[1], rows.stop // x.shape[1])
        self.rows = rows
        self.x, self.b, self.c = (t[self.outer] for t in (x, b, c))
        self.cos, self.sin = (t[rows].unsqueeze(2) for t in (cos, sin))
        self.interleaved = self.mimo_x is None

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (self._turned(m, bias) for m, bias in ((self.c, self.c_bias), (self.b, self.b_bias)))
        self.v = self.x.transpose(2, 3).flatten(0, 1).unsqueeze(2)  # (K, H, 1, Q, P)
        v = self.v.contiguous() if self.interleaved else self.v * self.mimo_x.unsqueeze(2)
        return tuple(t.flatten(2, 3).flatten(0, 1) for t in (q, k, v))

    @staticmethod
    def zero_grads(inputs) -> list[Tensor | None]:
        """Gradients of x, b, c, their parameters and the phase, to be filled block by block."""
        x, b, c, b_bias, c_bias, mimo_x, cos, _ = inputs
        whole = [_empty_split(t.shape, t) for t in (x, b, c)]
        summed = [None if t is None else torch.zeros_like(t) for t in (b_bias, c_bias, mimo_x)]
        return [*whole, *summed, torch.empty_like(cos)]

    def backward(self, q, k, grad_q, grad_k, grad_v, grads) -> None:
        """Undo `forward` on gradients of its results; q and k are its results."""
        grad_x, grad_b, grad_c, grad_b_bias, grad_c_bias, grad_mimo_x, grad_phase = grads
        outer, inner, size = self.x.shape[:3]
        heads, rank, _ = self.b_bias.shape
        grad_v = grad_v.view(outer, inner, heads, rank, size, -1)
        if self.interleaved:
            grad_v = grad_v.squeeze(3)
        else:
            grad_mimo_x += (grad_v * self.v.view(outer, inner, heads, 1, size, -1)).sum((0, 1, 4))
            grad_v = (grad_v * self.mimo_x.unsqueeze(2)).sum(3)
        grad_x[self.outer] = grad_v.transpose(2, 3)

        phase = 0
        for out, grad, grad_m, grad_bias in (
            (k, grad_k, grad_b, grad_b_bias),
            (q, grad_q, grad_c, grad_c_bias),
        ):
            out, grad = (t.view(outer * inner, heads, rank, size, -1) for t in (out, grad))
            # A rotated pair's derivative by its phase is the pair turned by a quarter.
            re, im = pairs(out, self.cos.shape[-1], self.interleaved)
            grad_re, grad_im = pairs(grad, self.cos.shape[-1], self.interleaved)
            phase = phase + (grad_im * re).sub_(grad_re * im).sum(2)
            turn_(grad, self.cos, -self.sin, self.interleaved)
            grad_bias += grad.sum((0, 3))
            groups = self.b.shape[4]
            grad = grad.view(outer, inner, groups, heads // groups, rank, size, -1).sum(3)
            grad_m[self.outer] = grad.permute(0, 1, 4, 3, 2, 5)
        grad_phase[self.rows] = phase

    def _turned(self, m: Tensor, bias: Tensor) -> Tensor:
        """(C, B', Q, R, G, N) -> (K, H, R, Q, N)."""
        outer, inner, size, rank, groups, n = m.shape
        per_group = bias.shape[0] // groups
        out = bias.new_empty(outer, inner, groups, per_group, rank, size, n)
        m = m.permute(0, 1, 4, 3, 2, 5).unsqueeze(3)
        torch.add(m, bias.view(groups, per_group, rank, 1, n), out=out)
        out = out.view(outer * inner, groups * per_group, rank, size, n)
        turn_(out, self.cos, self.sin, self.interleaved)
        return out


class _Mask:
    """Decay weights of a block of chunks, for rows ordered (stream, token).

    strict   exp(cum_t - cum_s) for t > s, else 0         (K, H, Q, Q)
    into     exp(cum_t), from the incoming state           (K*H, R*Q, 1)
    out      exp(cum_Q - cum_s) scale_s, into the state    (K*H, R*Q, 1)
    carry    exp(cum_Q - cum_s)                            (K, H, Q)
    decay    exp(cum_Q)                                    (K, H, 1, 1)
    """

    def __init__(self, log_a: Tensor, scale: Tensor, gamma: Tensor, rank: int):
        self.rank, self.size = rank, log_a.shape[-1]
        # Differences of sums cancel: a token that forgets all it knew would spoil the decay
        # between those after it, were they taken in float32.
        cum = log_a.to(widest(log_a.device)).cumsum(-1)
        # They are at most 0 but for rounding; clamped, exp cannot overflow, and neither can the
        # upper triangle, which is thrown away.
        decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).to(log_a.dtype)
        self.strict = decay.clamp_(max=0).exp_().tril_(-1)
        self.carry = (cum[..., -1:] - cum).to(log_a.dtype).clamp_(max=0).exp_()
        into = cum.to(log_a.dtype).exp_()
        self.decay = into[..., -1, None, None]
        self.into = self._per_row(into)
        self.out = self._per_row(self.carry * scale)
        full = self.strict * scale.unsqueeze(-2)
        full.diagonal(dim1=-2, dim2=-1).copy_(gamma)
        if rank > 1:
            # A row of streams is written out, so that products run over long contiguous rows.
            full = full.repeat(1, 1, 1, rank)
        self._tiled = full.view(full.shape[0] * full.shape[1], 1, -1)

    def apply_(self, w: Tensor) -> None:
        """Multiply scores (K*H, R*Q, R*Q) by the mask, in place."""
        w.view(len(w), self.rank, -1).mul_(self._tiled)

    def reduce(self, w: Tensor) -> Tensor:
        """Sum (K*H, R*Q, R*Q) over both streams: (K, H, Q, Q)."""
        if self.rank > 1:
            w = w.view(len(w), self.rank, -1).sum(1).view(len(w), self.size, self.rank, -1).sum(2)
        return w.view_as(self.strict)

    def sum_rows(self, t: Tensor) -> Tensor:
        """Sum (K*H, R*Q, X) over streams and X: (K, H, Q)."""
        return t.view(*self.carry.shape[:2], self.rank, self.size, -1).sum((2, 4))

    def per_head(self, t: Tensor) -> Tensor:
        """Repeat (H,) for every chunk: (K*H, 1)."""
        return t.repeat(len(self.carry)).unsqueeze(1)

    def _per_row(self, weight: Tensor) -> Tensor:
        return weight.repeat(1, 1, self.rank).view(-1, self.rank * self.size, 1)


class _GateMix(torch.autograd.Function):
    """Head norm, gate and stream mix: y (K, H, R*Q, P), z (C, B', Q, H, P) -> (C, B', Q, H, P).

    The backward pass lets autograd work on one block at a time, so that what it keeps for R
    streams is never as long as the sequence.
    """

    @staticmethod
    def forward(ctx, y, z, mimo_z, mimo_o, norm_weight, norm_eps, steps, inner, size):
        ctx.save_for_backward(y, z, mimo_z, mimo_o, norm_weight)
        ctx.norm_eps, ctx.steps = norm_eps, steps
        out = _empty_split((len(y) // inner, inner, size, y.shape[1], y.shape[3]), y)
        for block in _blocks(steps, y[0].numel()):
            rows, outer = _rows(block), _rows(block, inner)
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
        grads = [torch.empty_like(y), None if z is None else _empty_split(z.shape, z)]
        grads += [None if t is None else torch.zeros_like(t) for t in weights]
        for block in _blocks(ctx.steps, y[0].numel()):
            rows, outer = _rows(block), _rows(block, inner)
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
        y = F.rms_norm(y, y.shape[-1:], eps=norm_eps) * norm_weight[:, None, None]
    if z is not None:
        z = z.transpose(2, 3).flatten(0, 1).unsqueeze(2)
        y = y * F.silu(z if mimo_z is None else z * mimo_z.unsqueeze(2))
    return y.squeeze(2) if mimo_o is None else (y * mimo_o.unsqueeze(2)).sum(2)


def widest(device: torch.device) -> torch.dtype:
    """The dtype for sums that must not lose precision; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _empty_split(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An empty (C, B', ...) that lies in memory as (B', C, ...), so that joining copies nothing."""
    return like.new_empty(shape[1], shape[0], *shape[2:]).transpose(0, 1)


def _blocks(steps: tuple[Step, ...], chunk_elements: int) -> list[list[Step]]:
    """Group the steps of the recurrence over chunks, so that a block fills a cache, not more."""
    enough = max(1, BLOCK_ELEMENTS // chunk_elements)
    blocks, chunks = [], enough
    for step in steps:
        if chunks >= enough:
            blocks.append([])
            chunks = 0
        blocks[-1].append(step)
        chunks += step.count
    return blocks


def _rows(block: list[Step], inner: int = 1) -> slice:
    """The chunks of a block, counted in rows of `inner` chunks."""
    return slice(block[0].start // inner, block[-1].stop // inner)
