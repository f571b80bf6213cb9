"""The state of a training run, in one file: what is needed to continue exactly.

It holds the weights too, although the folder has them again in model.safetensors for others to
load: so weights, optimizer and step are of one moment, whenever the run was stopped. Schedule and
data are functions of the step and need no state of their own.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from mamba3.atomic import replace_file
from mamba3.train.step import TrainStep

STATE_FILE = "training_state.pt"
# What may change when a run continues: it decides how long it goes and what is looked at, not what
# a step does.
FREE_KEYS = {
    "data.eval_problems",
    "step.cache_steps",
    "train.steps",
    "train.eval_every",
    "train.save_every",
    "train.device",
    "train.threads",
}


def save_state(
    path: str | Path,
    train_step: TrainStep,
    *,
    step: int,
    loss: float | None,
    recipe: dict[str, Any],
) -> None:
    """Write the state of a run after `step` steps, whole or not at all.

    Raises:
        OSError: writing failed; the previous state is still there.
    """
    state = {
        "step": step,
        "loss": loss,
        "recipe": recipe,
        **train_step.state_dict(),
        "rng": {"cpu": torch.get_rng_state()},
    }
    if torch.cuda.is_available():
        state["rng"]["cuda"] = torch.cuda.get_rng_state_all()
    try:
        replace_file(path, lambda file: torch.save(state, file))
    except RuntimeError as error:  # torch.save turns a failed write into one
        raise OSError(f"{path} could not be written (is the disk full?): {error}") from error


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what `save_state` wrote, on the CPU.

    Raises:
        FileNotFoundError: there is no run in this folder.
        ValueError: the file is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} holds no run to resume ({path.name} is missing); start one without "
            "resume"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged and cannot be resumed from: {error}") from error


def restore(state: dict[str, Any], train_step: TrainStep) -> None:
    """Put a loaded state into model, optimizer and the global random generators."""
    train_step.load_state_dict(state)
    torch.set_rng_state(state["rng"]["cpu"])
    if torch.cuda.is_available() and len(state["rng"].get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["rng"]["cuda"])


def refuse_to_overwrite(out: Path, remedy: str) -> None:
    """Raise a FileExistsError if a folder holds a model or a run already."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; expected a folder to write to")
    for name in ("config.json", STATE_FILE):
        if (out / name).exists():
            raise FileExistsError(f"{out} already holds {name}; {remedy}")


def check_same_recipe(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise a ValueError that names every difference that would change what the run computes."""
    saved, given = _flat(saved), _flat(given)
    differences = [
        f"{key} (the run: {saved.get(key)!r}, the recipe: {given.get(key)!r})"
        for key in sorted(saved.keys() | given.keys())
        if key not in FREE_KEYS and saved.get(key) != given.get(key)
    ]
    if differences:
        raise ValueError(
            f"the recipe is not that of the run to resume: {'; '.join(differences)}. Resume with "
            "the run's recipe.yaml, or start a new run in another folder"
        )


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    return {f"{g}.{k}": v for g, group in recipe.items() for k, v in (group or {}).items()}
