"""Mamba3Cache: the decoding state in the form that generate() of transformers carries along."""

from __future__ import annotations

from torch import Tensor

from ..models.lm import LMState


class Mamba3Cache:
    """What a model has read so far; a forward pass with it replaces its state by the next one.

    The state's tensors are never changed in place, so `copy.copy(cache)` is a fork of it.

    Args:
        state: after the tokens read; None before the first.
        length: number of tokens read in each row, pads included.
    """

    is_compileable = False
    is_croppable = False
    # generate() then leaves out of its input what the cache has read, as with attention.
    is_linear = (False,)

    def __init__(self, state: LMState | None = None, length: int = 0):
        self.state = state
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read in each row, pads included; the same in every layer."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick rows by number, repeats allowed; beam_idx is (B',) int."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)
