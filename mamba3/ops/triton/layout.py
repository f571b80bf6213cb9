"""Where chunks of tokens, and segments of chunks, lie in the tokens of all sequences; devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Where chunks and segments of chunks lie; see the legend of `mamba3.ops.triton.chunk`.

    bounds: of the sequences in the tokens, (sequences + 1,) int64.
    """

    table: Tensor
    segments: Tensor
    sequences: Tensor
    bounds: Tensor


@functools.lru_cache(maxsize=64)
def layout(bounds: Sequence[int], size: int, per_sequence: int, device: torch.device) -> Layout:
    """Lay sequences out in chunks of `size` tokens and about `per_sequence` segments each.

    Kept, since it is read back to back by all layers of a model and all steps of a training run.
    """
    starts = torch.tensor(list(bounds))
    counts = -(-starts.diff() // size)
    first = counts.cumsum(0) - counts
    per_segment = max(1, -(-int(counts.max()) // per_sequence))
    segment_counts = (-(-counts // per_segment)).clamp(min=1)
    segment_first = segment_counts.cumsum(0) - segment_counts
    numbers = torch.arange(len(counts))

    of = numbers.repeat_interleave(segment_counts)
    within = torch.arange(len(of)) - segment_first[of]
    begin = first[of] + within * per_segment
    end = torch.minimum(begin + per_segment, (first + counts)[of])
    opens, closes = within == 0, within == segment_counts[of] - 1
    segments = torch.stack((begin, end, of, opens.long(), closes.long()), 1)

    of = numbers.repeat_interleave(counts)
    within = torch.arange(len(of)) - first[of]
    segment = segment_first[of] + within // per_segment
    begin = starts[of] + within * size
    columns = (begin, starts[of + 1], segment, of, opens[segment].long(), closes[segment].long())
    table = torch.stack(columns, 1)
    sequences = (first, first + counts, segment_first, segment_first + segment_counts)
    tables = table, segments, torch.stack(sequences, 1), starts
    return Layout(*(t.to(device) for t in tables))


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
