"""train: a run of the arithmetic curriculum, from a recipe to a folder that is ready for the Hub.

OUT/config.json, model.safetensors, tokenizer.json, README.md    the model
OUT/best/                                                        the best one at a checkpoint
OUT/recipe.yaml, metrics.jsonl, checkpoints/                     the run
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from mamba3 import hub, zoo
from mamba3.atomic import replace_text
from mamba3.config import Mamba3Config
from mamba3.data import arithmetic
from mamba3.data.tokenizer import CharTokenizer
from mamba3.eval.exact_match import ExactMatch, exact_match
from mamba3.models.lm import Mamba3LM
from mamba3.ops.dispatch import default_device
from mamba3.threads import limited_threads, worthwhile_threads
from mamba3.train import checkpoint
from mamba3.train.card import write_card
from mamba3.train.config import OPTIMIZERS, Recipe
from mamba3.train.log import METRICS_FILE, MetricsLog
from mamba3.train.loop import fit, make_step
from mamba3.train.panel import start_panel
from mamba3.train.parallel import Ranks, ranks_of
from mamba3.train.signals import Stopped, StopSignals

RECIPE_FILE = "recipe.yaml"
BEST = "best"
logger = logging.getLogger(__name__)


class TrainResult(NamedTuple):
    """What a run came to.

    steps: optimizer steps made in all.
    loss: of the last step.
    exact_match, per_task, n: as in `ExactMatch`, after the last step.
    out: the folder.
    seconds: wall time of this call.
    """

    steps: int
    loss: float
    exact_match: float
    per_task: dict[str, float]
    n: int
    out: str
    seconds: float


def train(
    recipe: Recipe, out: str | Path, *, resume: bool = False, progress: bool = True
) -> TrainResult:
    """Train a model on the arithmetic curriculum and save it.

    Args:
        recipe: what to do, from `load_recipe`.
        out: folder of the run; it is made if needed.
        resume: continue the run in `out` from its last checkpoint, as if it had not stopped. Only
            the recipe's length and looks (train.steps, train.eval_every, ...) may have changed.
        progress: show on standard error what the run is, and a bar.

    Raises:
        FileExistsError: `out` holds a run or a model already, and `resume` is False.
        FileNotFoundError: there is no run to resume.
        ValueError: the recipe is not that of the run to resume.
        RuntimeError: loss or gradient became NaN or infinite; the last checkpoint stays.
        Stopped: SIGTERM or SIGINT came; the state after the step that was under way is saved.
    """
    began = time.perf_counter()
    out = Path(out)
    device = recipe.train.device or default_device()
    with ranks_of(device) as ranks, own_rng(recipe.train.seed):
        state = checkpoint.load_state(out) if resume else None
        if state is None:
            checkpoint.refuse_to_overwrite(out, "choose another folder, or resume the run in it")
        ranks.wait()  # until all have looked
        run = _Run(recipe, out, state, device, ranks)
        with limited_threads(recipe.train.threads or worthwhile_threads(run.model)):
            result = run.go(progress)
    return TrainResult(
        steps=run.step,
        loss=run.loss,
        exact_match=result.overall,
        per_task=result.per_task,
        n=result.n,
        out=str(out),
        seconds=time.perf_counter() - began,
    )


class _Run:
    """A run in progress: new, or where a loaded state left it."""

    def __init__(self, recipe: Recipe, out: Path, state: dict | None, device: str, ranks: Ranks):
        self.out, self.tokenizer, self.ranks = out, arithmetic.tokenizer(), ranks
        self.problems = [
            problem
            for stage in recipe.data.stages
            for problem in arithmetic.eval_problems(stage, recipe.data.eval_problems)
        ]
        model = build_model(recipe, self.tokenizer.vocab_size, state)
        self.model = model.to(device)
        architecture = model.config.to_dict()
        del architecture["model_type"]
        self.recipe = dataclasses.replace(recipe, model=architecture)
        self.train_step = make_step(self.model, recipe.optim, recipe.step, ranks)
        self.step, self.loss = 0, None
        self.best = {"step": 0, "exact_match": -1.0}
        self.stopped_by = 0  # the signal that all ranks know of
        self.result: ExactMatch | None = None
        self.result_step = -1
        if state is None:
            self._save_state()  # a run that stops before its first checkpoint can be resumed too
        else:
            self._restore(state)

    def _restore(self, state: dict) -> None:
        checkpoint.check_same_recipe(state["recipe"], self.recipe.to_dict())
        steps = self.recipe.train.steps
        if steps < state["step"]:
            raise ValueError(
                f"the run in {self.out} has made {state['step']} steps already, and train.steps is "
                f"{steps}; set train.steps to at least {state['step']}"
            )
        checkpoint.restore(state, self.train_step)
        self.step, self.loss, self.best = state["step"], state["loss"], state["best"]

    def go(self, progress: bool) -> ExactMatch:
        """Make the steps that are left; return the last evaluation."""
        recipe = self.recipe
        if recipe.optim.decay_steps not in (None, recipe.train.steps):
            logger.warning(
                "the learning rate decays over optim.decay_steps=%d steps, train.steps is %d",
                recipe.optim.decay_steps,
                recipe.train.steps,
            )
        if self.ranks.first:
            replace_text(self.out / RECIPE_FILE, recipe.to_yaml())
            if progress:
                print(start_panel(recipe, self.train_step, self.step), file=sys.stderr)
        # Other ranks have the same to tell, and tell no one.
        log = MetricsLog(self.out / METRICS_FILE if self.ranks.first else None, last_step=self.step)
        with StopSignals() as signals:
            fit(
                self.train_step,
                stream_of(recipe, self.tokenizer),
                recipe.optim,
                recipe.step,
                start=self.step,
                steps=recipe.train.steps,
                workers=recipe.data.workers,
                log=log,
                due=lambda step: self._saves(step) or self._evaluates(step),
                after_step=lambda step, loss: self._after_step(step, loss, log),
                stop=lambda step: self._stops(step, signals),
                progress=progress and self.ranks.first,
            )
        return self._evaluate()

    def _saves(self, step: int) -> bool:
        timing = self.recipe.train
        return step == timing.steps or step % timing.save_every == 0

    def _stops(self, step: int, signals: StopSignals) -> bool:
        """Whether a signal came, to whatever rank: all of them hear of it in the same step."""
        device = self.train_step.device
        self.stopped_by = self.ranks.largest(signals.received or 0, step, device)
        return bool(self.stopped_by)

    def _evaluates(self, step: int) -> bool:
        every = self.recipe.train.eval_every
        return bool(every) and step % every == 0

    def _after_step(self, step: int, loss: float, log: MetricsLog) -> None:
        self.step, self.loss = step, loss
        if self.stopped_by and step < self.recipe.train.steps:
            # Whoever sent it waits, and may kill soon: nothing is measured.
            self._save_state()
            raise Stopped(self.stopped_by, step, str(self.out))
        result = self._evaluate()
        log.write(
            step,
            exact_match=result.overall,
            per_task=result.per_task,
            n=result.n,
            truncated=result.truncated,
        )
        if not self._saves(step):
            return
        better = result.overall > self.best["exact_match"]
        if better:
            self.best = {"step": step, "exact_match": result.overall}
        # The state goes first: whatever stops the run in between, it can be resumed.
        self._save_state()
        if self.ranks.first:
            for folder in (self.out, self.out / BEST)[: 1 + better]:
                self._save_model(folder)

    def _evaluate(self) -> ExactMatch:
        """Exact match after the present step; measured once a step."""
        if self.result_step != self.step:
            self.result = exact_match(self.model, self.tokenizer, self.problems)
            self.result_step = self.step
        return self.result

    def _save_state(self) -> None:
        checkpoint.save_state(
            self.out,
            self.train_step,
            step=self.step,
            loss=self.loss,
            best=self.best,
            recipe=self.recipe.to_dict(),
            keep=self.recipe.train.keep,
            write=self.ranks.first,
        )
        self.ranks.wait()

    def _save_model(self, folder: Path) -> None:
        hub.save_pretrained(self.model, folder, tokenizer=self.tokenizer)
        recipe = self.recipe
        summary = (
            f"Trained with mamba3 on stages {recipe.data.stages} of the arithmetic curriculum: "
            f"{self.step} steps of {recipe.data.batch_size} problems, seed {recipe.train.seed}, "
            f"{OPTIMIZERS[recipe.optim.name]}. `mamba3 train recipe.yaml --out DIR` with the "
            "recipe.yaml of this folder trains it again."
        )
        write_card(
            folder,
            model=self.model,
            summary=summary,
            measured_on=(
                "Stages 1 (copy, reverse, successor, compare) and 3 (plus, minus, chain) are "
                "measured on problems that are held out by a hash and never trained on. Stage 2 "
                "(add, subtract) is a table of 200 facts: all are trained on and all are measured, "
                "so it is recall."
            ),
            results={f"after {self.step} steps": self._evaluate()},
            example="7+8",
        )


def build_model(recipe: Recipe, vocab_size: int, state: dict | None) -> Mamba3LM:
    """A model with the weights that the run begins with; those of a state come later."""
    init_from = recipe.train.init_from
    if state is not None:
        recipe = dataclasses.replace(recipe, model=recipe.model or state["recipe"]["model"])
        init_from = None
    wanted = None if recipe.model is None else recipe.architecture(vocab_size)
    if init_from is None:
        _check_vocabulary("the recipe's model", wanted, vocab_size)
        return Mamba3LM(wanted)
    model = zoo.load_model(init_from, dtype=torch.float32)
    _check_vocabulary(init_from, model.config, vocab_size)
    if wanted not in (None, model.config):
        names = [f.name for f in dataclasses.fields(wanted)]
        differing = [n for n in names if getattr(model.config, n) != getattr(wanted, n)]
        raise ValueError(
            f"the recipe's model differs from {init_from} in {', '.join(differing)}; leave the "
            "group 'model' out to take the architecture of train.init_from"
        )
    return model


def stream_of(recipe: Recipe, tokenizer: CharTokenizer) -> arithmetic.CurriculumStream:
    """The batches that a recipe trains on."""
    return arithmetic.CurriculumStream(
        recipe.data.stages, tokenizer, batch_size=recipe.data.batch_size, seed=recipe.train.seed
    )


def _check_vocabulary(name: str, config: Mamba3Config, vocab_size: int) -> None:
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"{name} has a vocabulary of {config.vocab_size} tokens; the arithmetic curriculum has "
            f"{vocab_size}"
        )


@contextlib.contextmanager
def own_rng(seed: int) -> Iterator[None]:
    """Seed torch for the duration, and give the caller its random state back after."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
