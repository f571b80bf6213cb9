"""RMSNorm, computed in float32 whatever it is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import add_rms_norm, rms_norm
from ..ops.autograd import autocast_dtype
from .layout import VECTOR, Layout


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    With a gate, the result is multiplied by silu(gate). It has the weight's dtype, or under
    autocast that of products, which take it over as it is.

    Args:
        width: size D of the last dimension.
        eps: added to the mean square.
        device, dtype: of the weight.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def parameter_layout(self) -> Layout:
        """What the weight is, for optimizers."""
        return {"weight": VECTOR}

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(
        self, x: Tensor, gate: Tensor | None = None, *, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x (..., D), and gate it.

        With a residual stream (..., D), x is added to it, and their sum is normalised: returns
        (normed, residual + x).

        Raises:
            ValueError: a gate and a residual stream, or shapes that do not fit.
        """
        if gate is not None and residual is not None:
            raise ValueError("pass a gate or a residual stream, not both")
        dtype = autocast_dtype(x)
        if residual is None:
            return rms_norm(x, self.weight, self.eps, gate, dtype=dtype)
        return add_rms_norm(x, residual, self.weight, self.eps, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
