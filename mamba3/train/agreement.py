"""Agreement: what ranks do together, so that what fails on one of them fails on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mamba3.train.parallel import Ranks

# How long ranks wait for one that is still at work, or has gone without a sign.
PATIENCE = timedelta(minutes=30)


class Agreement:
    """A call is one round, which every rank takes part in, all of them in the same order.

    Args:
        ranks: of the run, all of which make an agreement. It has a process group of its own, on the
            CPU, so that a thread may have rounds while others exchange gradients.
    """

    def __init__(self, ranks: Ranks):
        self.rank, self.world = ranks.rank, ranks.world
        self._group = None
        if self.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def __call__(
        self,
        make: Callable[[], Any] = lambda: None,
        decide: Callable[[list], list | None] = lambda made: None,
    ) -> Any:
        """What the first rank decides for this one, once every rank has made its part.

        Args:
            make: called by every rank.
            decide: called by the first rank with what all have made, unless one of them failed;
                gives every rank's answer, or None, which is then the answer to all.

        Raises:
            OSError: a call failed on another rank; what fails on this one is raised as it is.
        """
        made = fault = failure = answers = None
        try:
            made = make()
        except Exception as error:
            failure, fault = error, self._told(error)
        everyone = self._gathered((made, fault))
        if everyone is not None:
            fault = "; ".join(fault for _, fault in everyone if fault)
            decided = None
            if not fault:
                try:
                    decided = decide([made for made, _ in everyone])
                except Exception as error:
                    failure, fault = error, self._told(error)
            answers = [(answer, fault) for answer in decided or [None] * self.world]
        answer, fault = self._scattered(answers)
        if fault:
            raise failure or OSError(fault)
        return answer

    def _told(self, error: Exception) -> str:
        return f"rank {self.rank}: {type(error).__name__}: {error}"

    def _gathered(self, value: Any) -> list | None:
        """All ranks' values, on the first rank."""
        if self.world == 1:
            return [value]
        values = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def _scattered(self, values: list | None) -> Any:
        """This rank's one of the first rank's values."""
        if self.world == 1:
            return values[0]
        own = [None]
        dist.scatter_object_list(own, values, src=0, group=self._group)
        return own[0]
