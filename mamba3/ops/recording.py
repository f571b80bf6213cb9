"""What a recorded CUDA graph reads besides its arguments, and so has to keep alive.

Kernels read tables that are made once and cached. A cache forgets; a graph goes on reading at the
addresses that it was recorded with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_under_way: list[list[Any]] = []


@contextlib.contextmanager
def keeping() -> Iterator[list[Any]]:
    """A list of all that is kept meanwhile, on any thread; hold it for as long as the graph."""
    kept: list[Any] = []
    _under_way.append(kept)
    try:
        yield kept
    finally:
        _under_way[:] = [other for other in _under_way if other is not kept]


def capturing(device: torch.device) -> bool:
    """Whether the device's work is being recorded, so that the host cannot wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep(value: Any) -> None:
    """Have recordings that are under way keep what they read."""
    for kept in _under_way:
        kept.append(value)
