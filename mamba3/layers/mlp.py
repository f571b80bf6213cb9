"""The gated MLP between mixers."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops import silu_gated
from .layout import MATRIX, Layout, blocks


class GatedMLP(nn.Module):
    """fc2(value * silu(gate)), with [value | gate] = fc1(x) and no biases.

    Args:
        d_model: width D of the input and output.
        width: inner width.
        device, dtype: of the weights.
    """

    def __init__(self, d_model: int, width: int, *, device=None, dtype=None):
        super().__init__()
        self.fc1 = nn.Linear(d_model, 2 * width, bias=False, device=device, dtype=dtype)
        self.fc2 = nn.Linear(width, d_model, bias=False, device=device, dtype=dtype)

    def parameter_layout(self) -> Layout:
        """Rows of the projections that are matrices of their own, for optimizers."""
        width = self.fc1.out_features // 2
        return {"fc1.weight": blocks(value=width, gate=width), "fc2.weight": MATRIX}

    def reset_parameters(self) -> None:
        """Draw both projections anew: kaiming-uniform, bound 1/sqrt(fan_in)."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D) to (..., D)."""
        return self.fc2(silu_gated(self.fc1(x)))
