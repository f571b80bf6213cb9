"""CachedStep: whole training steps recorded once for each structure, and replayed.

A step of a small model is a thousand short kernels, and the host takes longer to launch them than
the GPU to run them. Recorded as one CUDA graph, forward, backward, clipping and optimizer start by
a single call; learning rates, decays and data are read from where they were, with new values.

What a recording depends on is its key: shapes, precision, which parameters train, where everything
lies. A step of another key is recorded anew; what cannot be recorded runs as it is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mamba3.cuda_graph import record
from mamba3.data.problems import Batch
from mamba3.ops.dispatch import backend
from mamba3.train.parts import Part
from mamba3.train.step import StepOutput, TrainStep

logger = logging.getLogger(__name__)

# Steps of a key that run as they are before it is recorded: they compile, and make what is kept.
WARM_UP = 2
# DistributedDataParallel sorts its buckets anew after the first, and takes times in the first ten.
RANKS_WARM_UP = 11
# Keys whose recordings are kept; the one that was not used for longest goes first.
BOUND = 16


# How to record, by the type of the device, and a pool to do it in. Elsewhere steps run as they are.
RECORDERS: dict[str, tuple[Callable, Callable]] = {"cuda": (record, torch.cuda.graph_pool_handle)}


class CachedStep:
    """Makes the steps of a `TrainStep`, by recordings where there can be one.

    Args:
        step: what a step is.
        records: whether recordings are wanted.

    Attributes:
        new: whether the last step was among the first of its kind, which take memory.
        warm_up: how many steps of a kind run as they are before one is recorded.

    What it returns is overwritten by the next step.
    """

    def __init__(self, step: TrainStep, *, records: bool = True):
        self.step, self.new = step, True
        recorders = RECORDERS if records else {}
        self._record, pool = recorders.get(step.device.type, (None, None))
        self._pool = pool() if pool else None
        self._seen: OrderedDict[tuple, int] = OrderedDict()
        self._recorded: OrderedDict[tuple, Recording] = OrderedDict()
        ddp = isinstance(step.forward, DistributedDataParallel)
        self.warm_up = RANKS_WARM_UP if ddp else WARM_UP
        if self._record is not None and not step.recordable:
            self._give_up(
                "what ranks exchange depends on the host (of step.parallel, only fsdp does so)"
            )

    @property
    def recordings(self) -> int:
        """How many recordings are kept."""
        return len(self._recorded)

    def __call__(self, batch: Batch) -> StepOutput:
        """Make a step on a batch."""
        return self.make(self.step.parts(batch))

    def make(self, parts: Sequence[Part]) -> StepOutput:
        """Make a step on parts that are on the device."""
        step = self.step
        step.optimizer.advance()
        key = self.key(parts) if self._record else _shapes(parts)
        known = self._recorded.get(key)
        self.new = known is None and self._is_new(key)
        if known is not None:
            self._recorded.move_to_end(key)
            return known(parts)
        if self.new or self._record is None:
            return step.run(parts)
        self.new = True
        return self._first(key, parts)

    def _is_new(self, key: tuple) -> bool:
        """Whether a step of this key still warms up."""
        seen = self._seen[key] = self._seen.pop(key, 0) + 1
        while len(self._seen) > 4 * BOUND:
            self._seen.popitem(last=False)
        return seen <= self.warm_up

    def _first(self, key: tuple, parts: Sequence[Part]) -> StepOutput:
        """Record a key's step, and make it."""
        try:
            recording = Recording(self.step, parts, self._record, self._pool)
        except Exception as error:  # whatever it is, the step itself works, or says what is wrong
            self._give_up(f"recording one failed with {type(error).__name__}: {error}")
            return self.step.run(parts)
        while len(self._recorded) >= BOUND:
            self._recorded.popitem(last=False)
        self._recorded[key] = recording
        return recording(parts)

    def _give_up(self, why: str) -> None:
        logger.warning("steps run without a CUDA graph, which would be faster: %s", why)
        self._record = None

    def key(self, parts: Sequence[Part]) -> tuple:
        """All that a recording depends on but for values."""
        step, groups = self.step, self.step.optimizer.param_groups
        modules = list(_modules(step.model))
        every = (p for module in modules for p in module._parameters.values() if p is not None)
        return (
            *_shapes(parts),
            *((p.data_ptr(), p.dtype, p.requires_grad) for p in every),
            *(module.training for module in modules),
            *((group["betas"], group["eps"], len(group["params"])) for group in groups),
            (step.precision, step.grad_clip, step.accumulate),
            (backend(step.device), torch.are_deterministic_algorithms_enabled()),
        )


def _shapes(parts: Sequence[Part]) -> tuple:
    return tuple((t.shape, t.dtype) for part in parts for t in part.tensors)


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all within, for a tenth of what `modules()` takes: it is asked every step."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)


class Recording:
    """A recorded step, and the buffers that it reads its batch from."""

    def __init__(self, step: TrainStep, parts: Sequence[Part], record: Callable, pool: Any):
        self._parts = [Part(*(None if t is None else t.clone() for t in part)) for part in parts]
        options = {} if step.stream is None else {"stream": step.stream}
        self._replay = record(lambda: step.run(self._parts), step.device, pool=pool, **options)

    def __call__(self, parts: Sequence[Part]) -> StepOutput:
        """Make the step on a batch."""
        for mine, given in zip(self._parts, parts, strict=True):
            for buffer, t in zip(mine.tensors, given.tensors, strict=True):
                buffer.copy_(t, non_blocking=True)
        return self._replay()
