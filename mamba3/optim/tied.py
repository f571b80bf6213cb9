"""Tied: an embedding and a head that are trained as one, but stored as two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from .adamw import AdamWPiece
from .pieces import Member, is_dtensor, own_gradient


class Tied(NamedTuple):
    """An embedding and a head that are trained as one, but stored as two.

    Fields:
        embedding, head: names of the parameters, both AdamW's.
        untie_step: the step from which each goes its own way, the embedding with the head's
            moments; None is never.
        transposed: the embedding is stored as the transpose of the head.

    The embedding takes the head's values when the optimizer is made: load a checkpoint in which
    they were untied already after that.
    """

    embedding: str
    head: str
    untie_step: int | None = None
    transposed: bool = False


class TiedPair:
    """The two pieces of a `Tied`, of which only the head is stepped while they are tied.

    Raises:
        ValueError: they are no pieces of AdamW, or do not fit one another.
    """

    def __init__(self, tied: Tied, pieces: Iterable[AdamWPiece]):
        named = {piece.member.piece.title: piece for piece in pieces}
        missing = [name for name in (tied.embedding, tied.head) if name not in named]
        if missing:
            raise ValueError(
                f"tied names {', '.join(missing)}, which AdamW does not train; it trains "
                f"{', '.join(named)}"
            )
        self.tied, self._embedding, self._head = tied, named[tied.embedding], named[tied.head]
        if tied.transposed and is_dtensor(self._head.member.parameter):
            raise ValueError(
                f"tied: {tied.head} is a DTensor, whose transpose is spread otherwise: store "
                "embedding and head alike, or leave Tied.transposed out"
            )
        shapes = [self._turned(self._embedding.average).shape, self._head.average.shape]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"tied: the embedding {tuple(self._embedding.average.shape)} and the head "
                f"{tuple(shapes[1])} do not fit; see Tied.transposed"
            )
        self.copy_head()

    def tied_at(self, step: int) -> bool:
        """Whether the two are one in a step."""
        return self.tied.untie_step is None or step < self.tied.untie_step

    def copy_head(self) -> None:
        """Give the embedding the head's weights and whole state."""
        self._embedding.member.weight.copy_(self._turned(self._head.member.weight))
        theirs = self._head.state()
        for name, tensor in self._embedding.state().items():
            tensor.copy_(self._turned(theirs[name]))

    def gradient(self, member: Member) -> Tensor | None:
        """A member's gradient while they are tied: the head's is both, the embedding has none."""
        grad = own_gradient(member)
        if member is self._embedding.member:
            return None
        if member is self._head.member:
            other = own_gradient(self._embedding.member)
            if other is not None:
                other = self._turned(other)
                return other if grad is None else grad + other
        return grad

    def _turned(self, t: Tensor) -> Tensor:
        """From one's form to the other's."""
        return t.mT if self.tied.transposed and t.dim() == 2 else t
