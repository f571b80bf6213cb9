"""Optimizers and the routing of parameters to them."""

from .distributed import Replicated, Sharded
from .hybrid import ANVIL, HybridOptimizer
from .orthogonalize import PRESETS, orthogonalize
from .param_groups import ParamGroupEngine, param_groups
from .rules import Rails
from .tied import Tied

__all__ = [
    "ANVIL",
    "PRESETS",
    "HybridOptimizer",
    "ParamGroupEngine",
    "Rails",
    "Replicated",
    "Sharded",
    "Tied",
    "orthogonalize",
    "param_groups",
]
