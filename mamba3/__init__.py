"""Mamba-3 for PyTorch: layers, language models, training and checkpoints.

Names are imported when they are first used, so `import mamba3` costs no more than torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "Mamba3Config": "config",
    "Mamba3LM": "models",
    "Mamba3State": "ops",
    "TMamba3Layer": "layers",
    "list_models": "zoo",
    "load_model": "zoo",
    "load_tokenizer": "data.tokenizer",
    "ops": "ops",
}

__all__ = [
    "Mamba3Config",
    "Mamba3LM",
    "Mamba3State",
    "TMamba3Layer",
    "__version__",
    "list_models",
    "load_model",
    "load_tokenizer",
    "ops",
]

if TYPE_CHECKING:
    from . import ops
    from .config import Mamba3Config
    from .data.tokenizer import load_tokenizer
    from .layers import TMamba3Layer
    from .models import Mamba3LM
    from .ops import Mamba3State
    from .zoo import list_models, load_model


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mamba3' has no attribute {name!r}")
    module = importlib.import_module(f".{_PUBLIC[name]}", __name__)
    value = module if name == "ops" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
