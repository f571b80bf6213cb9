"""rms_norm and add_rms_norm: root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import first_order, run
from .dispatch import on_kernels


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise by the root mean square: x / sqrt(mean(x^2) + eps) * weight, then * silu(gate).

    Computed in float32 (float64 when x is), with a backward pass of its own, which moves half the
    bytes of the composed one. On a GPU each pass is one Triton kernel.

    Args:
        x: (..., N).
        weight: broadcasts to x; usually (N,).
        eps: added to the mean square.
        gate: of x's shape; None means no gate.
        dtype: of the result; None is the weight's.

    Returns:
        The shape of x.

    Raises:
        ValueError: shapes that do not fit.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """
    _check(x, weight, "gate", gate)
    wide = torch.promote_types(x.dtype, torch.float32)
    if torch.compiler.is_compiling():
        out = x.to(wide)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    elif on_kernels(x, weight, gate):
        return run(_FusedRMSNorm, x, weight, gate, None, eps, dtype)[0]
    else:
        out = run(_RMSNorm, x.to(wide), weight.to(wide), eps)
    if gate is not None:
        out = out * F.silu(gate.to(wide))
    return out.to(dtype or weight.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalise the sum.

    Args:
        x: what a layer adds, (..., N).
        residual: the stream, of x's shape.
        weight, eps, dtype: as in `rms_norm`.

    Returns:
        rms_norm(x + residual), and x + residual in the residual's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(x, weight, "residual", residual)
    if not torch.compiler.is_compiling() and on_kernels(x, weight, residual):
        return run(_FusedRMSNorm, x, weight, None, residual, eps, dtype)
    summed = (x + residual).to(residual.dtype)
    return rms_norm(summed, weight, eps, dtype=dtype), summed


def _check(x: Tensor, weight: Tensor, name: str, like_x: Tensor | None) -> None:
    fits = 0 < weight.dim() <= x.dim() and weight.shape[-1] == x.shape[-1]
    if fits and weight.dim() > 1:
        sizes = zip(weight.shape, x.shape[-weight.dim() :], strict=True)
        fits = all(w in (1, n) for w, n in sizes)
    if not fits:
        raise ValueError(
            f"expected x (..., N) and a weight that broadcasts to it, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if like_x is not None and like_x.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(like_x.shape)}, expected {tuple(x.shape)}")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad_weight = (grad * normed).sum_to_size(weight.shape)
        grad = grad * weight
        share = (grad * normed).sum(-1, keepdim=True).div_(-x.shape[-1])
        return grad.addcmul_(normed, share).mul_(scale), grad_weight, None


class _FusedRMSNorm(torch.autograd.Function):
    """Returns the normed rows, and their sum with the residual where there is one."""

    @staticmethod
    def forward(ctx, x, weight, gate, residual, eps, dtype):
        from .triton.norm import find_rows, norm_forward

        gate, residual = (None if t is None else t.contiguous() for t in (gate, residual))
        table, axes = _table(weight, x)
        x, rows = find_rows(x, axes)
        out, summed, rstd = norm_forward(x, rows, table, gate, residual, eps, dtype)
        ctx.dtype, ctx.weight_shape, ctx.axes = x.dtype, weight.shape, axes
        if summed is not None:
            x, rows = find_rows(summed, axes)
        ctx.rows = rows
        ctx.save_for_backward(x, table, gate, rstd)
        return out, summed

    @staticmethod
    @first_order
    def backward(ctx, grad, grad_summed):
        from .triton.norm import norm_backward

        x, table, gate, rstd = ctx.saved_tensors
        grad = grad.contiguous()
        grad_summed = None if grad_summed is None else grad_summed.contiguous()
        grad_x, grad_weight, *others = norm_backward(
            grad, grad_summed, x, ctx.rows, table, gate, rstd, ctx.dtype
        )
        if ctx.axes:
            ones = (1,) * (x.dim() - 1 - ctx.axes[1])
            grad_weight = grad_weight.view(*table.shape[:-1], *ones, -1)
        return grad_x, grad_weight.sum_to_size(ctx.weight_shape), *others, None, None


def _table(weight: Tensor, x: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """The weight, one row after the other, and [first, stop) of x's dimensions that they follow."""
    lead = (1,) * (x.dim() - weight.dim()) + weight.shape[:-1]
    varying = [i for i, n in enumerate(lead) if n != 1]
    if not varying:
        return weight.contiguous(), None
    first, stop = varying[0], varying[-1] + 1
    table = weight.reshape(*lead[first:stop], -1).expand(*x.shape[first:stop], -1)
    return table.contiguous(), (first, stop)
