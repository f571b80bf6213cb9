"""The states of a training run, a file each: what is needed to continue exactly.

It holds the weights too, although the folder has them again in model.safetensors for others to
load: so weights, optimizer and step are of one moment, whenever the run was stopped. Schedule and
data are functions of the step and need no state of their own.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import torch

from mamba3.atomic import replace_file
from mamba3.train.step import TrainStep

logger = logging.getLogger(__name__)

# OUT/checkpoints/step-00000500.pt, and so on.
STATES = "checkpoints"
# What may change when a run continues: it decides how long it goes and what is looked at, not what
# a step does.
FREE_KEYS = {
    "data.eval_problems",
    "data.workers",
    "step.cache_steps",
    "train.steps",
    "train.keep",
    "train.eval_every",
    "train.save_every",
    "train.device",
    "train.threads",
}


def save_state(
    out: str | Path,
    train_step: TrainStep,
    *,
    step: int,
    loss: float | None,
    best: dict[str, float],
    recipe: dict[str, Any],
    keep: int,
    write: bool = True,
) -> None:
    """Write the state of a run after `step` steps, whole or not at all.

    Args:
        out: folder of the run.
        train_step: model and optimizer.
        step, loss: steps made, and the last loss.
        best: step and exact match of the best model so far.
        recipe: of the run.
        keep: states to keep, the last ones; older ones go.
        write: False leaves the writing to another rank, which has the same state.

    Raises:
        OSError: writing failed; the previous states are still there.
    """
    if not write:
        return
    folder = Path(out) / STATES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08}.pt"
    state = {
        "step": step,
        "loss": loss,
        "best": best,
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
    for old in _states(out)[keep:]:
        old.unlink()


def load_state(out: str | Path) -> dict[str, Any]:
    """Read the last state of a run that is whole, on the CPU.

    One that is damaged is said, and the one before it taken.

    Raises:
        FileNotFoundError: there is no run in this folder.
        ValueError: every state is damaged.
    """
    paths = _states(out)
    if not paths:
        raise FileNotFoundError(
            f"{out} holds no run to resume ({STATES}/step-*.pt is missing); start one without "
            "resume"
        )
    for path, before in zip(paths, [*paths[1:], None], strict=True):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            what = f"{path} is damaged and cannot be resumed from: {error}"
            if before is None:
                raise ValueError(what) from error
            logger.warning("%s; taking %s", what, before.name)
    raise AssertionError


def _states(out: str | Path) -> list[Path]:
    """Files of a run's states, the last one first."""
    return sorted((Path(out) / STATES).glob("step-*.pt"), reverse=True)


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
    for name in ("config.json", STATES):
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
