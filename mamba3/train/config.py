"""Recipe: everything that decides a training run, read from YAML.

model   architecture, the fields of `Mamba3Config`; vocab_size comes from the tokenizer
data    which problems, and how many at once
optim   the optimizer and its learning rate over the steps
step    how a step is computed: precision, accumulation, recorded steps
train   how long, from what, on what, and how often to look and to save
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mamba3.config import Mamba3Config, MambaSizes
from mamba3.fields import from_mapping
from mamba3.optim import PRESETS
from mamba3.train.data_recipe import DataRecipe
from mamba3.train.log import check_loggers
from mamba3.train.precision import PRECISIONS
from mamba3.train.recipe_fields import check_at_least, check_one_of, coerce_fields

RECOMPUTE = ("none", "full", "selective")
NONFINITE = ("stop", "skip")
# Of these, every rank has all weights, gradients and optimizer state.
WHOLE = ("ddp", "allreduce")
PARALLEL = (*WHOLE, "fsdp", "sharded")
EXCHANGES = ("float32", "bf16")
OPTIMIZERS = {"adamw": "AdamW", "hybrid": "Muon and AdamW", "anvil": "ANVIL and AdamW"}


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """An optimizer and its learning rate: up to `lr` in a line, then down along a cosine.

    Args:
        lr: the highest learning rate.
        name: "adamw"; "hybrid", Muon for the matrices and AdamW for the rest; or "anvil", the same
            with the options of `mamba3.optim.ANVIL`.
        warmup_steps: steps up to it.
        decay_steps: the step at which the cosine ends; later steps stay at its end. It does not
            follow train.steps, so that a run can be made longer without changing what it did. None
            keeps `lr`.
        min_lr_ratio: the end of the cosine over `lr`.
        weight_decay: decoupled decay of the weight matrices; the model exempts the rest.
        beta1, beta2, eps: AdamW's.
        momentum: of the matrices, for "hybrid" and "anvil".
        preset: polynomials of their orthogonalisation, one of `mamba3.optim.PRESETS`; None is the
            optimizer's own.
        split: whether blocks of projections, such as those of in_proj, are matrices of their own.
        grad_clip: largest global norm of the gradient; larger ones are scaled down to it. None
            clips nothing.
    """

    lr: float
    name: str = "adamw"
    warmup_steps: int = 100
    decay_steps: int | None = None
    min_lr_ratio: float = 0.01
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    preset: str | None = None
    split: bool = True
    grad_clip: float | None = 1.0

    def __post_init__(self):
        coerce_fields(self)
        check_at_least(self, 0, "lr", "warmup_steps", "weight_decay")
        check_one_of(self, name=OPTIMIZERS)
        if self.preset is not None:
            check_one_of(self, preset=PRESETS)
            if self.name == "adamw":
                raise ValueError(
                    f"preset={self.preset!r} is for hybrid and anvil, and the optimizer is adamw"
                )
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ValueError(f"grad_clip must be positive, got {self.grad_clip}")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps must be more than warmup_steps, got {self.decay_steps} and "
                f"{self.warmup_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class StepRecipe:
    """How a step is computed.

    Args:
        precision: "float32"; "bf16" or "fp16", products by autocast and weights in float32; or
            "bf16-weights", bfloat16 weights with their 16 extra bits kept by the optimizer.
        accumulate: parts that a batch is computed in, one after the other, to save memory. The
            step is that of the whole batch.
        recompute: what the backward pass computes anew, to save memory: "none", "full" (all but
            the inputs of blocks) or "selective" (all but linear layers).
        parallel: what several ranks share. "ddp": every rank has all weights, and gradients are
            averaged; "allreduce": the same, but gradients are exchanged all at once after the
            backward pass; "fsdp": weights, gradients and optimizer state are spread over ranks;
            "sharded": the optimizer's state is, and its work.
        exchange: what "allreduce" sends gradients in: "float32", or "bf16", which is half as much.
        cache_steps: on a GPU, record steps as CUDA graphs, and replay them.
        compile: run the model through torch.compile, which takes a minute at the start.
        nonfinite: what a loss or gradient that is not finite does: "stop" the run or "skip" the
            step. It changes no weight in either case.
        spike_factor: a loss that rises above the median of those before by so many times their
            usual distance from it is a spike: the run goes back to its last checkpoint, and leaves
            out the batches since. None does not look for spikes.
    """

    precision: str = "float32"
    accumulate: int = 1
    recompute: str = "none"
    parallel: str = "ddp"
    exchange: str = "float32"
    cache_steps: bool = True
    compile: bool = False
    nonfinite: str = "stop"
    spike_factor: float | None = None

    def __post_init__(self):
        coerce_fields(self)
        check_at_least(self, 1, "accumulate")
        check_one_of(
            self,
            precision=PRECISIONS,
            recompute=RECOMPUTE,
            parallel=PARALLEL,
            exchange=EXCHANGES,
            nonfinite=NONFINITE,
        )
        if self.precision == "fp16" and self.parallel == "sharded":
            # A scale that overflows on one rank is to be lowered on all, before what they average.
            raise ValueError("precision fp16 needs parallel ddp, allreduce or fsdp, got sharded")
        if self.exchange != "float32" and self.parallel != "allreduce":
            raise ValueError(
                f"exchange={self.exchange} is for parallel allreduce, got {self.parallel}"
            )
        if self.spike_factor is not None and not self.spike_factor > 1:
            raise ValueError(f"spike_factor must be more than 1, got {self.spike_factor}")


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How a run goes.

    Args:
        steps: number of optimizer steps.
        seed: of the initial weights and of the data.
        save_every: steps between checkpoints; the end is always saved. A checkpoint is evaluated,
            so that its model card holds its own numbers.
        keep: checkpoints to keep, the last ones. The best model is kept besides, in OUT/best.
        async_save: write checkpoints while the next steps are made.
        eval_every: steps between further evaluations; 0 makes none.
        norms_every: steps between lines with the norms of weights, gradients and updates, by group
            of parameters; 0 writes none.
        loggers: where metrics go besides metrics.jsonl: "tensorboard", "trackio".
        check_allocations: stop if a step takes memory from the GPU anew once those of its kind have
            been made.
        init_from: name or folder of a model whose weights to start from.
        lora_rank: rank of low-rank adapters beside all projections, which alone are trained, and
            merged into the weights when the model is saved; 0 trains all weights.
        lora_alpha: factor of the adapters, times their rank; None is twice the rank.
        device: such as "cpu" or "cuda"; None takes a GPU if there is one.
        threads: threads of torch during the run; None takes one for a tiny model, else all.
    """

    steps: int
    seed: int = 0
    save_every: int = 500
    keep: int = 2
    async_save: bool = True
    eval_every: int = 0
    norms_every: int = 0
    loggers: list = field(default_factory=list)
    check_allocations: bool = False
    init_from: str | None = None
    lora_rank: int = 0
    lora_alpha: float | None = None
    device: str | None = None
    threads: int | None = None

    def __post_init__(self):
        coerce_fields(self)
        check_at_least(self, 1, "steps", "save_every", "keep")
        check_at_least(self, 0, "seed", "eval_every", "norms_every", "lora_rank")
        check_loggers(self.loggers)
        if self.threads is not None:
            check_at_least(self, 1, "threads")


