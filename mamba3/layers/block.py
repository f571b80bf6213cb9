"""One block of a language model: mixer, then MLP, each on a normalised residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from ..config import Mamba3Config
from ..ops import Mamba3State
from .mlp import GatedMLP
from .norm import RMSNorm
from .tmamba import MambaState, TMambaLayer
from .tmamba3 import TMamba3Layer

MIXERS = {"mamba3": TMamba3Layer, "mamba": TMambaLayer}
State = Mamba3State | MambaState


class Block(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm2(x)), the second only if the config has an MLP.

    Args:
        config: the model's.
        layer: the block's place in the model, from 0, which decides the kind of its mixer.
        device, dtype: of the weights.
    """

    def __init__(self, config: Mamba3Config, layer: int = 0, *, device=None, dtype=None):
        super().__init__()
        weights = {"device": device, "dtype": dtype}
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps, **weights)
        self.mixer = MIXERS[config.kinds[layer]].from_config(config, **weights)
        self.mlp = None
        if config.mlp_width:
            self.norm2 = RMSNorm(config.d_model, eps=config.norm_eps, **weights)
            self.mlp = GatedMLP(config.d_model, config.mlp_width, **weights)

    def forward(
        self,
        x: Tensor,
        *,
        added: Tensor | None = None,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = True,
        defer: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], State | None]:
        """Run whole sequences.

        Args:
            x: the residual stream, (B, L, D).
            added: to be added to it first; None is nothing.
            defer: return the stream and what is still to be added to it, which the next block takes
                as `added`: a sum and the norm after it take one pass over the stream.
            state, cu_seqlens, return_state: as in the mixer.

        Returns:
            The stream, and the state if asked for, else None.
        """
        normed, x = (self.norm(x), x) if added is None else self.norm(added, residual=x)
        options = {"state": state, "cu_seqlens": cu_seqlens, "return_state": return_state}
        out = self.mixer(normed, **options)
        y, state = out if return_state else (out, None)
        x, added = self._add_mlp(y, x)
        return (x, added) if defer else x + added, state

    def step(self, x: Tensor, state: State, *, inplace: bool = False) -> tuple[Tensor, State]:
        """Run one token: x (B, D); `inplace` as in the mixer's step."""
        y, state = self.mixer.step(self.norm(x), state, inplace=inplace)
        x, added = self._add_mlp(y, x)
        return x + added, state

    def _add_mlp(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream x, with the mixer's output y, and what is still to be added to it."""
        if self.mlp is None:
            return x, y
        normed, x = self.norm2(y, residual=x)
        return x, self.mlp(normed)
