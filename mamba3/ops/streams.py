"""Complex arithmetic on real pairs, and the streams of the MIMO form, as single ops.

A complex vector is N real channels. Pair i is channels (2i, 2i + 1) when interleaved, the layout
of SISO weights, or (i, i + N/2) otherwise, that of MIMO weights. An operand of 2S < N channels
holds the first S pairs; the others are left alone.

Each op is a public function over an autograd.Function whose backward is written out: Triton's
kernels on a GPU, torch's own ops elsewhere and in float64; torch.compile is given the formula.
Operands broadcast over the leading dimensions as torch's own do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .autograd import first_order, no_autocast, run
from .dispatch import on_kernels


def complex_mul(a: Tensor, b: Tensor, *, interleaved: bool = True) -> Tensor:
    """Multiply complex vectors held as real pairs.

    With b = (cos, sin) this is the rotation of B and C (arXiv 2603.15569, data-dependent RoPE).

    Args:
        a: (..., N), N even.
        b: (..., 2S) with 2S <= N; leading dimensions broadcast against a's.
        interleaved: pairs are (2i, 2i + 1), else (i, i + N/2) in a and (i, i + S) in b.

    Returns:
        (..., N): the first S pairs multiplied, the rest as in a.
    """
    _check_pairs(a, b)
    if torch.compiler.is_compiling():
        count = b.shape[-1] // 2
        (re, im), (cos, sin) = pairs(a, count, interleaved), pairs(b, count, interleaved)
        return _with_pairs(a, re * cos - im * sin, re * sin + im * cos, interleaved)
    return run(_ComplexMul, a, b, interleaved)


def complex_add(a: Tensor, b: Tensor, *, interleaved: bool = True) -> Tensor:
    """Add complex vectors held as real pairs; arguments and result as in `complex_mul`."""
    _check_pairs(a, b)
    if torch.compiler.is_compiling():
        count = b.shape[-1] // 2
        (re, im), (cos, sin) = pairs(a, count, interleaved), pairs(b, count, interleaved)
        return _with_pairs(a, re + cos, im + sin, interleaved)
    return run(_ComplexAdd, a, b, interleaved)


def broadcast_streams(x: Tensor, weight: Tensor) -> Tensor:
    """Make R streams of one: out_r = x * weight_r.

    Args:
        x: (..., H, P).
        weight: mimo_x or mimo_z, (H, R, P).

    Returns:
        (..., H, R, P).
    """
    if x.shape[-2:] != (weight.shape[0], weight.shape[2]):
        raise ValueError(
            f"expected x (..., H, P) for a weight (H, R, P) = {tuple(weight.shape)}, got "
            f"{tuple(x.shape)}"
        )
    if torch.compiler.is_compiling():
        return x.unsqueeze(-2) * weight
    return run(_BroadcastStreams, x, weight)


def mix_streams(y: Tensor, weight: Tensor) -> Tensor:
    """Mix R streams into one: out = sum_r y_r * weight_r.

    Args:
        y: (..., H, R, P).
        weight: mimo_o, (H, R, P).

    Returns:
        (..., H, P).
    """
    if y.shape[-3:] != weight.shape:
        raise ValueError(
            f"expected y (..., H, R, P) for a weight (H, R, P) = {tuple(weight.shape)}, got "
            f"{tuple(y.shape)}"
        )
    if torch.compiler.is_compiling():
        return (y * weight).sum(-2)
    return run(_MixStreams, y, weight)


@no_autocast
def complex_state_update(
    h: Tensor,
    v: Tensor,
    k: Tensor,
    decay: Tensor,
    phasor: Tensor | None = None,
    *,
    interleaved: bool = True,
) -> Tensor:
    """Advance the complex state by a token: decay, turn, and take in M outer products.

    out = decay * (phasor x h) + sum_m v_m k_m^T. The layer keeps its state in the rotated frame,
    where k carries the phase, and passes no phasor.

    Args:
        h: state, (..., H, P, N).
        v: values, (..., H, M, P).
        k: input maps, (..., H, M, N).
        decay: (..., H).
        phasor: complex factor along N, (..., H, 2S), as in `complex_mul`; None means 1.
        interleaved: how channels pair.

    Returns:
        The new state, (..., H, P, N).
    """
    if k.shape[:-1] != v.shape[:-1] or h.shape != (*v.shape[:-2], v.shape[-1], k.shape[-1]):
        raise ValueError(
            "expected h (..., H, P, N), v (..., H, M, P) and k (..., H, M, N), got "
            f"{tuple(h.shape)}, {tuple(v.shape)} and {tuple(k.shape)}"
        )
    if decay.shape != h.shape[:-2]:
        raise ValueError(f"decay has shape {tuple(decay.shape)}, expected {tuple(h.shape[:-2])}")
    if phasor is not None:
        h = complex_mul(h, phasor.unsqueeze(-2), interleaved=interleaved)
    if torch.compiler.is_compiling():
        return h * decay[..., None, None] + v.mT @ k
    return run(_StateUpdate, h, v, k, decay)


def pairs(t: Tensor, count: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views (..., count) of the real and imaginary channels of the first pairs of (..., N)."""
    if interleaved:
        return t[..., 0 : 2 * count : 2], t[..., 1 : 2 * count : 2]
    half = t.shape[-1] // 2
    return t[..., :count], t[..., half : half + count]


