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

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reference import TAU_HIGH, TAU_LOW, Mimo, gate_and_mix, rotate
from .state import Mamba3State
from .streams import pairs, turn_

# One block of chunks is worked on at a time, so that what it touches stays in a core's cache.
BLOCK_ELEMENTS = 1 << 17


def default_chunk_size(rank: int, length: int) -> int:
    """Chunk size measured to be fastest on a CPU for a rank, never more than the length."""
    return max(1, min(length, 32 if rank == 1 else 16 if rank <= 4 else 8))


@dataclass(frozen=True)
class Chunking:
    """How tokens (B, L) are laid out in chunks (C, B', Q), dense or packed.

    Dense: every row has C chunks, B' = B. Packed: K chunks in all, C = K and B' = 1; every
    sequence starts on a chunk of its own, longer sequences first.
    """

    size: int
    n_tokens: int
    steps: tuple[tuple[int, int], ...]
    order: Tensor | None = None
    gather: Tensor | None = None
    scatter: Tensor | None = None
    valid: Tensor | None = None

    @classmethod
    def dense(cls, batch: int, length: int, size: int) -> Chunking:
        count = -(-length // size)
        return cls(size, length, tuple((i * batch, (i + 1) * batch) for i in range(count)))

    @classmethod
    def packed(cls, lengths: Tensor, size: int, device: torch.device) -> Chunking:
        """Layout of sequences that follow one another in a single row of tokens."""
        lengths = lengths.cpu()
        order = torch.argsort(lengths, descending=True, stable=True)
        starts = torch.cumsum(lengths, 0) - lengths
        counts = (lengths[order] + size - 1) // size
        steps, chunk_starts, chunk_lengths, first = [], [], [], 0
        for i in range(int(counts.max()) if len(counts) else 0):
            alive = order[: int((counts > i).sum())]
            steps.append((first, first + len(alive)))
            first += len(alive)
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
            tuple(steps),
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
    k, q = _BiasRotate.apply(
        chunks.split(b), chunks.split(c), b_bias, c_bias, chunks.heads(phase), mimo is None
    )
    v = chunks.heads(x).unsqueeze(2)
    v = v if mimo is None else v * mimo[0].unsqueeze(2)

    # What the trapezoid adds to a token one step later, and to the incoming state at once.
    late = (1 - lam) * dt
    look_ahead = F.pad(late[:, 1:], (0, 0, 0, 1))
    if ends is None:
        late_first = late[:, 0]
    else:
        look_ahead = look_ahead.index_fill(1, ends.last_of_nonempty, 0.0)
        late_first = late[0, ends.first] * ends.nonempty[:, None]
    gamma = lam * dt
    v_prev = x_prev.unsqueeze(1) if mimo is None else x_prev.unsqueeze(1) * mimo[0].transpose(0, 1)
    update = torch.einsum("brhp,brhn->bhpn", v_prev * late_first[:, None, :, None], k_prev)
    y, h = _ChunkScan.apply(
        q.flatten(2, 3),
        k.flatten(2, 3),
        v.flatten(2, 3),
        chunks.weights(dt * a),
        chunks.weights(gamma + look_ahead),
        chunks.weights(gamma),
        d,
        _take(h + update, chunks.order),
        chunks.steps,
    )
    h = _untake(h, chunks.order)

    y = y.view(len(y), heads, rank, size, -1).permute(0, 3, 2, 1, 4)
    y = y.unflatten(0, (-1, batch if ends is None else 1))
    y = gate_and_mix(y, None if z is None else chunks.split(z), mimo, norm_weight, norm_eps)
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
        wide = torch.float32 if rate.device.type == "mps" else torch.float64
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
    @once_differentiable
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


class _BiasRotate(torch.autograd.Function):
    """Per-head bias, then rotation, of B and C: (C, B', Q, R, G, N) -> (K, H, R, Q, N).

    The backward pass needs the outputs alone: a rotated pair's derivative by its phase is the
    pair turned by a quarter.
    """

    @staticmethod
    def forward(ctx, b, c, b_bias, c_bias, phase, interleaved):
        cos, sin = phase.cos().unsqueeze(2), phase.sin().unsqueeze(2)
        k = _biased(b, b_bias)
        q = _biased(c, c_bias)
        turn_(k, cos, sin, interleaved)
        turn_(q, cos, sin, interleaved)
        ctx.save_for_backward(k, q, cos, sin)
        ctx.interleaved, ctx.shape = interleaved, b.shape
        return k, q

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_k, grad_q):
        k, q, cos, sin = ctx.saved_tensors
        grad_phase = 0
        grads = []
        for out, grad in ((k, grad_k), (q, grad_q)):
            re, im = pairs(out, cos.shape[-1], ctx.interleaved)
            grad_re, grad_im = pairs(grad, cos.shape[-1], ctx.interleaved)
            grad_phase += (grad_im * re).sub_(grad_re * im).sum(2)
            grad = grad.clone()
            turn_(grad, cos, -sin, ctx.interleaved)
            outer, _, _, groups, _ = ctx.shape[1:]
            grad_m = grad.unflatten(1, (groups, -1)).sum(2)  # (K, G, R, Q, N)
            grads.append(
                (grad_m.permute(0, 3, 2, 1, 4).unflatten(0, (-1, outer)), grad.sum((0, 3)))
            )
        (grad_b, grad_b_bias), (grad_c, grad_c_bias) = grads
        return grad_b, grad_c, grad_b_bias, grad_c_bias, grad_phase, None


