"""steering: what steers the recurrence, from the rows of the projection that are a scalar each.

dt = softplus(dd_dt + dt_bias),  a = -max(f(dd_a), floor),  lam = sigmoid(trap)
rate = pi tanh(angle),  f(r) = 1 + r, or 1 / (1 - r) for r < 0; or softplus(r)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import first_order, run
from .dispatch import on_kernels


def steering(
    raw: Tensor, dt_bias: Tensor, activation: str, floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step sizes, decay rates, weights of the current token, and rotations.

    On a GPU, where these are small and many, one Triton kernel a pass.

    Args:
        raw: [dd_dt | dd_a | trap | angle], (..., 3 H + S), possibly rows of a wider projection.
        dt_bias: (H,), in float32 or wider.
        activation: f of the decay rates, "heavy_tail" or "softplus".
        floor: decay rates are at most -floor.

    Returns:
        dt, a and lam (..., H), and rate (..., S), in dt_bias's dtype.

    Source: arXiv 2603.15569, and the official layer for f.
    """
    if not torch.compiler.is_compiling() and on_kernels(raw, dt_bias):
        return run(_Steering, raw, dt_bias, activation, floor)
    heads = len(dt_bias)
    sizes = (heads,) * 3 + (raw.shape[-1] - 3 * heads,)
    dd_dt, dd_a, trap, angle = (t.to(dt_bias.dtype) for t in raw.split(sizes, dim=-1))
    dt = F.softplus(dd_dt + dt_bias)
    return dt, _decay_rate(dd_a, activation, floor), trap.sigmoid(), angle.tanh() * math.pi


def _decay_rate(raw: Tensor, activation: str, floor: float) -> Tensor:
    if activation == "heavy_tail":
        # Both branches in one expression; clamp and relu split the gradient at 0 between them.
        f = F.relu(raw) + torch.reciprocal(1 - raw.clamp(max=0))
    else:
        f = F.softplus(raw)
    return -f.clamp(min=floor)


class _Steering(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, dt_bias, activation, floor):
        from .triton.launch import token_rows
        from .triton.steering import steering_forward

        raw, dt_bias = token_rows(raw, 1), dt_bias.contiguous()
        ctx.save_for_backward(raw, dt_bias)
        ctx.options = activation == "heavy_tail", floor
        return steering_forward(raw, dt_bias, *ctx.options)

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        from .triton.steering import steering_backward

        grads = (grad.contiguous() for grad in grads)
        return *steering_backward(grads, *ctx.saved_tensors, *ctx.options), None, None
