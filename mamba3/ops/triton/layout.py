"""Where chunks of tokens, and segments of chunks, lie in the tokens of all sequences; devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Layout(NamedTuple):
    """Where chunks and segments of chunks lie; see the legend of `mamba3.ops.triton.chunk`.

    bounds: of the sequences in the tokens, (sequences + 1,) int64.
    """

    table: Tensor
    segments: Tensor
    sequences: Tensor
    bounds: Tensor


class Sizes(NamedTuple):
    """Of a layout.

    size: tokens of a chunk.
    per_segment: chunks of a segment, or fewer.
    chunks, segments: how many there are.
    """

    size: int
    per_segment: int
    chunks: int
    segments: int

    @classmethod
    def of_bounds(cls, bounds: Sequence[int], size: int, per_sequence: int) -> Sizes:
        """With no more chunks than needed, and about `per_sequence` segments for a sequence."""
        counts = [-(-(stop - start) // size) for start, stop in pairwise(bounds)]
        per_segment = max(1, -(-max(counts) // per_sequence))
        segments = sum(max(1, -(-count // per_segment)) for count in counts)
        return cls(size, per_segment, sum(counts), segments)

    @classmethod
    def of_any(cls, sequences: int, tokens: int, size: int, walks: int) -> Sizes:
        """Enough for any bounds of so many sequences, in segments for about so many walks.

        What is too many are chunks without a token, at the end of the last sequence.
        """
        chunks = tokens // size + sequences
        per_segment = -(-chunks // max(1, walks))
        return cls(size, per_segment, chunks, sequences + chunks // per_segment)


# Layouts are kept, since they are read back to back by all layers of a model and all steps of a
# training run.


@functools.lru_cache(maxsize=64)
def layout(bounds: Sequence[int], size: int, per_sequence: int, device: torch.device) -> Layout:
    """Lay sequences out in chunks of `size` tokens and about `per_sequence` segments each."""
    return layout_of(bounds, Sizes.of_bounds(bounds, size, per_sequence), device)


@functools.lru_cache(maxsize=64)
def layout_of(bounds: Sequence[int], sizes: Sizes, device: torch.device) -> Layout:
    """The layout of bounds that the host knows."""
    return Layout(*(t.to(device) for t in _tables(torch.tensor(list(bounds)), sizes)))


# By bounds on the device: their version, and layouts by sizes.
_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def layout_on_device(bounds: Tensor, sizes: Sizes) -> Layout:
    """The layout of bounds that only the device knows."""
    version, known = _made.get(bounds, (None, {}))
    if version != bounds._version:
        known = {}
        _made[bounds] = bounds._version, known
    if sizes not in known:
        known[sizes] = _tables(bounds.long(), sizes)
    return known[sizes]


def _tables(starts: Tensor, sizes: Sizes) -> Layout:
    """A layout where the bounds are, made without a wait of the host."""
    size, per_segment, n_chunks, n_segments = sizes
    like = {"dtype": torch.int64, "device": starts.device}
    counts = -(-starts.diff() // size)
    counts[-1] += n_chunks - counts.sum()
    last = counts.cumsum(0)
    first = last - counts
    segment_counts = (-(-counts // per_segment)).clamp(min=1)
    segment_last = segment_counts.cumsum(0)
    segment_first = segment_last - segment_counts

    numbers = torch.arange(n_segments, **like)
    # Segments beyond the last one that is needed have no chunk.
    of = torch.searchsorted(segment_last, numbers, right=True).clamp(max=len(counts) - 1)
    within = numbers - segment_first[of]
    begin = first[of] + within * per_segment
    end = torch.minimum(begin + per_segment, last[of])
    opens, closes = within == 0, within == segment_counts[of] - 1
    segments = torch.stack((begin, end, of, opens.long(), closes.long()), 1)

    numbers = torch.arange(n_chunks, **like)
    of = torch.searchsorted(last, numbers, right=True)
    within = numbers - first[of]
    segment = segment_first[of] + within // per_segment
    begin = torch.minimum(starts[of] + within * size, starts[of + 1])
    columns = (begin, starts[of + 1], segment, of, opens[segment].long(), closes[segment].long())
    sequences = (first, last, segment_first, segment_last)
    return Layout(torch.stack(columns, 1), segments, torch.stack(sequences, 1), starts)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; a CPU counts as one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def can_pipeline(device: torch.device) -> bool:
    """Whether loads may be made ahead: on Blackwell that gave wrong numbers."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 10