def _biased(m: Tensor, bias: Tensor) -> Tensor:
    """Add a per-head bias: (C, B', Q, R, G, N) and (H, R, N) -> (K, H, R, Q, N)."""
    outer, inner, size, rank, groups, n = m.shape
    per_group = bias.shape[0] // groups
    out = bias.new_empty(outer, inner, groups, per_group, rank, size, n)
    m = m.permute(0, 1, 4, 3, 2, 5).unsqueeze(3)
    torch.add(m, bias.view(groups, per_group, rank, 1, n), out=out)
    return out.view(outer * inner, groups * per_group, rank, size, n)


class _ChunkScan(torch.autograd.Function):
    """The recurrence on rotated inputs, chunk by chunk; symbols as in the module's legend.

    Only the state every chunk starts from is kept for the backward pass; the masks and the
    score matrices are computed again, block by block.
    """

    @staticmethod
    def forward(ctx, q, k, v, log_a, scale, gamma, d, h0, steps):
        y = torch.empty_like(v)
        h_in = h0.new_empty(len(q), *h0.shape[1:])
        h = h0.clone()
        for block in _blocks(steps, q, v):
            rows = slice(block[0][0], block[-1][1])
            qb, kb, vb, yb = (t[rows].flatten(0, 1) for t in (q, k, v, y))
            mask = _Mask(log_a[rows], scale[rows], gamma[rows], q.shape[2])
            added = torch.bmm(vb.transpose(1, 2), kb * mask.out).view_as(h_in[rows])
            for start, stop in block:
                h_in[start:stop] = h[: stop - start]
                here = slice(start - rows.start, stop - rows.start)
                h[: stop - start].mul_(mask.decay[here]).add_(added[here])
            w = torch.bmm(qb, kb.transpose(1, 2))
            mask.apply_(w)
            w.diagonal(dim1=1, dim2=2).add_(d.repeat(len(vb) // len(d)).unsqueeze(1))
            torch.bmm(qb, h_in[rows].flatten(0, 1).transpose(1, 2), out=yb)
            yb.mul_(mask.into).baddbmm_(w, vb)
        ctx.save_for_backward(q, k, v, log_a, scale, gamma, d, h_in)
        ctx.steps = steps
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_h):
        q, k, v, log_a, scale, gamma, d, h_in = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grad_log_a, grad_scale, grad_gamma = (torch.empty_like(log_a) for _ in range(3))
        grad_d = torch.zeros_like(d)
        grad_h = grad_h.clone()
        for block in reversed(_blocks(ctx.steps, q, v)):
            rows = slice(block[0][0], block[-1][1])
            qb, kb, vb, gyb, h_inb = (t[rows].flatten(0, 1) for t in (q, k, v, grad_y, h_in))
            gqb, gkb, gvb = (t[rows].flatten(0, 1) for t in (grad_q, grad_k, grad_v))
            mask = _Mask(log_a[rows], scale[rows], gamma[rows], q.shape[2])

            # States: walk the chunks backwards.
            gyb_in = gyb * mask.into
            read = torch.bmm(gyb_in.transpose(1, 2), qb).view_as(h_in[rows])
            grad_out = torch.empty_like(read)
            for start, stop in reversed(block):
                here = slice(start - rows.start, stop - rows.start)
                grad_out[here] = grad_h[: stop - start]
                grad_h[: stop - start].mul_(mask.decay[here]).add_(read[here])
            grad_total = (grad_out * h_in[rows]).sum((2, 3)).mul_(mask.decay[..., 0, 0])
            grad_out = grad_out.flatten(0, 1)

            # Scores, then the three matrix arguments.
            w = torch.bmm(qb, kb.transpose(1, 2))
            grad_w = torch.bmm(gyb, vb.transpose(1, 2))
            grad_d += grad_w.diagonal(dim1=1, dim2=2).sum(1).view(-1, len(d)).sum(0)
            grad_mask = mask.reduce(w * grad_w)
            mask.apply_(w)
            mask.apply_(grad_w)
            torch.bmm(vb, grad_out, out=gkb)
            grad_out_weight = mask.sum_rows(gkb * kb)
            gkb.mul_(mask.out).baddbmm_(grad_w.transpose(1, 2), qb)
            torch.bmm(gyb_in, h_inb, out=gqb)
            grad_cum = mask.sum_rows(gqb * qb)
            gqb.baddbmm_(grad_w, kb)
            w.diagonal(dim1=1, dim2=2).add_(d.repeat(len(vb) // len(d)).unsqueeze(1))
            torch.bmm(kb * mask.out, grad_out.transpose(1, 2), out=gvb)
            gvb.baddbmm_(w.transpose(1, 2), gyb)

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
        return grad_q, grad_k, grad_v, grad_log_a, grad_scale, grad_gamma, grad_d, grad_h, None


class _Mask:
    """Decay weights of a block of chunks, for rows ordered (stream, token).

    strict   exp(cum_t - cum_s) for t > s, else 0         (K, H, Q, Q)
    into     exp(cum_t), from the incoming state           (K*H, R*Q, 1)
    out      exp(cum_Q - cum_s) scale_s, into the state    (K*H, R*Q, 1)
    carry    exp(cum_Q - cum_s)                            (K, H, Q)
    decay    exp(cum_Q)                                    (K, H, 1, 1)
    """

    def __init__(self, log_a: Tensor, scale: Tensor, gamma: Tensor, rows: int):
        self.size = log_a.shape[-1]
        self.rank = rows // self.size
        cum = log_a.cumsum(-1)
        # Differences are at most 0 but for rounding; clamped, exp cannot overflow, and the upper
        # triangle, which is thrown away, cannot either.
        self.strict = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).clamp_(max=0).exp_().tril_(-1)
        self.carry = (cum[..., -1:] - cum).clamp_(max=0).exp_()
        into = cum.exp()
        self.decay = into[..., -1, None, None]
        self.into = self._rows(into)
        self.out = self._rows(self.carry * scale)
        full = self.strict * scale.unsqueeze(-2)
        full.diagonal(dim1=-2, dim2=-1).copy_(gamma)
        # One row of streams written out, so that products run over long contiguous rows.
        self._tiled = full.repeat(1, 1, 1, self.rank).view(-1, 1, self.size * rows)

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

    def _rows(self, weight: Tensor) -> Tensor:
        return weight.repeat(1, 1, self.rank).view(-1, self.rank * self.size, 1)


def _blocks(steps, q: Tensor, v: Tensor) -> list[list[tuple[int, int]]]:
    """Group the steps of the recurrence over chunks, so that a block fills a cache, not more."""
    heads, rows = q.shape[1:3]
    enough = BLOCK_ELEMENTS // (heads * rows * max(q.shape[3], v.shape[3], rows))
    blocks, chunks = [[]], 0
    for start, stop in steps:
        if chunks >= max(enough, 1):
            blocks.append([])
            chunks = 0
        blocks[-1].append((start, stop))
        chunks += stop - start
    return [block for block in blocks if block]
