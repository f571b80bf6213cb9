"""How tokens are laid out in chunks, dense or packed, and how chunks are grouped in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# One block of chunks is worked on at a time, so that what it touches stays in a core's cache.
BLOCK_ELEMENTS_PER_THREAD = 1 << 17
# A GPU wants few launches instead; this keeps what a block takes beside the tensors under 1 GB.
BLOCK_ELEMENTS_ON_GPU = 1 << 24


def default_chunk_size(rank: int, length: int) -> int:
    """Chunk size measured to be fastest on a CPU for a rank, never more than the length."""
    return max(1, min(length, 32 if rank == 1 else 16 if rank <= 4 else 8))


class Step(NamedTuple):
    """A step of the recurrence over chunks: chunks start..stop, of which `going` have a next."""

    start: int
    stop: int
    going: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunking:
    """How tokens (B, L) are laid out in chunks (C, B', Q), dense or packed.

    Dense: every row has C chunks, B' = B. Packed: K chunks in all, C = K and B' = 1; every
    sequence starts on a chunk of its own, longer sequences first.
    """

    size: int
    n_tokens: int
    inner: int
    steps: tuple[Step, ...]
    order: Tensor | None = None
    gather: Tensor | None = None
    scatter: Tensor | None = None
    valid: Tensor | None = None

    @classmethod
    def dense(cls, batch: int, length: int, size: int) -> Chunking:
        return cls(size, length, batch, _steps([batch] * -(-length // size)))

    @classmethod
    def packed(cls, lengths: Tensor, size: int, device: torch.device) -> Chunking:
        """Layout of sequences that follow one another in a single row of tokens."""
        lengths = lengths.cpu()
        order = torch.argsort(lengths, descending=True, stable=True)
        starts = torch.cumsum(lengths, 0) - lengths
        counts = (lengths[order] + size - 1) // size
        per_step, chunk_starts, chunk_lengths = [], [], []
        for i in range(int(counts.max())):
            alive = order[: int((counts > i).sum())]
            per_step.append(len(alive))
            chunk_starts.append(starts[alive] + i * size)
            chunk_lengths.append((lengths[alive] - i * size).clamp(max=size))
        offsets = torch.arange(size)
        index = torch.cat(chunk_starts)[:, None] + offsets
        valid = offsets < torch.cat(chunk_lengths)[:, None]
        scatter = torch.empty(int(lengths.sum()), dtype=torch.long)
        scatter[index[valid]] = torch.arange(valid.numel())[valid.flatten()]
        return cls(
            size,
            len(scatter),
            1,
            _steps(per_step),
            order.to(device),
            # Places after a sequence's end repeat some token; their weights are masked to zero.
            index.clamp(max=len(scatter) - 1).flatten().to(device),
            scatter.to(device),
            valid[:, None].to(device),
        )

    def split(self, t: Tensor) -> Tensor:
        """(B, L, ...) -> (C, B', Q, ...); a view where the layout allows it."""
        if self.gather is not None:
            return t.flatten(0, 1).index_select(0, self.gather).unflatten(0, (-1, 1, self.size))
        if missing := -t.shape[1] % self.size:
            t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, missing))
        return t.unflatten(1, (-1, self.size)).transpose(0, 1)

    def join(self, t: Tensor) -> Tensor:
        """(C, B', Q, ...) -> (B, L, ...)."""
        if self.scatter is not None:
            return t.flatten(0, 2).index_select(0, self.scatter).unsqueeze(0)
        return t.transpose(0, 1).flatten(1, 2)[:, : self.n_tokens]

    def sort(self, t: Tensor) -> Tensor:
        """From sequences in the caller's order to longest first, as `steps` counts them."""
        return t if self.order is None else t.index_select(0, self.order)

    def unsort(self, t: Tensor) -> Tensor:
        """Undo `sort`."""
        return t if self.order is None else t.index_select(0, torch.argsort(self.order))

    def heads(self, t: Tensor) -> Tensor:
        """(B, L, H, ...) -> (K, H, Q, ...), contiguous."""
        return self.split(t).transpose(2, 3).flatten(0, 1).contiguous()

    def weights(self, t: Tensor) -> Tensor:
        """Per-token weights (B, L, H) -> (K, H, Q), zero where a chunk has no token."""
        return self.heads(t) if self.valid is None else self.heads(t) * self.valid


def _steps(counts: list[int]) -> tuple[Step, ...]:
    ends = list(accumulate(counts))
    return tuple(
        Step(end - count, end, going)
        for count, end, going in zip(counts, ends, [*counts[1:], 0], strict=True)
    )


@dataclass(frozen=True)
class SequenceEnds:
    """First and last token of every packed sequence; an empty one points at some token."""

    first: Tensor
    last: Tensor
    nonempty: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> SequenceEnds:
        starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
        limit = cu_seqlens[-1] - 1
        return cls(starts.minimum(limit), (stops - 1).clamp(min=0), stops > starts)

    @property
    def last_of_nonempty(self) -> Tensor:
        return self.last[self.nonempty]

    def where_nonempty(self, new: Tensor, old: Tensor) -> Tensor:
        mask = self.nonempty.view(-1, *(1,) * (new.dim() - 1))
        return torch.where(mask, new, old.to(new.dtype))


def empty_split(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An empty (C, B', ...) that lies in memory as (B', C, ...), so that joining copies nothing."""
    return like.new_empty(shape[1], shape[0], *shape[2:]).transpose(0, 1)


def blocks(steps: tuple[Step, ...], chunk_elements: int, device: torch.device) -> list[list[Step]]:
    """Group the steps of the recurrence over chunks, so that a block fills a cache, not more."""
    limit = BLOCK_ELEMENTS_ON_GPU
    if device.type == "cpu":
        limit = BLOCK_ELEMENTS_PER_THREAD * torch.get_num_threads()
    enough = max(1, limit // chunk_elements)
    found, chunks = [], enough
    for step in steps:
        if chunks >= enough:
            found.append([])
            chunks = 0
        found[-1].append(step)
        chunks += step.count
    return found


def rows_of(block: list[Step], inner: int = 1) -> slice:
    """The chunks of a block, counted in rows of `inner` chunks."""
    return slice(block[0].start // inner, block[-1].stop // inner)
