"""Optimizers and the routing of parameters to them."""

from .hybrid import ANVIL, HybridOptimizer, Tied
from .orthogonalize import PRESETS, orthogonalize
from .param_groups import ParamGroupEngine, param_groups
from .rules import Rails

__all__ = [
    "ANVIL",
    "PRESETS",
    "HybridOptimizer",
    "ParamGroupEngine",
    "Rails",
    "Tied",
    "orthogonalize",
    "param_groups",
]
