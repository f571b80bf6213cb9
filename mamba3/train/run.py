"""train: a run, from a recipe to a folder that is ready for the Hub.

OUT/config.json, model.safetensors, tokenizer.json, README.md    the model
OUT/best/                                                        the best one at a checkpoint
OUT/recipe.yaml, metrics.jsonl, checkpoints/                     the run
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mamba3 import hub, zoo
from mamba3.atomic import replace_text
from mamba3.config import Mamba3Config
from mamba3.models.lm import Mamba3LM
from mamba3.ops.dispatch import default_device
from mamba3.threads import limited_threads, worthwhile_threads
from mamba3.train import checkpoint, memory
from mamba3.train.card import write_card
from mamba3.train.checkpoint import Checkpoints, SavedState
from mamba3.train.config import OPTIMIZERS, DataRecipe, Recipe, load_recipe
from mamba3.train.log import open_log
from mamba3.train.loop import fit, make_step
from mamba3.train.lora import add_adapters, merged
from mamba3.train.panel import start_panel
from mamba3.train.parallel import Ranks, ranks_of, whole_model
from mamba3.train.readings import Spike
from mamba3.train.signals import Stopped, StopSignals
from mamba3.train.spikes import SpikeDetector
from mamba3.train.tasks import Measured, Task, task_of

RECIPE_FILE = "recipe.yaml"
BEST = "best"


def trained_on(folder: Path) -> DataRecipe | None:
    """The data that a model was trained on, by its recipe.yaml; None if it has none."""
    # The best model of a run lies in a folder of the run's.
    for place in (folder, *([folder.absolute().parent] if folder.name == BEST else [])):
        if (place / RECIPE_FILE).is_file():
            return load_recipe(place / RECIPE_FILE).data
    return None


# Times that a run goes back to the same state before it gives up.
ROLLBACKS = 3
logger = logging.getLogger(__name__)


class TrainResult(NamedTuple):
    """What a run came to.

    steps: optimizer steps made in all.
    loss: of the last step.
    before, after: what was measured before the first step, where that is done, and after the last.
    out: the folder.
    seconds: wall time of this call.
    """

    steps: int
    loss: float
    before: Measured | None
    after: Measured
    out: str
    seconds: float


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> TrainResult:
    """Train a model and save it.

    Under torchrun, all processes call it, each with a GPU of its own.

    Args:
        recipe: what to do, from `load_recipe`.
        out: folder of the run; it is made if needed.
        resume: continue the run in `out` from its last checkpoint, as if it had not stopped. Only
            the recipe's length and looks (train.steps, train.eval_every, ...) may have changed.
        overwrite: replace the run that is in `out`, if there is one.
        progress: show on standard error what the run is, and a bar.

    Raises:
        FileExistsError: `out` holds a run or a model already, and is not to be overwritten.
        FileNotFoundError: there is no run to resume.
        ValueError: the recipe is not that of the run to resume.
        RuntimeError: loss or gradient became NaN or infinite; the last checkpoint stays.
        Stopped: SIGTERM or SIGINT came; the state after the step that was under way is saved.
    """
    began = time.perf_counter()
    out = Path(out)
    device = recipe.train.device or default_device()
    with ranks_of(device) as ranks, own_rng(recipe.train.seed):
        if not (resume or overwrite):
            remedy = "choose another folder, resume the run in it, or overwrite it"
            checkpoint.refuse_to_overwrite(out, remedy)
        ranks.wait()  # until all have looked
        memory.configure(device)
        run = _Run(recipe, out, device, ranks, resume)
        with limited_threads(recipe.train.threads or worthwhile_threads(run.model)):
            after = run.go(progress)
    return TrainResult(
        steps=run.step,
        loss=run.loss,
        before=run.before,
        after=after,
        out=str(out),
        seconds=time.perf_counter() - began,
    )


class _Run:
    """A run in progress: new, or where a loaded state left it. It is the `Watch` of its loop."""

    def __init__(self, recipe: Recipe, out: Path, device: str, ranks: Ranks, resume: bool):
        self.out, self.ranks = out, ranks
        self.states = Checkpoints(
            out, ranks, keep=recipe.train.keep, background=recipe.train.async_save
        )
        state = self.states.load() if resume else None
        if state is not None and recipe.model is None:
            recipe = dataclasses.replace(recipe, model=state.recipe["model"])
        self.task = task_of(recipe)
        self.model = build_model(recipe, self.task, resume).to(device)
        architecture = self.model.config.to_dict()
        del architecture["model_type"]
        self.recipe = dataclasses.replace(recipe, model=architecture)
        self.train_step = make_step(self.model, recipe.optim, recipe.step, ranks)
        self.step, self.loss = 0, None
        self.best: dict[str, Any] = {"step": 0, "score": None}
        self.facts: dict[str, Any] = {"skipped": 0, "before": None, "spikes": None}
        factor = recipe.step.spike_factor
        self.spikes = None if factor is None else SpikeDetector(factor=factor)
        self.rollbacks, self.rolled_back_to = 0, -1
        self.stopped_by = 0  # the signal that all ranks know of
        self.measured: Measured | None = None
        self.measured_step = -1
        if state is not None:
            self._check(state)
            self._restore(state)

    def _check(self, state: SavedState) -> None:
        """Whether a state is one of this run that it can go on from."""
        checkpoint.check_same_recipe(state.recipe, self.recipe.to_dict())
        steps = self.recipe.train.steps
        if steps < state.step:
            raise ValueError(
                f"the run in {self.out} has made {state.step} steps already, and train.steps is "
                f"{steps}; set train.steps to at least {state.step}"
            )

    def _restore(self, state: SavedState) -> None:
        self.states.restore(state, self.train_step)
        self.step, self.loss, self.best = state.step, state.loss, state.best
        self.facts, self.measured_step = dict(state.facts), -1
        if self.spikes is not None:
            self.spikes.load_state_dict(self.facts["spikes"])

    def go(self, progress: bool) -> Measured:
        """Make the steps that are left; return what was measured last."""
        recipe = self.recipe
        if recipe.optim.decay_steps not in (None, recipe.train.steps):
            logger.warning(
                "the learning rate decays over optim.decay_steps=%d steps, train.steps is %d",
                recipe.optim.decay_steps,
                recipe.train.steps,
            )
        if self.ranks.first and progress:
            print(start_panel(recipe, self.task, self.train_step, self.step), file=sys.stderr)
        with StopSignals() as self.signals:
            if self.step == 0:
                self._begin()
            if self.ranks.first:
                replace_text(self.out / RECIPE_FILE, recipe.to_yaml())
            try:
                while not self._fitted(progress and self.ranks.first):
                    pass
            except BaseException:
                with contextlib.suppress(Exception):  # what came first is what is told
                    self.states.finish()
                raise
            self.states.finish()
        if progress and self.ranks.first:
            print(f"memory     {memory.report(self.train_step.device)}", file=sys.stderr)
        return self._measure()

    def _begin(self) -> None:
        """Step 0: what was in the folder goes; a run that stops early can be resumed, too."""
        if self.ranks.first:
            self.out.mkdir(parents=True, exist_ok=True)
            for old in (checkpoint.STATES, BEST):
                shutil.rmtree(self.out / old, ignore_errors=True)
        self.ranks.wait()
        if self.task.measures_first:
            self.facts["before"] = self._measure().to_dict()
        self._save_state()
        self.states.finish()

    def _fitted(self, progress: bool) -> bool:
        """Make the steps that are left; False if a spike of the loss has led back."""
        # Other ranks have the same to tell, and tell no one.
        out = self.out if self.ranks.first else None
        self.log = open_log(out, self.recipe, last_step=self.step)
        if self.measured_step == 0:
            self.log.write(0, **self.measured.values)
        with contextlib.closing(self.log):
            try:
                fit(
                    self.train_step,
                    self.task.stream(),
                    self.recipe,
                    log=self.log,
                    watch=self,
                    start=self.step,
                    skipped=self.facts["skipped"],
                    spikes=self.spikes,
                    progress=progress,
                )
            except Spike as spike:
                self._roll_back(spike)
                return False
        return True

    def _roll_back(self, spike: Spike) -> None:
        """Go back to the last state, and leave out the batches since."""
        self.states.finish()
        state = self.states.load()
        self.rollbacks = self.rollbacks + 1 if state.step == self.rolled_back_to else 1
        self.rolled_back_to = state.step
        if self.rollbacks > ROLLBACKS:
            raise RuntimeError(
                f"{spike}; the run has gone back to step {state.step} {ROLLBACKS} times, to no "
                "avail. Try a smaller optim.lr, or a larger step.spike_factor"
            )
        skipped = self.facts["skipped"]
        self._restore(state)
        self.facts["skipped"] = skipped + spike.step - self.step
        logger.warning(
            "%s: going back to step %d and leaving out the %d batches since",
            spike, self.step, spike.step - self.step,
        )  # fmt: skip

    # what `fit` asks and tells

    def due(self, step: int) -> bool:
        """Whether the step is one to save or to measure after."""
        return self._saves(step) or self._measures(step)

    def stops(self, step: int) -> bool:
        """Whether a signal came, to whatever rank: all of them hear of it in the same step."""
        device = self.train_step.device
        self.stopped_by = self.ranks.largest(self.signals.received or 0, step, device)
        return bool(self.stopped_by)

    def after_step(self, step: int, loss: float) -> None:
        """Measure, and save where that is due."""
        self.step, self.loss = step, loss
        if self.stopped_by and step < self.recipe.train.steps:
            # Whoever sent it waits, and may kill soon: nothing is measured.
            self._save_state()
            self.states.finish()
            raise Stopped(self.stopped_by, step, str(self.out))
        model = self._whole_model()
        measured = self._measure(model)
        self.log.write(step, **measured.values)
        if not self._saves(step):
            return
        better = self.best["score"] is None or measured.score > self.best["score"]
        if better:
            self.best = {"step": step, "score": measured.score}
        # The state goes first: whatever stops the run in between, it can be resumed.
        self._save_state()
        model = merged(model)
        if self.ranks.first:
            for folder in (self.out, self.out / BEST)[: 1 + better]:
                self._save_model(model, folder)

    def _saves(self, step: int) -> bool:
        timing = self.recipe.train
        return step == timing.steps or step % timing.save_every == 0

    def _measures(self, step: int) -> bool:
        every = self.recipe.train.eval_every
        return bool(every) and step % every == 0

    def _whole_model(self) -> nn.Module:
        """The model with all its weights, up to date, which all ranks must ask for."""
        self.train_step.optimizer.wait()
        return whole_model(self.model)

    def _measure(self, model: nn.Module | None = None) -> Measured:
        """How the model does after the present step; measured once a step.

        Args:
            model: what `_whole_model` gave, where it was asked for already.
        """
        if self.measured_step != self.step:
            self.measured = self.task.measure(self._whole_model() if model is None else model)
            self.measured_step = self.step
        return self.measured

    def _save_state(self) -> None:
        if self.spikes is not None:
            self.facts["spikes"] = self.spikes.state_dict()
        self.states.save(
            self.train_step,
            step=self.step,
            loss=self.loss,
            best=self.best,
            recipe=self.recipe.to_dict(),
            **self.facts,
        )

    def _save_model(self, model: Mamba3LM, folder: Path) -> None:
        hub.save_pretrained(model, folder, tokenizer=self.task.tokenizer)
        recipe, told = self.recipe, self.task.told
        base = None if recipe.train.init_from is None else zoo.public_name(recipe.train.init_from)
        forgets = base is not None and recipe.data.mix_path is None
        results = {} if self.before is None else {"before": self.before}
        write_card(
            folder,
            model=model,
            summary=(
                f"Trained with mamba3 on {told.data}"
                f"{'' if base is None else f', from {base}'}: {self.step} steps of "
                f"{recipe.data.batch_size} {told.units}, seed {recipe.train.seed}, "
                f"{OPTIMIZERS[recipe.optim.name]} with a learning rate of {recipe.optim.lr:.2g}. "
                "`mamba3 train recipe.yaml --out DIR` with the recipe.yaml of this folder trains "
                "it again."
                f"{' What the model knew before may have been forgotten.' if forgets else ''}"
            ),
            told=told,
            results=results | {f"after {self.step} steps": self._measure()},
            base_model=base,
        )

    @property
    def before(self) -> Measured | None:
        """What was measured before the first step, if that is done."""
        before = self.facts["before"]
        return None if before is None else Measured.from_dict(before)


def build_model(recipe: Recipe, task: Task, resume: bool = False) -> Mamba3LM:
    """A model for a task, with the weights that the run begins with unless it is resumed."""
    model = _plain_model(recipe, task, resume)
    if (rank := recipe.train.lora_rank) > 0:
        alpha = recipe.train.lora_alpha
        add_adapters(model, rank, 2 * rank if alpha is None else alpha)
    return model


def _plain_model(recipe: Recipe, task: Task, resume: bool) -> Mamba3LM:
    base = None if resume else recipe.train.init_from
    wanted = None if recipe.model is None else recipe.architecture(task.vocab_size)
    if base is None:
        _check_vocabulary("the recipe's model", wanted, task)
        return Mamba3LM(wanted)
    model = zoo.load_model(base, dtype=torch.float32)
    _check_vocabulary(base, model.config, task)
    if wanted not in (None, model.config):
        names = [f.name for f in dataclasses.fields(wanted)]
        differing = [n for n in names if getattr(model.config, n) != getattr(wanted, n)]
        raise ValueError(
            f"the recipe's model differs from {base} in {', '.join(differing)}; leave the group "
            "'model' out to take the architecture of train.init_from"
        )
    return model


def _check_vocabulary(name: str, config: Mamba3Config, task: Task) -> None:
    size, wanted = config.vocab_size, task.vocab_size
    if size < wanted or (task.own_ids and size != wanted):
        raise ValueError(f"{name} has a vocabulary of {size} tokens; the data has {wanted}")


@contextlib.contextmanager
def own_rng(seed: int) -> Iterator[None]:
    """Seed torch for the duration, and give the caller its random state back after."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
