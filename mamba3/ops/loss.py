"""linear_cross_entropy: the head and the loss in one, without ever holding all logits.

With V = 128256 tokens the logits of a batch are larger than the rest of the model together. Here a
chunk of their rows exists at a time: its losses are found, its gradient takes its place and goes
into x's and the weight's, and the next chunk takes that. On a GPU one Triton kernel makes losses
and gradient of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import compiled
from .autograd import autocast_dtype, first_order, no_autocast, run
from .dispatch import on_kernels

# Logits that exist at a time; 64 MB in float32.
CHUNK_ELEMENTS = 1 << 24
# On a GPU up to GPU_ROWS rows of them at least, while they are under 1 GiB: a chunk reads and
# writes the weight's whole gradient, which takes as long as its products for about 200 rows.
GPU_ROWS = 4096
GPU_BYTES = 1 << 30
# Rows of logits lie a multiple of this apart: products and the kernel read them in whole vectors,
# the kernel with whatever is between them.
ALIGNMENT = 16
# Since then, CUDA's addmm adds a product of half precision to a float32 matrix without rounding it.
ADDS_WIDE = torch.__version__ >= "2.11" and torch.version.hip is None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Mean cross-entropy of `labels` under softmax(x weight^T).

    The same number and gradients as `F.cross_entropy(x @ weight.T, labels)`, in float32 (float64
    when x is), for the memory of the gradients and of a chunk of logits: `CHUNK_ELEMENTS`, or up
    to `GPU_BYTES` on a GPU.

    Args:
        x: features, (T, D).
        weight: of the head, (V, D).
        labels: (T,) int64, each in [0, V) or `ignore_index`.
        ignore_index: label of rows that are not scored.

    Returns:
        The loss, a scalar; nan if no row is scored.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: labels of another dtype.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected x (T, D) and weight (V, D), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if labels.shape != x.shape[:1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected (T,) = {tuple(x.shape[:1])}"
        )
    if labels.dtype != torch.int64:
        raise TypeError(f"labels are {labels.dtype}, expected torch.int64")
    dtype = autocast_dtype(x)
    if torch.compiler.is_compiling():
        total = compiled.linear_cross_entropy(x, weight, labels, ignore_index, dtype)
    else:
        total = run(_LinearCrossEntropy, x, weight, labels, ignore_index, dtype)
    return total / (labels != ignore_index).sum()


@no_autocast
def total_and_gradients(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    wants_x: bool,
    wants_weight: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of all rows' losses, and its gradients: not the mean's, which half precision loses.

    Args:
        dtype: what the products are computed in; None is the dtype of x and weight.

    Returns:
        The sum and the weight's gradient, in float32 (float64 when x is), and x's, in its own.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    grad_x = torch.empty_like(x) if wants_x else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
    losses = torch.empty(len(x), dtype=wide, device=x.device)
    x, weight = (t.detach().to(dtype or t.dtype) for t in (x, weight))
    if on_kernels(x, weight):
        from .triton.loss import cross_entropy

        size = _chunk_rows(weight, x.dtype)
    else:
        cross_entropy = _cross_entropy
        size = _chunk_rows(weight, wide)
    room = empty_logits(min(size, len(x)), weight)
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        logits = torch.mm(x[rows], weight.T, out=room[: len(x[rows])])
        losses[rows], grad = cross_entropy(
            logits, labels[rows], ignore_index, wants_x or wants_weight
        )
        if wants_x:
            grad_x[rows] = grad @ weight
        if wants_weight:
            _add_product(grad_weight, grad.T, x[rows])
    return losses.sum(), grad_x, grad_weight


def _chunk_rows(weight: Tensor, dtype: torch.dtype) -> int:
    """How many rows of logits, held in `dtype`, exist at a time."""
    rows = CHUNK_ELEMENTS // len(weight)
    if weight.is_cuda:
        rows = max(rows, min(GPU_ROWS, GPU_BYTES // (len(weight) * dtype.itemsize)))
    return max(1, rows)


def empty_logits(rows: int, weight: Tensor) -> Tensor:
    """Room for rows of logits, as `ALIGNMENT` says."""
    width = -(-len(weight) // ALIGNMENT) * ALIGNMENT
    return weight.new_empty(rows, width)[:, : len(weight)]


def _cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """What `triton.loss.cross_entropy` does, on any device; the logits are lost all the same."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignored = (labels == ignore_index).unsqueeze(1)
    labels = labels.unsqueeze(1).masked_fill(ignored, 0)
    log_sum = wide.logsumexp(1, keepdim=True)
    losses = (log_sum - wide.gather(1, labels)).masked_fill_(ignored, 0).squeeze(1)
    if not differentiate:
        return losses, logits
    grad = wide.sub_(log_sum).exp_()
    grad.scatter_add_(1, labels, torch.full_like(log_sum, -1))
    return losses, grad.masked_fill_(ignored, 0).to(logits.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to `total`, which may be wider."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif ADDS_WIDE and a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def scaled(
    grad_x: Tensor | None, grad_weight: Tensor | None, grad: Tensor, dtypes: Sequence[torch.dtype]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients times the total's own, `grad`, multiplied in its dtype, in `dtypes`."""
    return tuple(
        None if t is None else (t.to(grad.dtype) * grad).to(dtype)
        for t, dtype in zip((grad_x, grad_weight), dtypes, strict=True)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of all rows' losses."""

    @staticmethod
    def forward(ctx, x, weight, labels, ignore_index, dtype):
        wanted = ctx.needs_input_grad[:2]
        total, *grads = total_and_gradients(x, weight, labels, ignore_index, *wanted, dtype)
        ctx.save_for_backward(*grads)
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return *scaled(*ctx.saved_tensors, grad, ctx.dtypes), None, None, None
