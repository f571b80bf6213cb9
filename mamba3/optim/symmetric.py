"""symmetric_product: batched matrix products whose result is known to be symmetric.

    code    meaning                                                        shape
    p, q    factors, such that p q^T is symmetric                          (K, M, L)
    add     symmetric term                                                 (K, M, M)

Newton-Schulz iterations are made of them: X X^T and X^T X, b A + c A^2, and products of polynomials
of one matrix. Triton's kernel computes one triangle and mirrors it; the library computes both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import dispatch

# Least number of rows from which half of the work is worth more than the library's faster kernels:
# on an H200 the kernel is 1.08 times as fast at 1024 and 1.3 to 1.5 times from 1536 on, and 0.86
# times at 512.
KERNEL_ROWS = 1024
# On Blackwell the kernel may not load ahead of its products, see its configurations.
KERNEL_CAPABILITIES = (8, 9)


@torch.no_grad()
def symmetric_product(
    p: Tensor,
    q: Tensor,
    *,
    alpha: float = 1.0,
    add: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """alpha p q^T + beta add + diagonal I of every matrix, products summed in float32 at least.

    On Triton's kernel the result is bit for bit its own transpose; gradients are not recorded.

    Args:
        p, q: (K, M, L), such that p q^T is symmetric: the same tensor, or commuting symmetric
            matrices. Views like `x.mT` are read where they lie.
        alpha: factor of the product.
        add: (K, M, M), symmetric; None means no such term.
        beta: factor of `add`.
        diagonal: what is added to every diagonal element.
        out: contiguous (K, M, M) to write the result to, which may be `add`; None makes a new one.

    Returns:
        (K, M, M) in the dtype of p, which is bfloat16, float16, float32 or float64.

    Raises:
        ValueError: shapes that do not match, tensors on several devices, an `out` that is not
            contiguous or that is a factor.
        TypeError: dtypes that differ, or that are not floating point.

    Source: Newton-Schulz as in arXiv 2505.16932.
    """
    _check(p, q, add, out)
    if not beta:
        add = None
    if alpha and _takes_kernel(p):  # which divides by alpha
        from .triton.symmetric import symmetric_product as run
    else:
        run = _with_library
    return run(p, q, alpha=alpha, add=add, beta=beta, diagonal=diagonal, out=out)


def capability(device: torch.device) -> int:
    """Major compute capability of an NVIDIA GPU, else 0."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if nvidia else 0


def _with_library(p, q, *, alpha, add, beta, diagonal, out) -> Tensor:
    if add is None:
        add, beta = p.new_empty(1, 1, 1), 0.0
    out = torch.baddbmm(add, p, q.mT, beta=beta, alpha=alpha, out=out)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out


def _takes_kernel(p: Tensor) -> bool:
    """Where the kernel is asked for; where it is not, on GPUs and at sizes on which it pays."""
    if not p.numel() or not dispatch.on_kernels(p):
        return False
    if dispatch.requested() == "triton":
        return True
    return (
        p.dtype in (torch.bfloat16, torch.float16)
        and p.shape[1] >= KERNEL_ROWS
        and p.shape[1] % 8 == p.shape[2] % 8 == 0  # else nothing is loaded 16 bytes at a time
        and capability(p.device) in KERNEL_CAPABILITIES
    )


def _check(p: Tensor, q: Tensor, add: Tensor | None, out: Tensor | None) -> None:
    if p.dim() != 3 or p.shape != q.shape:
        raise ValueError(
            f"expected p and q of one shape (K, M, L), got {tuple(p.shape)} and {tuple(q.shape)}"
        )
    if not p.is_floating_point():
        raise TypeError(f"expected floating-point matrices, got {p.dtype}: convert them first")
    square = (len(p), p.shape[1], p.shape[1])
    for name, t in (("q", q), ("add", add), ("out", out)):
        if t is None:
            continue
        if t.dtype != p.dtype:
            raise TypeError(f"{name} is {t.dtype} and p is {p.dtype}: convert one of them")
        if t.device != p.device:
            raise ValueError(f"{name} is on {t.device} and p is on {p.device}: move one of them")
        if t is not q and t.shape != square:
            raise ValueError(f"expected {name} of shape {square}, got {tuple(t.shape)}")
    if out is None:
        return
    if not out.is_contiguous():
        raise ValueError(f"expected a contiguous out, got strides {out.stride()}")
    if out.data_ptr() in (p.data_ptr(), q.data_ptr()):
        raise ValueError("out is one of the factors, which are still read while it is written")
