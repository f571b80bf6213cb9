"""SkippedSteps: how many steps were left out, known to the device first and to the host later."""

from __future__ import annotations

import torch
from torch import Tensor


class SkippedSteps:
    """Counts steps that were left out.

    Args:
        device: where the count is.
    """

    def __init__(self, device: torch.device):
        self._count = torch.zeros((), dtype=torch.float32, device=device)
        self._copy = torch.zeros((), dtype=torch.float32, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None

    def add(self, skip: Tensor) -> None:
        """Count a step if `skip`, of no dimension, is 1, and not if it is 0."""
        self._count.add_(skip.to(self._count.device, non_blocking=True))

    def __int__(self) -> int:
        """The count, which the host waits for."""
        return int(self._count)

    def any_before(self) -> bool:
        """Whether there were any when an earlier call looked; nothing is waited for."""
        if self._copied is not None and not self._copied.query():
            return False
        found = bool(self._copy)
        self._copy.copy_(self._count, non_blocking=True)
        if self._count.is_cuda:
            self._copied = torch.cuda.current_stream(self._count.device).record_event()
        return found
