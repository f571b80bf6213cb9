"""gate_and_mix: head norm, gate and stream mix of a scan's output, in one pass over it.

    code            meaning                                     shape
    y               outputs of the scan, per stream             (..., H, R, P)
    z               gate                                        (..., H, P)
    mimo_z, mimo_o  streams of the gate, mix of the outputs     (H, R, P)
    norm_weight     RMSNorm over each head's channels           (H, P)

It is the triton backend's; elsewhere the scan does the same with torch's own ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .autograd import first_order, run


def gate_and_mix(
    y: Tensor,
    z: Tensor | None,
    mimo_z: Tensor | None,
    mimo_o: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """out = sum_r norm(y_r) * silu(z * mimo_z_r) * mimo_o_r, in float32 inside.

    Args:
        y: (..., H, R, P), in bfloat16, float16 or float32.
        z: (..., H, P), possibly rows of a wider projection; None means no gate.
        mimo_z, mimo_o: (H, R, P); None means a factor of 1, and R = 1 without mimo_o.
        norm_weight: (H, P); None means no norm.
        norm_eps: epsilon of that norm.

    Returns:
        (..., H, P) in y's dtype; differentiable in every tensor.

    Source: arXiv 2603.15569; `mamba3.ops.reference.gate_and_mix` writes it out.
    """
    assert y.dtype != torch.float64, "the kernel computes in float32"
    assert mimo_o is not None or y.shape[-2] == 1, "streams without a mix"
    if z is None and mimo_o is None and norm_weight is None:
        return y.squeeze(-2)
    return run(_GateAndMix, y, z, mimo_z, mimo_o, norm_weight, norm_eps)


class _GateAndMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, z, mimo_z, mimo_o, norm_weight, norm_eps):
        from .triton.gate import gate_forward
        from .triton.launch import token_rows

        y, mimo_z, mimo_o, norm_weight = (
            None if t is None else t.contiguous() for t in (y, mimo_z, mimo_o, norm_weight)
        )
        z = None if z is None else token_rows(z, 2)
        ctx.save_for_backward(y, z, mimo_z, mimo_o, norm_weight)
        ctx.norm_eps = norm_eps
        return gate_forward(y, z, mimo_z, mimo_o, norm_weight, norm_eps, y.dtype)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        from .triton.gate import gate_backward

        return *gate_backward(grad.contiguous(), *ctx.saved_tensors, ctx.norm_eps), None
