"""Streams whose batch i holds i. Workers import them, so they stand apart from what tests need."""

from __future__ import annotations

import os
import signal
import time

import torch

from mamba3.data.problems import Batch


class Numbers:
    """Batch i is made in some seconds."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    def __call__(self, index: int) -> Batch:
        time.sleep(self.seconds)
        ids = torch.full((2, 3), index)
        return Batch(ids, ids, 6)


class Failing(Numbers):
    """Batch 4 cannot be made."""

    def __call__(self, index: int) -> Batch:
        if index == 4:
            raise KeyError("no such row")
        return super().__call__(index)


class Deadly(Numbers):
    """Batch 4 kills what makes it."""

    def __call__(self, index: int) -> Batch:
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(index)
