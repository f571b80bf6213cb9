"""The models that have a name: where their weights are, and under which licence.

Only what a folder cannot say itself stands in the table: sizes follow from its config.json, and
results stand in its card, README.md.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .models.lm import Mamba3LM

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A named model.

    Args:
        name: what users type.
        description: one line for a list.
        licence: SPDX identifier of the weights' licence.
    """

    name: str
    description: str
    licence: str

    @property
    def path(self) -> Path:
        """Folder with config.json, weights, tokenizer and card."""
        return WEIGHTS / self.name

    def parameters(self) -> int:
        """Number of parameters; the embedding and a head tied to it count once."""
        from .hub import read_config
        from .models.lm import Mamba3LM

        model = Mamba3LM(read_config(self.path), device="meta")
        return sum(parameter.numel() for parameter in model.parameters())


MODELS = {
    model.name: model
    for model in (
        ZooModel(
            name="arithmetic-tiny",
            description="copy, reverse, successor and comparison of numbers of 1-4 digits; "
            "single-digit addition and subtraction",
            licence="Apache-2.0",
        ),
    )
}


def list_models(filter: str = "*") -> list[str]:
    """Names of the models that ship with the package, sorted.

    Args:
        filter: a shell pattern that the names must match, such as "arithmetic-*".
    """
    return sorted(fnmatch.filter(MODELS, filter))


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """Find the folder of a model.

    Args:
        name_or_path: a shipped name or a local folder. A `Path` is always a folder, and so is a
            string with a separator, such as "./arithmetic-tiny".

    Returns:
        The folder; it exists.

    Raises:
        FileNotFoundError: neither a shipped name nor a folder.
        NotADirectoryError: a file.
        ValueError: a shipped name that is also a folder here, or an empty string.
    """
    if not str(name_or_path):
        raise ValueError("the model's name or folder is empty; write '.' for this folder")
    folder = Path(name_or_path)
    model = MODELS.get(name_or_path) if isinstance(name_or_path, str) else None
    if model and folder.is_dir():
        raise ValueError(
            f"{name_or_path!r} is a shipped model and also a folder here. Write "
            f"'./{name_or_path}' for the folder, or '{model.path}' for the shipped model"
        )
    if model and not model.path.is_dir():
        raise FileNotFoundError(
            f"the weights of {name_or_path!r} are missing from this installation: expected the "
            f"folder {model.path}. Reinstall mamba3"
        )
    if model:
        return model.path
    if folder.is_dir():
        return folder
    if folder.exists():
        raise NotADirectoryError(
            f"'{folder}' is a file, expected the folder that holds config.json and the weights"
        )
    near = difflib.get_close_matches(str(name_or_path), MODELS, n=3)
    raise FileNotFoundError(
        f"'{name_or_path}' is neither a local folder nor a shipped model"
        + (f"; did you mean {' or '.join(near)}?" if near else ".")
        + f" Shipped models: {', '.join(list_models())}. Models on the Hugging Face Hub are not "
        "downloaded by this version: download the files and give their folder"
    )


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Mamba3LM:
    """Load a model by its shipped name or from a local folder, in evaluation mode.

    Args:
        name_or_path: a name of `list_models()` or a folder, see `resolve`.
        dtype: of the weights; None keeps the stored one. Parameters that must stay float32 do.
        device: where the weights go; None is the CPU.

    Raises:
        OSError: nothing there, see `resolve`.
        ValueError, TypeError: files that cannot be used, see `mamba3.hub.load_pretrained`.

    Example:
        >>> model = load_model("arithmetic-tiny")
    """
    from .hub import load_pretrained

    return load_pretrained(name_or_path, dtype=dtype, device=device)
