"""The recurrence over chunks as one autograd.Function; symbols as in `mamba3.ops.chunked`."""

from __future__ import annotations

import torch
from torch import Tensor

from .autograd import first_order
from .chunking import blocks, empty_split, rows_of
from .streams import pairs, turn_


class ChunkScan(torch.autograd.Function):
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
        h_in[: steps[0].count] = h0[: steps[0].count]
        per_chunk = heads * rank * size * max(n, headdim, rank * size)
        ctx.blocks = blocks(steps, per_chunk, x.device)
        for block in ctx.blocks:
            rows = rows_of(block)
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
        return y, final

    @staticmethod
    @first_order
    def backward(ctx, grad_y, grad_final):
        *inputs, log_a, scale, gamma, d, h_in = ctx.saved_tensors
        weights = (log_a, scale, gamma)
        heads, rank, _ = inputs[3].shape
        grad_y = grad_y.contiguous()
        grads = _Maps.zero_grads(inputs)
        grad_log_a, grad_scale, grad_gamma = (torch.empty_like(log_a) for _ in weights)
        grad_d = torch.zeros_like(d)
        grad_h = grad_final.clone()
        for block in reversed(ctx.blocks):
            rows = rows_of(block)
            maps = _Maps(inputs, rows)
            q, k, v = maps.forward()
            mask = _Mask(*(t[rows] for t in weights), rank)
            gy, h = grad_y[rows].flatten(0, 1), h_in[rows].flatten(0, 1)

            # States: walk the chunks backwards.
            gy_in = gy * mask.into
            read = torch.bmm(gy_in.transpose(1, 2), q).view_as(h_in[rows])
            grad_out = torch.empty_like(read)
            grad_total = torch.empty_like(scale[rows, :, 0])
            for step in reversed(block):
                here = slice(step.start - rows.start, step.stop - rows.start)
                later = grad_h[: step.count]
                grad_out[here] = later
                grad_total[here] = (later * h_in[step.start : step.stop]).sum((2, 3))
                torch.addcmul(read[here], later, mask.decay[here], out=later)
            grad_total *= mask.decay[..., 0, 0]
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
            grad_cum += (grad_mask * scale[rows].unsqueeze(2)).sum(3)
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
        whole = [empty_split(t.shape, t) for t in (x, b, c)]
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
            grad_bias += grad.sum(3).sum(0)
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


def widest(device: torch.device) -> torch.dtype:
    """The dtype for sums that must not lose precision; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