# The groups of a recipe, and what they hold.
GROUPS = {
    "model": Mamba3Config,
    "data": DataRecipe,
    "optim": OptimRecipe,
    "step": StepRecipe,
    "train": TrainRecipe,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run. `model` may be left out when train.init_from gives one."""

    model: dict | None = None
    data: DataRecipe = field(default_factory=DataRecipe)
    optim: OptimRecipe
    step: StepRecipe = field(default_factory=StepRecipe)
    train: TrainRecipe

    def __post_init__(self):
        if self.model is None and self.train.init_from is None:
            raise ValueError("the recipe has neither a group 'model' nor train.init_from")
        if self.train.lora_rank and self.step.parallel not in WHOLE:
            raise ValueError(
                f"train.lora_rank needs step.parallel {' or '.join(WHOLE)}, got "
                f"{self.step.parallel}"
            )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """Build a recipe from plain values.

        Raises:
            TypeError: a key that does not exist, with the nearest one, or a value of a wrong type.
            ValueError: a value out of range.
        """
        groups = {name: cls for name, cls in GROUPS.items() if name != "model"}
        built = dict(data) if isinstance(data, dict) else data
        for name, group in groups.items():
            if isinstance(data, dict) and name in data:
                built[name] = from_mapping(group, data[name], where=f"recipe group {name!r}")
        recipe = from_mapping(cls, built, where="recipe")
        if recipe.model is not None:
            recipe.architecture(vocab_size=1)  # mistakes show here, not when the run starts
        return recipe

    def architecture(self, vocab_size: int) -> Mamba3Config:
        """The group `model` as a config; `vocab_size` is used where it names none."""
        values = self.model
        if isinstance(values, dict):
            values = {"vocab_size": vocab_size, **values}
        return from_mapping(Mamba3Config, values, where="recipe group 'model'")

    def to_dict(self) -> dict[str, Any]:
        """All values as plain ones."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """The recipe as `load_recipe` reads it."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        path: the file.
        overrides: changes such as "optim.lr=1e-3" or "data.stages=[1]"; values are YAML.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: it is not YAML, or not a recipe; keys that do not exist are named
            with the nearest one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a recipe (.yaml)")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise TypeError(f"{path} must hold the groups model, data, optim and train, got {data!r}")
    for override in overrides:
        _override(data, override)
    try:
        return Recipe.from_dict(data)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from None


def recipe_keys() -> list[str]:
    """Every key that can be set, as group.key or model.mamba.key."""
    groups = GROUPS | {"model.mamba": MambaSizes}
    return [f"{name}.{f.name}" for name, cls in groups.items() for f in dataclasses.fields(cls)]


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        raise ValueError(f"expected group.key=value, such as optim.lr=1e-3, got {override!r}")
    if key not in (keys := recipe_keys()):
        near = [k for k in keys if k.partition(".")[2] == key]
        near = near or difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
        raise TypeError(f"a recipe has no key {key!r}; the nearest is {near[0]!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"the value of {override!r} is not valid YAML") from None
    *groups, name = key.split(".")
    for group in groups:
        if data.get(group) is None:
            data[group] = {}
        if not isinstance(data[group], dict):
            raise TypeError(f"recipe group {group!r} must be a mapping, got {data[group]!r}")
        data = data[group]
    data[name] = value