def turn_(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Multiply the first pairs of `t` (..., N) by cos + i sin (..., S), in place."""
    if cos.shape[-1] == 0:
        return
    if interleaved and _is_complex(t):
        head = t[..., : 2 * cos.shape[-1]].unflatten(-1, (-1, 2))
        torch.view_as_complex(head).mul_(torch.complex(cos, sin))
        return
    re, im = pairs(t, cos.shape[-1], interleaved)
    moved = re * sin
    re.mul_(cos).addcmul_(im, sin, value=-1)
    im.mul_(cos).add_(moved)


class _ComplexMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, interleaved):
        ctx.save_for_backward(a, b)
        ctx.interleaved, ctx.on_kernels = interleaved, on_kernels(a, b)
        if ctx.on_kernels:
            from .triton.streams import complex_forward

            return complex_forward(*_broadcast(a, b), interleaved, add=False)
        return _mul(a, b, interleaved)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        if ctx.on_kernels:
            from .triton.streams import complex_mul_backward

            rows = _broadcast(a, b)
            grad_a, grad_b = complex_mul_backward(grad.contiguous(), *rows, ctx.interleaved)
        else:
            grad_a, grad_b = _mul_backward(grad, a, b, ctx.interleaved)
        return grad_a.sum_to_size(a.shape), grad_b.sum_to_size(b.shape), None


class _ComplexAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, interleaved):
        ctx.shapes = a.shape, b.shape
        ctx.interleaved = interleaved
        if on_kernels(a, b):
            from .triton.streams import complex_forward

            return complex_forward(*_broadcast(a, b), interleaved, add=True)
        out = _spread(a, b)
        for mine, theirs in zip(
            pairs(out, b.shape[-1] // 2, interleaved),
            pairs(b, b.shape[-1] // 2, interleaved),
            strict=True,
        ):
            mine.add_(theirs)
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        a_shape, b_shape = ctx.shapes
        grad_b = grad.new_empty(*grad.shape[:-1], b_shape[-1])
        for mine, theirs in zip(
            pairs(grad_b, b_shape[-1] // 2, ctx.interleaved),
            pairs(grad, b_shape[-1] // 2, ctx.interleaved),
            strict=True,
        ):
            mine.copy_(theirs)
        return grad.sum_to_size(a_shape), grad_b.sum_to_size(b_shape), None


class _BroadcastStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.on_kernels = on_kernels(x, weight)
        if ctx.on_kernels:
            from .triton.streams import broadcast_forward

            ctx.shape = x.shape
            x, weight = x.reshape(-1, *x.shape[-2:]).contiguous(), weight.contiguous()
            ctx.save_for_backward(x, weight)
            return broadcast_forward(x, weight).view(*ctx.shape[:-2], *weight.shape)
        ctx.save_for_backward(x, weight)
        return x.unsqueeze(-2) * weight

    @staticmethod
    @first_order
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.on_kernels:
            from .triton.streams import broadcast_backward

            grad_x, grad_weight = broadcast_backward(grad.contiguous(), x, weight)
            return grad_x.view(ctx.shape), grad_weight
        grad_weight = (grad * x.unsqueeze(-2)).sum_to_size(weight.shape)
        return (grad * weight).sum(-2), grad_weight


class _MixStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weight):
        ctx.on_kernels = on_kernels(y, weight)
        if ctx.on_kernels:
            from .triton.gate import gate_forward

            ctx.shape = y.shape
            y, weight = y.reshape(-1, *y.shape[-3:]).contiguous(), weight.contiguous()
            ctx.save_for_backward(y, weight)
            dtype = torch.promote_types(y.dtype, weight.dtype)
            out = gate_forward(y, None, None, weight, None, 0.0, dtype)
            return out.view(*ctx.shape[:-2], -1)
        ctx.save_for_backward(y, weight)
        return (y * weight).sum(-2)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        y, weight = ctx.saved_tensors
        if ctx.on_kernels:
            from .triton.gate import gate_backward

            grads = gate_backward(grad.contiguous(), y, None, None, weight, None, 0.0)
            return grads[0].view(ctx.shape), grads[3]
        grad = grad.unsqueeze(-2)
        return grad * weight, (grad * y).sum_to_size(weight.shape)


class _StateUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, v, k, decay):
        ctx.on_kernels = on_kernels(h, v, k, decay)
        if ctx.on_kernels:
            from .triton.streams import state_update_forward

            h, v, k, decay = (t.contiguous() for t in (h, v, k, decay))
            ctx.save_for_backward(h, v, k, decay)
            return state_update_forward(h, v, k, decay)
        ctx.save_for_backward(h, v, k, decay)
        out = h * decay[..., None, None]
        out.view(-1, *out.shape[-2:]).baddbmm_(v.flatten(0, -3).transpose(1, 2), k.flatten(0, -3))
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        h, v, k, decay = ctx.saved_tensors
        if ctx.on_kernels:
            from .triton.streams import state_update_backward

            return state_update_backward(grad.contiguous(), h, v, k, decay)
        grad_decay = (grad * h).sum((-2, -1))
        return grad * decay[..., None, None], k @ grad.mT, v @ grad, grad_decay


def _mul(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    count = b.shape[-1] // 2
    if interleaved and count and _is_complex(a) and _is_complex(b):
        # One product of complex numbers; decoding is bound by the number of operations.
        z = torch.view_as_complex(a[..., : 2 * count].unflatten(-1, (count, 2)))
        z = torch.view_as_real(z * torch.view_as_complex(b.unflatten(-1, (count, 2)))).flatten(-2)
        if 2 * count == a.shape[-1]:
            return z
        return torch.cat((z, a[..., 2 * count :].expand(*z.shape[:-1], -1)), -1)
    out = _spread(a, b)
    turn_(out, *pairs(b, count, interleaved), interleaved)
    return out


def _mul_backward(grad: Tensor, a: Tensor, b: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    count = b.shape[-1] // 2
    re, im = pairs(b, count, interleaved)
    conj = torch.empty_like(b)
    conj_re, conj_im = pairs(conj, count, interleaved)
    conj_re.copy_(re)
    conj_im.copy_(-im)
    grad_a = _mul(grad, conj, interleaved)
    grad_re, grad_im = pairs(grad, count, interleaved)
    a_re, a_im = pairs(a, count, interleaved)
    grad_b = grad.new_empty(*grad.shape[:-1], b.shape[-1])
    full_re, full_im = pairs(grad_b, count, interleaved)
    full_re.copy_(grad_re * a_re + grad_im * a_im)
    full_im.copy_(grad_im * a_re - grad_re * a_im)
    return grad_a, grad_b


def _with_pairs(a: Tensor, re: Tensor, im: Tensor, interleaved: bool) -> Tensor:
    """`a` (..., N) with its first pairs replaced, in ops that torch differentiates."""
    count, half = re.shape[-1], a.shape[-1] // 2
    if interleaved:
        parts = torch.stack((re, im), -1).flatten(-2), a[..., 2 * count :]
    else:
        parts = re, a[..., count:half], im, a[..., half + count :]
    return torch.cat([t.expand(*re.shape[:-1], -1) for t in parts], -1).to(a.dtype)


def _is_complex(t: Tensor) -> bool:
    """Whether neighbouring channels can be viewed as complex numbers."""
    return t.is_contiguous() and t.dtype in (torch.float32, torch.float64)


def _spread(a: Tensor, b: Tensor) -> Tensor:
    """A copy of `a` (..., N), broadcast to b's leading dimensions."""
    return a.expand(*_leading(a, b), -1).clone(memory_format=torch.contiguous_format)


def _leading(a: Tensor, b: Tensor) -> torch.Size:
    """The leading dimensions of (..., N) and (..., 2S), broadcast."""
    return torch.broadcast_tensors(a[..., :1], b[..., :1])[0].shape[:-1]


def _broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`a` (..., N) and `b` (..., 2S), contiguous, over the same leading dimensions."""
    shape = _leading(a, b)
    return a.expand(*shape, -1).contiguous(), b.expand(*shape, -1).contiguous()


def _check_pairs(a: Tensor, b: Tensor) -> None:
    if a.shape[-1] % 2 or b.shape[-1] % 2 or b.shape[-1] > a.shape[-1]:
        raise ValueError(
            "expected real pairs: a (..., N) and b (..., 2S), both even and 2S <= N, got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
