"""Mamba3State: what a sequence hands to its continuation, in one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Mamba3State(NamedTuple):
    """Decoding state of one layer for a batch of sequences; float32 whatever the weights are.

    Fields:
        h: state of the recurrence, (B, H, P, N).
        phase: accumulated rotation in rad, in [-pi, pi], (B, H, S).
        k: the last token's rotated B, (B, R, H, N).
        x: the last token's values, (B, H, P).
    """

    h: Tensor
    phase: Tensor
    k: Tensor
    x: Tensor

    @classmethod
    def zeros(
        cls,
        batch: int,
        *,
        heads: int,
        headdim: int,
        d_state: int,
        rank: int,
        angles: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Mamba3State:
        """The state before the first token."""
        shapes = (
            (batch, heads, headdim, d_state),
            (batch, heads, angles),
            (batch, rank, heads, d_state),
            (batch, heads, headdim),
        )
        return cls(*(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes))

    @classmethod
    def zeros_for(cls, batch: int, x: Tensor, b: Tensor, rate: Tensor, **where) -> Mamba3State:
        """`zeros` in the sizes of a scan's or a step's arguments; `where` is device and dtype."""
        return cls.zeros(
            batch,
            heads=x.shape[-2],
            headdim=x.shape[-1],
            d_state=b.shape[-1],
            rank=b.shape[-3],
            angles=rate.shape[-1],
            **where,
        )

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.h.shape[0]

    def reorder(self, index: Tensor) -> Mamba3State:
        """Pick sequences by number, repeats allowed, as beam search does; index is (B',) int."""
        return Mamba3State(*(t.index_select(0, index) for t in self))

    def to(self, dtype: torch.dtype) -> Mamba3State:
        """The same state in another dtype."""
        return Mamba3State(*(t.to(dtype) for t in self))

    def check(self, like: Mamba3State) -> None:
        """Raise ValueError unless every tensor has the shape of its counterpart in `like`.

        Args:
            like: a state of the wanted shapes; tensors on the meta device do.
        """
        if self.h.shape[0] != like.h.shape[0]:
            raise ValueError(
                f"the state holds {self.h.shape[0]} sequences, the input {like.h.shape[0]}: pass "
                "the state returned for this batch, or pick its rows with state.reorder(index)"
            )
        for name, got, wanted in zip(self._fields, self, like, strict=True):
            if got.shape != wanted.shape:
                raise ValueError(
                    f"state.{name} has shape {tuple(got.shape)}, expected {tuple(wanted.shape)}: "
                    "this state belongs to a layer of other sizes"
                )
