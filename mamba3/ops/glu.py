"""silu_gated: what a gated MLP does between its two products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import first_order, run
from .dispatch import on_kernels


def silu_gated(x: Tensor) -> Tensor:
    """value * silu(gate), with [value | gate] = x.

    On a GPU one Triton kernel a pass, computed in float32; the backward pass keeps x alone.

    Args:
        x: (..., 2 W).

    Returns:
        (..., W), in x's dtype.

    Raises:
        ValueError: an odd number of channels.

    Source: Shazeer, arXiv 2002.05202, SwiGLU without its products.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"expected x (..., 2 W), got {tuple(x.shape)}")
    if not torch.compiler.is_compiling() and on_kernels(x):
        return run(_SiluGated, x)
    value, gate = x.chunk(2, dim=-1)
    return value * F.silu(gate)


class _SiluGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        from .triton.glu import glu_forward

        x = x.contiguous()
        ctx.save_for_backward(x)
        return glu_forward(x)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        from .triton.glu import glu_backward

        return glu_backward(grad.contiguous(), *ctx.saved_tensors)
