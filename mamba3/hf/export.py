"""Folders that transformers loads with trust_remote_code=True, before `mamba3.hf` is imported."""

from __future__ import annotations

import os
from pathlib import Path

from ..atomic import replace_text
from ..checkpoint_files import CONFIG, read_json

_CLASSES = {
    "AutoConfig": ("configuration_mamba3", "Mamba3HFConfig"),
    "AutoModelForCausalLM": ("modeling_mamba3", "Mamba3ForCausalLM"),
}
AUTO_MAP = {auto: f"{module}.{name}" for auto, (module, name) in _CLASSES.items()}


def export(folder: str | os.PathLike[str]) -> None:
    """Let a saved model be loaded by AutoModelForCausalLM with trust_remote_code=True.

    Writes configuration_mamba3.py and modeling_mamba3.py, which import the classes from the
    installed mamba3, and names them in config.json.

    Args:
        folder: written by `mamba3.hub.save_pretrained` or by transformers.

    Raises:
        FileNotFoundError: it has no config.json.
        ValueError, TypeError: its config.json is not one of `mamba3`.
    """
    from .config import Mamba3HFConfig

    config = Mamba3HFConfig.from_dict(read_json(Path(folder) / CONFIG))
    config.auto_map = dict(AUTO_MAP)
    write_code(folder)
    replace_text(Path(folder) / CONFIG, config.to_json_string())


def write_code(folder: str | os.PathLike[str]) -> None:
    """Write the Python files that AUTO_MAP names."""
    for module, name in _CLASSES.values():
        text = f"from mamba3.hf import {name}\n\n__all__ = [{name!r}]\n"
        replace_text(Path(folder) / f"{module}.py", text.replace("'", '"'))
