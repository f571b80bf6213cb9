"""What the sequence mixers of all kinds share: their inputs, and where sequences begin."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .precise import KeepsFloat32
from .ragged import Ragged


class Mixer(KeepsFloat32):
    """Mixes (B, L, d_model) along the sequence, with a state that decodes one token at a time.

    A kind of mixer has `d_model`, an `out_proj` and `_mix` and `_mix_token`, which stop before it.
    """

    d_model: int

    def forward(
        self,
        u: Tensor,
        *,
        state: NamedTuple | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, NamedTuple]:
        """Mix along the sequence.

        Args:
            u: (B, L, d_model), L >= 1.
            state: where to go on from, as returned; None is the start of a sequence.
            attention_mask: (B, L), nonzero at real tokens; pads may be anywhere in a row and
                give zeros.
            cu_seqlens: boundaries (sequences + 1,) of sequences packed in one row, B = 1.
            seq_idx: (B, L) int; runs of equal numbers in a row are sequences of their own.
            return_state: also return the state after the last real token.

        Returns:
            (B, L, d_model) in u's dtype, and with `return_state` the state: one entry a row, or a
            packed sequence.

        Raises:
            ValueError: shapes that do not fit; more than one of the three descriptions.
        """
        self._check_input(u, (3,), "(B, L, d_model)")
        ragged = Ragged.of(u.shape[:2], attention_mask, cu_seqlens, seq_idx)
        if ragged is not None:
            u, cu_seqlens = ragged.pack(u), ragged.cu_seqlens
        y, state = self._mix(u, state, cu_seqlens, return_state)
        y = self.out_proj(y)
        if ragged is not None:
            y = ragged.unpack(y)
        return (y, state) if return_state else y

    def step(
        self, u: Tensor, state: NamedTuple, *, inplace: bool = False
    ) -> tuple[Tensor, NamedTuple]:
        """Mix one token into every sequence.

        Args:
            u: (B, d_model) or (B, 1, d_model).
            state: of B sequences, as `forward` and `step` return it.
            inplace: update the state's tensors where they are and return them, recording no
                gradient. False (the default) leaves them as they are.

        Returns:
            The output, of u's shape and dtype, and the new state.
        """
        form = "(B, d_model) or (B, 1, d_model)"
        self._check_input(u, (2, 3), form)
        if u.dim() == 3 and u.shape[1] != 1:
            raise ValueError(f"step takes one token, {form}, got {tuple(u.shape)}")
        y, state = self._mix_token(u.flatten(0, -2), state, inplace)
        return self.out_proj(y).view(u.shape), state

    def _mix(
        self,
        u: Tensor,
        state: NamedTuple | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, NamedTuple | None]:
        """What out_proj is to be given, and the state after it."""
        raise NotImplementedError

    def _mix_token(self, u: Tensor, state: NamedTuple, inplace: bool) -> tuple[Tensor, NamedTuple]:
        """As `_mix`, of one token (B, d_model)."""
        raise NotImplementedError

    def _check_input(self, u: Tensor, dims: tuple[int, ...], form: str) -> None:
        if u.dim() not in dims or u.shape[-1] != self.d_model:
            raise ValueError(
                f"expected an input {form} with d_model = {self.d_model}, got {tuple(u.shape)}"
            )
        if not u.is_floating_point():
            raise TypeError(f"expected a floating-point input {form}, got {u.dtype}")
