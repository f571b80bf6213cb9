"""Streams whose batch i holds i. Workers import them, so they stand apart from what tests need."""

from __future__ import annotations

import os
import signal
import time

import torch

from mamba3.data.problems import Batch


class Numbers:
    """Batch i is made in some seconds, some batches at once."""

    def __init__(self, seconds: float = 0.0, at_once: int = 1):
        self.seconds, self.batches_at_once = seconds, at_once

    def __call__(self, index: int) -> Batch:
        time.sleep(self.seconds)
        ids = torch.full((2, 3), index)
        return Batch(ids, ids, 6)


class Wide(Numbers):
    """Numbers of several types and sizes; those of batch 5 have a shape of their own."""

    def __call__(self, index: int) -> tuple:
        values = torch.arange(3 + (index == 5)) - 2
        return (
            values * 30 + index,
            (values + (index << 40), index / 3, None),
            values.to(torch.int16),
            torch.tensor(index / 7),
            values > 0,
        )


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
