"""What a rank computes of a batch, and in how many parts.

loss of part i      mean over its scored tokens, times its share of all scored tokens
gradient            the sum over parts and ranks: that of the whole batch's mean
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba3.data.problems import Batch, scored_tokens
from mamba3.layers.ragged import Ragged


class Part(NamedTuple):
    """Rows of a batch, and their share of the scored tokens, of no dimension.

    cu_seqlens has the boundaries of documents that are packed in rows, where there are any; all
    rows are then one, (1, tokens). Empty documents at its end make them a power of two, so that
    steps on a few numbers of them can be recorded, and used again.
    """

    input_ids: Tensor
    labels: Tensor
    share: Tensor
    cu_seqlens: Tensor | None

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What a model is called with."""
        return {
            "input_ids": self.input_ids, "labels": self.labels, "cu_seqlens": self.cu_seqlens
        }  # fmt: skip

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [t for t in self if t is not None]


class Parts(NamedTuple):
    """A rank's rows of a batch, and how many ids of the whole batch are not padding."""

    parts: tuple[Part, ...]
    n_tokens: int


def split(batch: Batch, rank: int = 0, world: int = 1, accumulate: int = 1) -> Parts:
    """A rank's rows, in `accumulate` parts of as equal sizes as can be.

    Raises:
        ValueError: the batch has fewer rows than there are ranks.
    """
    if len(batch.input_ids) < world:
        raise ValueError(
            f"a batch of {len(batch.input_ids)} rows cannot be shared by {world} ranks: raise "
            "data.batch_size, or start fewer"
        )
    ids, labels, documents = (
        [None] * accumulate
        if t is None
        else list(t.tensor_split(world)[rank].tensor_split(accumulate))
        for t in (batch.input_ids, batch.labels, batch.seq_idx)
    )
    if batch.labels is batch.input_ids:
        labels = list(ids)  # which need not be sent and copied twice
    counts = torch.stack([scored_tokens(*part) for part in zip(labels, documents, strict=True)])
    # A batch in which nothing is scored has a loss of nan, as its mean.
    shares = (counts / scored_tokens(batch.labels, batch.seq_idx)).to(torch.float32)
    # Parts without a scored token, whose mean is nan, are left out. Where that would be all,
    # another rank may have some: this one takes part with any loss, of which its share is 0.
    present = [i for i, count in enumerate(counts) if count]
    if not present:
        present, labels[0] = [0], ids[0]
    every = (ids, labels, shares, documents)
    return Parts(tuple(_part(*(those[i] for those in every)) for i in present), batch.n_tokens)


def _part(ids: Tensor, labels: Tensor, share: Tensor, documents: Tensor | None) -> Part:
    if documents is None:
        return Part(ids, labels, share, None)
    bounds = Ragged.of(ids.shape, None, None, documents).cu_seqlens
    count = len(bounds) - 1
    room = 1 << max(3, count.bit_length())
    bounds = F.pad(bounds, (0, room - count), value=ids.numel())
    row = ids.reshape(1, -1)
    return Part(row, row if labels is ids else labels.reshape(1, -1), share, bounds)


class RankParts:
    """A stream of a rank's parts of a stream's batches; processes that load data take it over.

    Args:
        batches: gives batch `index`.
        rank, world, accumulate: as of `split`.
        skipped: batches that are left out: number i is batch i + skipped.
    """

    def __init__(
        self,
        batches: Callable[[int], Batch],
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        skipped: int = 0,
    ):
        self.batches, self.skipped = batches, skipped
        self.options = (rank, world, accumulate)

    @property
    def batches_at_once(self) -> int:
        """How many batches the stream draws at once."""
        return getattr(self.batches, "batches_at_once", 1)

    def __call__(self, index: int) -> Parts:
        """Of batch number `index`, on the host."""
        return split(self.batches(index + self.skipped), *self.options)
