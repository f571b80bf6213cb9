"""Training on several processes, as torchrun starts them.

Every rank computes its rows of every batch. DistributedDataParallel averages the gradients, and the
optimizer shares the orthogonalisations out; losses and gradients are those of the whole batch, so
that a run is the same, but for rounding, at any number of ranks. Rank 0 writes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Steps after which ranks ask one another whether to stop, for which the host waits.
ASK_EVERY = 10


class Ranks(NamedTuple):
    """This process among those of a run."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all ranks to come here."""
        if self.world > 1:
            dist.barrier()

    def sum(self, t: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place; the host does not wait for it."""
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def largest(self, value: int, step: int, device: torch.device) -> int:
        """The largest of all ranks' numbers, asked in every `ASK_EVERY`th step; else 0."""
        if self.world == 1:
            return value
        if step % ASK_EVERY:
            return 0
        shared = torch.tensor(value, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)


@contextlib.contextmanager
def ranks_of(device: str) -> Iterator[Ranks]:
    """The ranks of this run: those that torchrun started, or this process alone.

    Args:
        device: "cpu", or "cuda", of which every rank takes one of its own.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
