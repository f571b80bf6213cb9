"""The states of a training run: what is needed to continue exactly.

OUT/checkpoints/step-00000500/          a state: it is whole, or not there
    .metadata, __RANK_0.distcp          torch.distributed.checkpoint's files, which hold the tensors
    state.json                          plain values, and the checksums of the other files
OUT/checkpoints/.step-00000500.tmp/     a state that is being written

A state holds the weights too, although the folder has them again in model.safetensors for others to
load: so weights, optimizer and step are of one moment, whenever the run was stopped. Schedule and
data are functions of the step and need no state of their own.

Ranks write their shares, to a file system that they have in common. Tensors have the names that
`torch.distributed.checkpoint` gives them, such as "model.lm_head.weight".
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mamba3.atomic import remove_folder, replace_folder
from mamba3.train.agreement import Agreement
from mamba3.train.config import Recipe
from mamba3.train.manifest import damage, file_facts, read_manifest, write_manifest
from mamba3.train.parallel import Ranks
from mamba3.train.step import TrainStep

if TYPE_CHECKING:
    from mamba3.train.tensor_files import TensorWriter

logger = logging.getLogger(__name__)

STATES = "checkpoints"
# What may change when a run continues: it decides how long it goes and what is looked at, not what
# a step does.
FREE_KEYS = {
    "data.eval_digits",
    "data.eval_problems",
    "data.eval_symbols",
    "data.workers",
    "step.cache_steps",
    "step.parallel",
    "train.async_save",
    "train.check_allocations",
    "train.eval_every",
    "train.keep",
    "train.loggers",
    "train.norms_every",
    "train.save_every",
    "train.steps",
    "train.device",
    "train.threads",
}


class SavedState(NamedTuple):
    """A state of a run that is whole.

    Fields:
        folder: where it is.
        step, loss: steps made, and the last loss.
        best: step and score of the best model so far.
        recipe: of the run.
        world: ranks that saved it.
        facts: what else `Checkpoints.save` was given.
        plain: what model and optimizer hold besides tensors, by name.
    """

    folder: Path
    step: int
    loss: float | None
    best: dict[str, float]
    recipe: dict[str, Any]
    world: int
    facts: dict[str, Any]
    plain: dict[str, Any]

    @classmethod
    def at(cls, folder: Path) -> SavedState:
        """That of a folder; OSError or ValueError if its state.json cannot be read."""
        content = read_manifest(folder)
        return cls(folder, *(content[name] for name in cls._fields[1:]))


class Checkpoints:
    """Saves the states of a run and loads them. All ranks make one, and make the same calls.

    Args:
        out: folder of the run.
        ranks: of the run.
        keep: states to keep, the last ones; older ones go.
        background: write while training goes on, from a copy in host memory, which is kept for the
            next save. What is saved is the state at the moment of `save`.
    """

    def __init__(
        self, out: str | Path, ranks: Ranks | None = None, *, keep: int = 2, background: bool = True
    ):
        self.out, self.folder = Path(out), Path(out) / STATES
        self.ranks, self.keep, self.background = ranks or Ranks(), keep, background
        self._agreed = Agreement(self.ranks)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future | None = None
        self._copies: dict[str, Tensor] = {}

    def save(
        self,
        train_step: TrainStep,
        *,
        step: int,
        loss: float | None,
        best: dict[str, float],
        recipe: dict[str, Any],
        **facts: Any,
    ) -> None:
        """Save the state after `step` steps, whole or not at all; a save under way ends first.

        Args:
            train_step: model and optimizer: what has a `state_dict()`, nested, of tensors and plain
                values, a `load_state_dict()` and a `device`.
            step, loss: steps made, and the last loss.
            best: step and score of the best model so far.
            recipe: of the run.
            facts: more to save, plain values.

        Raises:
            OSError: this save or, in the background, the one before could not be written, on
                whatever rank; the states before are still there.
            TypeError: a value is neither a tensor nor plain.
        """
        from mamba3.train.tensor_files import TensorWriter

        self.finish()
        leaves = dict(_leaves(train_step.state_dict()))
        tensors = {name: t for name, t in leaves.items() if isinstance(t, Tensor)}
        content = {
            "step": step,
            "loss": loss,
            "best": best,
            "recipe": recipe,
            "world": self.ranks.world,
            "facts": facts,
            "plain": {name: value for name, value in leaves.items() if name not in tensors},
        }
        # As text, it stays what it is now.
        text = json.dumps(content)
        tensors |= _rng(self.ranks.rank, train_step.device)
        place = self.folder / f"step-{step:08}"
        writer = TensorWriter(place.with_name(f".{place.name}.tmp"), tensors, self.ranks.rank == 0)
        if not self.background:
            self._write(writer, place, text)
            return
        writer.parts = self._copied(writer.parts)
        self._under_way = self._thread.submit(self._write, writer, place, text)

    def finish(self) -> None:
        """Wait for a save that is under way; an OSError says that it could not be written."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def load(self) -> SavedState:
        """The last state that is whole, its files being checked.

        One that is damaged is said, and the one before it taken.

        Raises:
            FileNotFoundError: there is no run in this folder.
            ValueError: every state is damaged.
        """
        self.finish()
        folders = self._agreed(decide=lambda _: [self._states()] * self.ranks.world)
        if not folders:
            raise FileNotFoundError(
                f"{self.out} holds no run to resume ({STATES}/step-* is missing); start one "
                "without resume"
            )
        for folder, before in zip(folders, [*folders[1:], None], strict=True):
            fault = self._agreed(
                lambda folder=folder: damage(folder, self.ranks.rank, self.ranks.world),
                lambda faults: [next(filter(None, faults), None)] * self.ranks.world,
            )
            if fault is None:
                return SavedState.at(folder)
            what = f"{folder} is damaged and cannot be resumed from: {fault}"
            if before is None:
                raise ValueError(what)
            if self.ranks.rank == 0:
                logger.warning("%s; taking %s", what, before.name)
        raise AssertionError

    def restore(self, state: SavedState, train_step: TrainStep) -> None:
        """Put a state into model, optimizer and this rank's global random generators.

        The number of ranks, and how tensors are spread over them, may differ from when it was
        saved. A rank beyond those keeps its random state. States that killed runs left half written
        are removed.

        Raises:
            ValueError: the state is of another model or optimizer.
            OSError: a rank cannot read it.
        """
        from mamba3.train.tensor_files import read_into, saved_tensors

        current, prefix = train_step.state_dict(), f"rng.{self.ranks.rank}."
        leaves = dict(_leaves(current))
        tensors = {name: t for name, t in leaves.items() if isinstance(t, Tensor)}
        rng: dict[str, Tensor] = {}

        def read() -> None:
            saved = saved_tensors(state.folder)
            _check_fits(state, saved, leaves)
            for name, t in saved.items():
                if name.startswith(prefix):
                    rng[name] = torch.empty_like(t, device="cpu")
            read_into(state.folder, tensors | rng)

        self._agreed(read, lambda _: self._clear())
        train_step.load_state_dict(_filled(current, tensors | state.plain))
        torch.set_rng_state(rng.get(f"{prefix}cpu", torch.get_rng_state()))
        if train_step.device.type == "cuda" and f"{prefix}cuda" in rng:
            torch.cuda.set_rng_state(rng[f"{prefix}cuda"], train_step.device)

    # writing

    def _copied(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory; the device does nothing but copy, and the host waits for it."""
        copies, streams = {}, set()
        for name, part in parts.items():
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
                copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            copies[name] = copy.copy_(part, non_blocking=True)
            if part.is_cuda:
                streams.add(torch.cuda.current_stream(part.device))
        # Here, as the thread must not call CUDA, which would spoil the recording of a graph.
        for stream in streams:
            stream.synchronize()
        self._copies = copies
        return copies

    def _write(self, writer: TensorWriter, place: Path, text: str) -> None:
        """Write a state beside its place, and move it there when all ranks are done."""

        def write() -> tuple[list, dict[str, dict[str, int]]]:
            results, names = writer.write(plan)
            return results, {name: file_facts(writer.folder / name) for name in names}

        def commit(written: list[tuple]) -> None:
            name = writer.finish(metadata, [results for results, _ in written])
            files = {name: file_facts(writer.folder / name)}
            for _, those in written:
                files |= those
            write_manifest(writer.folder, json.loads(text) | {"files": files})
            replace_folder(writer.folder, place)
            self._forget(place)

        try:
            self._agreed(decide=lambda _: self._clear())
            plan, metadata = self._agreed(writer.plan, writer.share_out)
            self._agreed(write, commit)
        except Exception as error:
            if self.ranks.rank == 0:
                shutil.rmtree(writer.folder, ignore_errors=True)
            # torch.save makes a RuntimeError of a failed write.
            if not isinstance(error, OSError | RuntimeError):
                raise
            raise OSError(f"{place} could not be written (is the disk full?): {error}") from error

    def _clear(self) -> None:
        """Remove what runs that were killed left half written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(folder)

    def _forget(self, newest: Path) -> None:
        """Remove states that are too old, and later ones, which the run went back from."""
        states = self._states()
        place = states.index(newest)
        for folder in states[:place] + states[place + self.keep :]:
            remove_folder(folder)

    def _states(self) -> list[Path]:
        """Folders of the run's states, the last one first."""
        return sorted((p for p in self.folder.glob("step-*") if p.is_dir()), reverse=True)


def _check_fits(state: SavedState, saved: dict[str, Tensor], leaves: dict[str, Any]) -> None:
    """Raise a ValueError if a state is not of this model and optimizer."""
    theirs, mine = (
        {name: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else "a plain value"
         for name, v in values.items() if not name.startswith("rng.")}
        for values in (saved | state.plain, leaves)
    )  # fmt: skip
    differences = [
        f"{name} (the state: {theirs.get(name, 'none')}, expected: {mine.get(name, 'none')})"
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name)
    ]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"{state.folder} is of another model or optimizer: {', '.join(differences[:5])}{more}. "
            "Resume with the run's recipe.yaml"
        )


def _leaves(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings, by the path of their keys."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _filled(state: Mapping[Any, Any], leaves: Mapping[str, Any], prefix: str = "") -> dict:
    """Nested mappings of the same keys with other values."""
    return {
        key: _filled(value, leaves, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else leaves[f"{prefix}{key}"]
        for key, value in state.items()
    }


def _rng(rank: int, device: torch.device) -> dict[str, Tensor]:
    """A rank's global random generators."""
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def refuse_to_overwrite(out: Path, remedy: str) -> None:
    """Raise a FileExistsError if a folder holds a model or a run already."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; expected a folder to write to")
    for name in ("config.json", STATES):
        if (out / name).exists():
            raise FileExistsError(f"{out} already holds {name}; {remedy}")


def check_same_recipe(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise a ValueError that names every difference that would change what the run computes."""
    # Keys that the run's version did not have are at their defaults, which change nothing.
    saved, given = _flat(Recipe.from_dict(saved).to_dict()), _flat(given)
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
