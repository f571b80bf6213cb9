"""DataRecipe: the group `data` of a recipe."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mamba3.data.arithmetic import check_stages
from mamba3.data.arithmetic_forms import Form
from mamba3.data.arithmetic_options import ProblemOptions
from mamba3.data.rows import Rows, load_rows
from mamba3.train.recipe_fields import check_at_least, check_one_of, coerce_fields

if TYPE_CHECKING:
    import torch

LOSS_ON = ("answers", "all")
TOO_LONG = ("cut", "drop")

# The keys of the group `data` that say how problems are written.
FORM_KEYS = tuple(f.name for f in dataclasses.fields(Form))
# The keys that a kind of data has besides those of all.
_PROBLEM_KEYS = {
    *("stages", "tasks", "shares", *FORM_KEYS, "digits", "symbols"),
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
        brackets: expressions in brackets of stage 6 are "plain", or come with "working", see there.
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
    brackets: str = "plain"
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
        coerce_fields(self)
        check_one_of(self, kind=DATA_KEYS, loss_on=LOSS_ON, too_long=TOO_LONG)
        object.__setattr__(self, "stages", list(check_stages(self.stages)))
        self.problems.probabilities(self.stages)  # mistakes show here
        check_at_least(self, 1, "batch_size", "eval_problems", "eval_rows")
        if self.workers is not None:
            check_at_least(self, 0, "workers")
        self._check_kind()
        if self.length is not None:
            check_at_least(self, 2, "length")
        if not 0 < self.valid_fraction < 1:
            raise ValueError(f"valid_fraction must lie between 0 and 1, got {self.valid_fraction}")
        self._check_rows()

    @property
    def problems(self) -> ProblemOptions:
        """What is drawn of the stages of the curriculum."""
        return ProblemOptions(
            form=Form(**{key: getattr(self, key) for key in FORM_KEYS}),
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
