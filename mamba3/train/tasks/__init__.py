"""What a run trains on and how it is measured: a class for each kind of data of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mamba3.data.problems import Batch
from mamba3.eval.exact_match import ExactMatch
from mamba3.eval.perplexity import Perplexity
from mamba3.train.config import Recipe


class Measured(NamedTuple):
    """How well a model does, in exact match or in perplexity."""

    exact_match: ExactMatch | None = None
    perplexity: Perplexity | None = None

    @property
    def score(self) -> float:
        """What the best model has most of."""
        return -self.perplexity.loss if self.exact_match is None else self.exact_match.overall

    @property
    def values(self) -> dict[str, Any]:
        """As written to the log."""
        values: dict[str, Any] = {}
        if (exact := self.exact_match) is not None:
            values |= {"exact_match": exact.overall, "per_task": exact.per_task, "n": exact.n}
            values["truncated"] = exact.truncated
            if exact.malformed is not None:
                values["malformed"] = exact.malformed
            if exact.per_group:
                values |= {"per_group": exact.per_group, "n_per_group": exact.n_per_group}
            if exact.scaled:
                values["scaled"] = exact.scaled
        if (told := self.perplexity) is not None:
            values |= {"eval_loss": told.loss, "perplexity": told.perplexity}
            values["eval_tokens"] = told.n_tokens
        return values

    def to_dict(self) -> dict[str, Any]:
        """Of plain values, without the wrong answers."""
        exact, told = self.exact_match, self.perplexity
        return {
            "exact_match": None if exact is None else {**exact._asdict(), "misses": []},
            "perplexity": None if told is None else told._asdict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measured:
        """What `to_dict` gave."""
        exact, told = values["exact_match"], values["perplexity"]
        return cls(
            None if exact is None else ExactMatch(**exact),
            None if told is None else Perplexity(**told),
        )


class Told(NamedTuple):
    """What a model card says of the data.

    data: what the model was trained on, as in "trained on ...".
    units: what a step has many of.
    measured_on: what it was measured on, in whole sentences.
    example: a prompt; None where there is no tokenizer for one.
    tags: of the Hub.
    solved: a problem in its natural form, where prompts have blanks, which `generate` does not
        fill.
    """

    data: str
    units: str
    measured_on: str
    example: str | None = None
    tags: tuple[str, ...] = ()
    solved: str | None = None


class Task(Protocol):
    """Data to train on, and the measure of a model of it.

    Attributes:
        tokenizer: saved beside the model, by its `save(folder)`; None saves none.
        vocab_size: ids that the data has.
        own_ids: whether a model must have just these, so that whatever it says can be read.
        about: one line, for the start of a run.
        told: for the model card.
        measures_first: whether the model is measured before the first step as well.
    """

    tokenizer: Any
    vocab_size: int
    own_ids: bool
    about: str
    told: Told
    measures_first: bool

    def stream(self) -> Callable[[int], Batch]:
        """The batches, by their number from 0; processes that load data get a copy of it."""
        ...

    def measure(self, model) -> Measured:
        """Measure a model on what is never trained on."""
        ...


def task_of(recipe: Recipe) -> Task:
    """The task of a recipe's group `data`.

    Raises:
        OSError, ValueError: its files cannot be used.
    """
    from mamba3.train.tasks.curriculum import Curriculum
    from mamba3.train.tasks.rows import PromptRows
    from mamba3.train.tasks.tokens import Tokens

    kinds = {"arithmetic": Curriculum, "rows": PromptRows, "tokens": Tokens}
    return kinds[recipe.data.kind](recipe)


def name_of(path: str | Path) -> str:
    """The last part of a path, which is all that a card says of where a file was."""
    return Path(path).name
