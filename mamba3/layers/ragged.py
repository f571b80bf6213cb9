"""Rows of unequal length, brought to one form: real tokens packed in a single row.

Padding masks, packed rows and sequence numbers all say which tokens belong together. Packing
them makes one path serve all three: no pad is computed, and no state crosses a boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Where the real tokens of (B, L) are, and where sequences begin.

    Fields:
        cu_seqlens: boundaries of the packed sequences, (sequences + 1,), int64.
        index: place of every packed token in the flattened (B, L), or None if all are real.
        shape: (B, L).
    """

    cu_seqlens: Tensor
    index: Tensor | None
    shape: tuple[int, int]

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        seq_idx: Tensor | None,
    ) -> Ragged | None:
        """Read whichever description is given; None if the rows are plain.

        Args:
            shape: (B, L) of the input.
            attention_mask: (B, L), nonzero at real tokens; every row is one sequence.
            cu_seqlens: boundaries in a single row, (sequences + 1,).
            seq_idx: (B, L) int; a sequence is a run of equal numbers in a row.

        Raises:
            ValueError: more than one is given, or a shape or value does not fit.
        """
        given = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        given = {name: t for name, t in given.items() if t is not None}
        if not given:
            return None
        if len(given) > 1:
            raise ValueError(f"pass only one of {', '.join(given)}: each describes the sequences")
        if cu_seqlens is None:
            ((name, t),) = given.items()
            if tuple(t.shape) != tuple(shape):
                raise ValueError(
                    f"{name} has shape {tuple(t.shape)}, expected (B, L) = {tuple(shape)}"
                )
        if attention_mask is not None:
            return cls._of_mask(attention_mask)
        if seq_idx is not None:
            new = torch.ones_like(seq_idx, dtype=torch.bool)
            new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
            starts = new.flatten().nonzero().squeeze(1)
            return cls(F.pad(starts, (0, 1), value=new.numel()), None, tuple(shape))
        if shape[0] != 1:
            raise ValueError(
                f"cu_seqlens packs sequences in one row: expected a batch of 1, got {shape[0]}"
            )
        return cls(cu_seqlens.long(), None, tuple(shape))

    @classmethod
    def _of_mask(cls, mask: Tensor) -> Ragged | None:
        real = mask.bool()
        if bool(real.all()):
            return None
        index = real.flatten().nonzero().squeeze(1)
        if not len(index):
            raise ValueError("attention_mask is zero everywhere: there is no token to work on")
        return cls(F.pad(real.sum(1).cumsum(0), (1, 0)), index, tuple(mask.shape))

    @property
    def starts(self) -> Tensor:
        """Place of every sequence's first token in the packed row; of an empty one, another's."""
        first, stop = self.cu_seqlens[:-1], self.cu_seqlens[-1]
        return first.masked_fill(first == stop, 0)

    def pack(self, t: Tensor) -> Tensor:
        """(B, L, ...) -> (1, tokens, ...)."""
        t = t.flatten(0, 1)
        return (t if self.index is None else t.index_select(0, self.index)).unsqueeze(0)

    def unpack(self, t: Tensor) -> Tensor:
        """(1, tokens, ...) -> (B, L, ...), zero at pads."""
        t = t.squeeze(0)
        if self.index is not None:
            full = t.new_zeros(self.shape[0] * self.shape[1], *t.shape[1:])
            t = full.index_copy(0, self.index, t)
        return t.unflatten(0, self.shape)
