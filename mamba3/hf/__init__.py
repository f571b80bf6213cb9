"""Mamba-3 in transformers: importing this registers it for AutoConfig and AutoModelForCausalLM.

    import mamba3.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)

It needs the extra `hf`. Folders are the same on both sides: what `mamba3.hub` writes, transformers
loads, and what transformers writes, `mamba3.hub` loads.
"""

from __future__ import annotations

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"mamba3.hf needs transformers, which cannot be imported ({error}): "
        "python -m pip install -U 'mamba3[hf]'"
    ) from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 8):
    raise ImportError(
        f"mamba3.hf needs transformers 5.8 or later, found {transformers.__version__}: "
        "python -m pip install -U 'mamba3[hf]'"
    )

from .cache import Mamba3Cache
from .config import Mamba3HFConfig
from .export import export
from .model import Mamba3CausalLMOutput, Mamba3ForCausalLM

__all__ = ["Mamba3Cache", "Mamba3CausalLMOutput", "Mamba3ForCausalLM", "Mamba3HFConfig", "export"]

transformers.AutoConfig.register(Mamba3HFConfig.model_type, Mamba3HFConfig)
transformers.AutoModelForCausalLM.register(Mamba3HFConfig, Mamba3ForCausalLM)
