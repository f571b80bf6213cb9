"""The config.json of a model in the forms of other packages; what a form cannot say is an error.

    form          config.json                            weights
    mamba3        this package's                         safetensors
    mamba_ssm     with an ssm_cfg                        pytorch_model.bin
    fla           with a hidden_size                     safetensors
    transformers  of model_type mamba or falcon_mamba    safetensors

The last has Mamba-1 alone, fla Mamba-3 alone; hybrids of both are of our own form. Tensors are the
same in all; fla and transformers have `backbone.embeddings` for `backbone.embedding`.
"""

from __future__ import annotations

from typing import Any

from ..config import Mamba3Config
from .fla import from_fla, to_fla
from .mamba_ssm import from_official, to_official
from .transformers_mamba import MODEL_TYPES, from_transformers, to_transformers

__all__ = ["FORMS", "READERS", "WRITERS", "form_of"]
__all__ += ["from_fla", "from_official", "from_transformers"]
__all__ += ["to_fla", "to_official", "to_transformers"]

WRITERS = {
    "mamba_ssm": to_official,
    "mamba3": Mamba3Config.to_dict,
    "fla": to_fla,
    "transformers": to_transformers,
}
READERS = {"mamba_ssm": from_official, "fla": from_fla, "transformers": from_transformers}
FORMS = tuple(WRITERS)


def form_of(data: Any) -> str:
    """Which of `FORMS` a parsed config.json is of.

    Raises:
        TypeError: it is no mapping.
        ValueError: it is of another kind of model.
    """
    if not isinstance(data, dict):
        raise TypeError(f"a config must be a mapping of keys to values, got {data!r}")
    model_type = data.get("model_type", "mamba3")
    # Before all else: files in this form may have an ssm_cfg, left over from a conversion.
    if model_type in MODEL_TYPES:
        return "transformers"
    if model_type != "mamba3":
        raise ValueError(
            f"this config is of model_type {model_type!r}, expected 'mamba3', "
            f"{' or '.join(map(repr, MODEL_TYPES))}, or the official form with an 'ssm_cfg' entry"
        )
    if "ssm_cfg" in data:
        return "mamba_ssm"
    return "fla" if "hidden_size" in data and "d_model" not in data else "mamba3"
