"""linear_cross_entropy: the head and the loss in one, without ever holding all logits.

With V = 128256 tokens the logits of a batch are larger than the rest of the model together. Here a
few rows of them exist at a time: their loss is added up, their gradient goes into x's and the
weight's at once, and they are overwritten by the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import compiled
from .autograd import first_order, run

# Logits that exist at a time; 64 MB in float32.
CHUNK_ELEMENTS = 1 << 24


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Mean cross-entropy of `labels` under softmax(x weight^T).

    The same number and gradients as `F.cross_entropy(x @ weight.T, labels)`, in float32 (float64
    when x is), for the memory of `CHUNK_ELEMENTS` logits and the gradients.

    Args:
        x: features, (T, D).
        weight: of the head, (V, D).
        labels: (T,) int64, each in [0, V) or `ignore_index`.
        ignore_index: label of rows that are not scored.

    Returns:
        The loss, a scalar; nan if no row is scored.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected x (T, D) and weight (V, D), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if labels.shape != x.shape[:1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected (T,) = {tuple(x.shape[:1])}"
        )
    if torch.compiler.is_compiling():
        return compiled.linear_cross_entropy(x, weight, labels, ignore_index)
    return run(_LinearCrossEntropy, x, weight, labels, ignore_index)


def loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss and its gradients; the weight's in float32 (float64 when x is), x's in its own."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # Of a parameter, autocast would keep the cast made here, without a gradient, for later uses.
    weight = weight.detach()
    scored = labels != ignore_index
    labels = labels.masked_fill(~scored, 0).unsqueeze(1)
    count = scored.sum()
    scored = scored.to(wide).unsqueeze(1)
    grad_x = torch.empty_like(x) if wants_x else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
    loss = torch.zeros((), dtype=wide, device=x.device)
    size = max(1, CHUNK_ELEMENTS // len(weight))
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        logits = (x[rows] @ weight.T).to(wide)
        log_sum = logits.logsumexp(1, keepdim=True)
        loss += ((log_sum - logits.gather(1, labels[rows])) * scored[rows]).sum()
        if not (wants_x or wants_weight):
            continue
        grad = logits.sub_(log_sum).exp_()
        grad.scatter_add_(1, labels[rows], torch.full_like(log_sum, -1))
        grad = grad.mul_(scored[rows] / count).to(x.dtype)
        if wants_x:
            grad_x[rows] = grad @ weight
        if wants_weight:
            grad_weight += grad.T @ x[rows]
    return loss / count, grad_x, grad_weight


def scaled(
    grad_x: Tensor | None, grad_weight: Tensor | None, grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the loss times its own, `grad`; the weight's in the weight's `dtype`."""
    if grad_x is not None:
        grad_x = grad_x * grad.to(grad_x.dtype)
    if grad_weight is not None:
        grad_weight = (grad_weight * grad).to(dtype)
    return grad_x, grad_weight


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, ignore_index):
        wanted = getattr(ctx, "needs_input_grad", (False, False))[:2]
        loss, *grads = loss_and_gradients(x, weight, labels, ignore_index, *wanted)
        ctx.save_for_backward(*grads)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return *scaled(*ctx.saved_tensors, grad, ctx.weight_dtype), None, None
