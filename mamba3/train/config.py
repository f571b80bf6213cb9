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
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mamba3.config import Mamba3Config, MambaSizes
from mamba3.data.arithmetic import check_stages
from mamba3.data.arithmetic_forms import Form
from mamba3.data.arithmetic_options import ProblemOptions
from mamba3.data.rows import Rows, load_rows
from mamba3.fields import coerce, from_mapping
from mamba3.train.log import check_loggers
from mamba3.train.precision import PRECISIONS

if TYPE_CHECKING:
    import torch

RECOMPUTE = ("none", "full", "selective")
NONFINITE = ("stop", "skip")
PARALLEL = ("ddp", "fsdp", "sharded")
LOSS_ON = ("answers", "all")
TOO_LONG = ("cut", "drop")
OPTIMIZERS = {"adamw": "AdamW", "hybrid": "Muon and AdamW", "anvil": "ANVIL and AdamW"}


# The keys of the group `data` that a kind of data has besides those of all.
_PROBLEM_KEYS = {
    *("stages", "tasks", "shares", "answer_order", "operands", "digits", "symbols"),
    *("grow_to", "grow_batches", "state_labels"),
}
DATA_KEYS = {
    "arithmetic": _PROBLEM_KEYS | {"eval_problems", "eval_digits", "eval_symbols"},
    "rows": _PROBLEM_KEYS
    | {
        *("path", "length", "valid_fraction", "columns", "tokenizer", "loss_on", "too_long"),
        *("mix", "mix_path"),
    },
    "tokens": {"path", "eval_path", "length", "eval_rows"},
}


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What a model is trained and measured on.

    Args:
        kind: "arithmetic", problems of the curriculum; "rows", texts, prompts with completions or
            conversations of a user's own, see `mamba3.data.rows`; or "tokens", a token file as
            `mamba3 tokenize` writes them.
        batch_size: problems, or rows of tokens, in a step.
        workers: processes that make batches ahead of the steps; 0 makes them in between. None is
            half of the cores, at most 8, where steps run on a GPU, and 0 on a CPU.
        stages: stages of the curriculum, mixed.
        tasks: names of their tasks; None is all.
        shares: share of each stage in a step; None is by the weights of their tasks.
        answer_order: "msd_first", answers with the most significant digit first, or "lsd_first".
        operands: numbers of stages 2 to 5 are "plain", "reversed", "interleaved" or in "columns"
            (which needs lsd_first), see `mamba3.data.arithmetic_forms`.
        digits: most digits of numbers of stage 4.
        symbols: most symbols of problems of stage 6.
        grow_to: most symbols from step `grow_batches` on, up to which they grow in a line; None
            does not grow.
        grow_batches: see there.
        state_labels: what stage 6 learns: "answer", or "running", the value after each symbol, too.
        eval_problems: held-out problems of each stage in an evaluation (stage 2: all its facts).
        eval_digits: digits that stage 4, and n x 1 digits of stage 5, are measured at; None is
            those of training from 2 on.
        eval_symbols: symbols that stage 6 is measured at.
        path: of the token file; or of the file or folder of rows, or a data set of the Hub.
        length: tokens in a row. Rows of a user's own are packed into rows of this length; None pads
            each to the longest of its batch.
        valid_fraction: share of the rows that are measured on, and never trained on, where no file
            is for that.
        columns: keys of the rows that have other names, as in {"prompt": "question"}.
        tokenizer: name or folder of another tokenizer than that of train.init_from.
        loss_on: "answers", the completions and what the assistant says (of texts, everything); or
            "all" tokens.
        too_long: what of rows of more than `length` tokens: "cut" (a text into several rows, of
            others the rest is lost) or "drop".
        mix: share of a step's rows that are other data, which keeps what a model knew; 0 to 1.
        mix_path: the other data, which is measured as well: rows, or "arithmetic", the stages
            `stages` of the curriculum.
        eval_path: token file to measure on; None keeps the last rows of `path` for it.
        eval_rows: rows of `length` tokens in an evaluation.
    """

    kind: str = "arithmetic"
    batch_size: int = 256
    workers: int | None = None
    stages: list = field(default_factory=lambda: [1, 2])
    tasks: list | None = None
    shares: list | None = None
    answer_order: str = "msd_first"
    operands: str = "plain"
    digits: int = 10
    symbols: int = 40
    grow_to: int | None = None
    grow_batches: int = 10_000
    state_labels: str = "answer"
    eval_problems: int = 2000
    eval_digits: list | None = None
    eval_symbols: list = field(default_factory=lambda: [256])
    path: str | None = None
    length: int | None = None
    valid_fraction: float = 0.2
    columns: dict = field(default_factory=dict)
    tokenizer: str | None = None
    loss_on: str = "answers"
    too_long: str = "cut"
    mix: float = 0.0
    mix_path: str | None = None
    eval_path: str | None = None
    eval_rows: int = 64

    def __post_init__(self):
        _coerce_fields(self)
        _check_one_of(self, kind=DATA_KEYS, loss_on=LOSS_ON, too_long=TOO_LONG)
        object.__setattr__(self, "stages", list(check_stages(self.stages)))
        self.problems.probabilities(self.stages)  # mistakes show here
        _check_at_least(self, 1, "batch_size", "eval_problems", "eval_rows")
        if self.workers is not None:
            _check_at_least(self, 0, "workers")
        self._check_kind()
        if self.length is not None:
            _check_at_least(self, 2, "length")
        if not 0 < self.valid_fraction < 1:
            raise ValueError(f"valid_fraction must lie between 0 and 1, got {self.valid_fraction}")
        self._check_rows()

    @property
    def problems(self) -> ProblemOptions:
        """What is drawn of the stages of the curriculum."""
        return ProblemOptions(
            form=Form(answer_order=self.answer_order, operands=self.operands),
            tasks=None if self.tasks is None else tuple(self.tasks),
            shares=None if self.shares is None else tuple(self.shares),
            digits=self.digits,
            symbols=self.symbols,
            grow_to=self.grow_to,
            grow_batches=self.grow_batches,
            state_labels=self.state_labels,
        )

    def eval_sizes(self, stage: int) -> list[int] | None:
        """The sizes of a stage's problems in an evaluation; None are those of `eval_problems`."""
        return {4: self.eval_digits, 5: self.eval_digits, 6: self.eval_symbols}.get(stage)

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows at `path`, which are read once."""
        return load_rows(self.path, columns=self.columns, valid_fraction=self.valid_fraction)

    @property
    def mixed_rows(self) -> int:
        """How many rows of a step are other data."""
        return round(self.mix * self.batch_size)

    def _check_rows(self) -> None:
        if not isinstance(self.columns, dict):
            raise TypeError(f"columns must map names to names, got {self.columns!r}")
        if not 0 <= self.mix < 1:
            raise ValueError(f"mix must be at least 0 and less than 1, got {self.mix}")
        if self.mix and self.mix_path is None:
            raise ValueError(
                f"mix={self.mix} of what? mix_path names a file, or 'arithmetic', the curriculum"
            )
        if self.mix and not 0 < self.mixed_rows < self.batch_size:
            raise ValueError(
                f"mix={self.mix} of {self.batch_size} rows is {self.mixed_rows}; change mix or "
                "batch_size"
            )

    def workers_on(self, device: torch.device) -> int:
        """How many processes make batches for steps on a device."""
        if self.workers is not None:
            return self.workers
        return min(8, (os.cpu_count() or 1) // 2) if device.type == "cuda" else 0

    def _check_kind(self) -> None:
        """Whether the keys are those of the kind; one of another kind would do nothing."""
        others = set().union(*DATA_KEYS.values()) - DATA_KEYS[self.kind]
        for f in dataclasses.fields(self):
            default = f.default_factory() if f.default is dataclasses.MISSING else f.default
            if f.name in others and getattr(self, f.name) != default:
                kinds = " or ".join(kind for kind, keys in DATA_KEYS.items() if f.name in keys)
                raise ValueError(
                    f"{f.name} is for data of kind {kinds}, and the kind is {self.kind}"
                )
        needed = {"rows": ["path"], "tokens": ["path", "length"]}.get(self.kind, [])
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"data of kind {self.kind} needs {' and '.join(missing)}")


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
    grad_clip: float | None = 1.0

    def __post_init__(self):
        _coerce_fields(self)
        _check_at_least(self, 0, "lr", "warmup_steps", "weight_decay")
        _check_one_of(self, name=OPTIMIZERS)
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
            averaged; "fsdp": weights, gradients and optimizer state are spread over ranks;
            "sharded": the optimizer's state is, and its work.
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
    cache_steps: bool = True
    compile: bool = False
    nonfinite: str = "stop"
    spike_factor: float | None = None

    def __post_init__(self):
        _coerce_fields(self)
        _check_at_least(self, 1, "accumulate")
        _check_one_of(
            self,
            precision=PRECISIONS,
            recompute=RECOMPUTE,
            parallel=PARALLEL,
            nonfinite=NONFINITE,
        )
        if self.precision == "fp16" and self.parallel == "sharded":
            # A scale that overflows on one rank is to be lowered on all, before what they average.
            raise ValueError("precision fp16 needs parallel ddp or fsdp, got sharded")
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
        _coerce_fields(self)
        _check_at_least(self, 1, "steps", "save_every", "keep")
        _check_at_least(self, 0, "seed", "eval_every", "norms_every", "lora_rank")
        check_loggers(self.loggers)
        if self.threads is not None:
            _check_at_least(self, 1, "threads")


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
        if self.train.lora_rank and self.step.parallel != "ddp":
            raise ValueError(f"train.lora_rank needs step.parallel ddp, got {self.step.parallel}")

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


def _coerce_fields(recipe) -> None:
    for f in dataclasses.fields(recipe):
        object.__setattr__(recipe, f.name, coerce(getattr(recipe, f.name), f.type, f.name))


def _check_at_least(recipe, least: int, *names: str) -> None:
    for name in names:
        if not getattr(recipe, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(recipe, name)}")


def _check_one_of(recipe, **choices: Iterable[str]) -> None:
    for name, known in choices.items():
        if getattr(recipe, name) not in known:
            raise ValueError(
                f"{name} must be one of {', '.join(known)}, got {getattr(recipe, name)!r}"
            )
