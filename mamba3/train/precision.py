"""What a step computes in: float32, half precision by autocast, or bfloat16 weights.

| name | weights | products | optimizer |
|---|---|---|---|
| float32 | float32 | float32 | float32 |
| bf16 | float32 | bfloat16 | float32 |
| fp16 | float32 | float16, the loss scaled | float32 |
| bf16-weights | bfloat16 and 16 exact extra bits | bfloat16 | float32 |

Norms, states, decays and the loss are float32 in all of them.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

PRECISIONS = ("float32", "bf16", "fp16", "bf16-weights")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """The context of forward passes; its casts of weights are made anew in every one of them."""
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


class LossScaler:
    """The factor on the loss that keeps float16's gradients from rounding to zero.

    It is halved by a step whose gradients overflow, which the optimizer leaves out, and doubled
    after `interval` steps without one. All of it happens on the device: no step waits for the host,
    and a CUDA graph may hold it.

    Args:
        device: of the loss.
        initial: first factor.
        interval: steps without overflow before the factor is doubled.
    """

    def __init__(self, device: torch.device, *, initial: float = 2.0**16, interval: int = 2000):
        self.scale = torch.full((), initial, device=device)
        self.good_steps = torch.zeros((), device=device)
        self.interval = interval

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to go backward from."""
        return loss * self.scale

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Learn whether the gradients of a step were finite."""
        good = (self.good_steps + 1) * finite
        grown = good >= self.interval
        factor = torch.where(finite.bool(), torch.where(grown, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(min=1.0, max=2.0**24)
        self.good_steps.copy_(torch.where(grown, 0.0, good))

    def state_dict(self) -> dict[str, float]:
        """The factor and the steps since its last change."""
        return {"scale": self.scale.item(), "good_steps": self.good_steps.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a state."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["good_steps"])
