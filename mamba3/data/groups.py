"""Groups: batches that are made, sent and copied to a GPU together.

A batch is a tensor or array, or tuples of such and of other values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Batches of a group, at most.
MOST = 32


def together(size: int, wanted: int) -> int:
    """How many batches of a size a stream makes at once, for so many things in all."""
    return max(1, min(MOST, wanted // size))


class Failure(NamedTuple):
    """Why there is no batch, as text, since not every exception can be sent."""

    error: str
    trace: str


class Group(NamedTuple):
    """Batches that are made and sent together.

    content: the batches; or, if they are stacked, one whose tensors hold those of all, one after
        the other, and whose other values are lists.
    count: how many they are.
    """

    content: tuple
    count: int
    stacked: bool

    @property
    def failed(self) -> bool:
        """Whether there are no more because one could not be made."""
        return not self.stacked and isinstance(self.content[-1], Failure)

    @classmethod
    def of(cls, made: Sequence) -> Group:
        """Batches of arrays, the last of which may be a `Failure`."""
        first = _shapes(made[0])
        alike = _has_arrays(made[0]) and all(_shapes(batch) == first for batch in made)
        return cls(_stacked(made, {}) if alike else tuple(made), len(made), alike)

    def batches(self) -> Sequence:
        """One by one, of tensors."""
        return _unstacked(self.content, self.count, {}) if self.stacked else self.content


def each(batch: Any, kind: type, function: Callable) -> Any:
    """The batch, of nested tuples, with a function of each thing of a kind in it.

    What is in it twice, as ids that are their own labels, stays the same thing.
    """
    return _each(batch, kind, function, {})


def _each(batch: Any, kind: type, function: Callable, seen: dict[int, Any]) -> Any:
    if isinstance(batch, kind):
        if id(batch) not in seen:
            seen[id(batch)] = function(batch)
        return seen[id(batch)]
    if not isinstance(batch, tuple):
        return batch
    return _like(batch, [_each(item, kind, function, seen) for item in batch])


def _like(batch: tuple, items: Sequence) -> tuple:
    """A tuple of the same type."""
    return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)


def _shapes(batch: Any) -> Any:
    """What batches that can be stacked have in common."""
    if isinstance(batch, np.ndarray):
        return batch.shape, batch.dtype
    return (type(batch), *map(_shapes, batch)) if isinstance(batch, tuple) else type(batch)


def _has_arrays(batch: Any) -> bool:
    if isinstance(batch, tuple):
        return any(map(_has_arrays, batch))
    return isinstance(batch, np.ndarray)


def _stacked(batches: Sequence, seen: dict[tuple[int, ...], Any]) -> Any:
    """Batches as one; arrays that have been met before are what they were then."""
    first = batches[0]
    if isinstance(first, np.ndarray):
        key = tuple(map(id, batches))
        if key not in seen:
            seen[key] = _narrow(np.stack(batches))
        return seen[key]
    if not isinstance(first, tuple):
        return list(batches)
    return _like(first, [_stacked(items, seen) for items in zip(*batches, strict=True)])


class _Narrow(NamedTuple):
    """int64 that travels in fewer bytes."""

    values: np.ndarray | Tensor


def _narrow(values: np.ndarray) -> np.ndarray | _Narrow:
    if values.dtype != np.int64 or not values.size:
        return values
    least, most = values.min(), values.max()
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return _Narrow(values.astype(dtype))
    return values


def _unstacked(content: Any, count: int, seen: dict[int, Sequence]) -> Sequence:
    """The batches that `_stacked` was given."""
    if isinstance(content, (_Narrow, Tensor)):
        narrow = isinstance(content, _Narrow)
        tensor = content.values if narrow else content
        if id(tensor) not in seen:
            seen[id(tensor)] = (tensor.to(torch.int64) if narrow else tensor).unbind()
        return seen[id(tensor)]
    if isinstance(content, list):
        return content
    items = [_unstacked(item, count, seen) for item in content]
    return [_like(content, [those[i] for those in items]) for i in range(count)]
