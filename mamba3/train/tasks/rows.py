"""Rows of a user's own: texts, prompts with completions, or conversations; old data beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mamba3 import zoo
from mamba3.data import arithmetic
from mamba3.data.chat import PLAIN_TEMPLATE
from mamba3.data.packing import (
    Document,
    MixedStream,
    PackedStream,
    PaddedStream,
    cut,
    document_of,
    documents_of,
    padded,
)
from mamba3.data.problems import Batch, Problem
from mamba3.data.rows import Row, load_rows
from mamba3.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from mamba3.eval.exact_match import ExactMatch, exact_match
from mamba3.eval.perplexity import perplexity
from mamba3.generate import generate
from mamba3.models.lm import IGNORE
from mamba3.train.config import DataRecipe, Recipe
from mamba3.train.precision import autocast
from mamba3.train.tasks import Measured, Told, name_of

ARITHMETIC = "arithmetic"
# What the tasks of old data begin with, where exact match is told by task.
OLD = "old "
# The longest answers, in tokens, that are measured by exact match.
SHORT_ANSWER = 64
# The most rows that are measured, and problems of a stage of the curriculum.
MEASURED_ROWS, MEASURED_PROBLEMS = 1000, 400
# Problems of the curriculum that are packed; of those that are not, new ones are drawn.
PACKED_PROBLEMS = 4000
# Sample generations of an evaluation, their length, and that of the start of a text they go on.
SAMPLES, SAMPLE_TOKENS, TEXT_START = 3, 32, 16
logger = logging.getLogger(__name__)


class PromptRows:
    """Rows for the model that a recipe starts from; a `Task`.

    Attributes:
        train_documents, valid_documents: the rows to train on and to measure on, as ids with
            labels.
        cut: how many rows to train on are too long, as text; "" if none is.
    """

    measures_first = True

    def __init__(self, recipe: Recipe):
        data, base = recipe.data, recipe.train.init_from
        if base is None:
            raise ValueError("data of kind rows needs train.init_from, the model to start from")
        self.recipe = recipe
        self.tokenizer = load_tokenizer(data.tokenizer or zoo.resolve(base))
        self.vocab_size = self.tokenizer.vocab_size
        # Others are often padded to more ids than there are tokens.
        self.own_ids = isinstance(self.tokenizer, CharTokenizer)
        rows = data.rows
        if rows.form == "messages" and self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = PLAIN_TEMPLATE  # and it is saved beside the model
        measured = rows.valid[:MEASURED_ROWS]
        self.train_documents, self.cut = encoded(rows.train, self.tokenizer, data)
        self.valid_documents, _ = encoded(measured, self.tokenizer, data)
        self.problems = short_problems(rows.name, measured, self.tokenizer)
        self.old = None if data.mix_path is None else OldData(data, self.tokenizer)
        self.about = self._about(len(rows.train), len(measured))
        self.told = self._told(len(rows.train), len(measured))

    def _about(self, n_train: int, n_valid: int) -> str:
        data = self.recipe.data
        form = "one a line" if data.length is None else f"packed into {data.length} tokens"
        mixed = f", {data.mixed_rows} of them {self.old.name}" if data.mixed_rows else ""
        form += f" ({self.cut})" if self.cut else ""
        return (
            f"{n_train} rows of {data.path}, {form}, {data.batch_size} a step{mixed}; "
            f"{n_valid} to measure on"
        )

    def _told(self, n_train: int, n_valid: int) -> Told:
        data, files = self.recipe.data, self.recipe.data.rows.valid_files
        name = name_of(data.path) if Path(data.path).exists() else data.path
        mixed = f" mixed with {self.old.name} ({data.mix:.0%})" if data.mixed_rows else ""
        where = f"rows of {', '.join(files)}" if files else "other rows, split off by a hash"
        old = ""
        if self.old is not None and self.old.problems:
            old = f" Tasks that begin with {OLD!r} are those of {self.old.name}."
        return Told(
            data=f"{n_train} rows of {name}{mixed}",
            units="rows" if data.length is None else f"rows of {data.length} tokens",
            measured_on=(
                f"Measured on {n_valid} {where} and never trained on, before and after.{old}"
            ),
            example=self.problems[0].prompt if self.problems else None,
        )

    def stream(self) -> Callable[[int], Batch]:
        """Batches of the training rows, each once an epoch, with old data as the recipe says."""
        data, seed = self.recipe.data, self.recipe.train.seed
        if self.cut:
            logger.warning("of the rows to train on, %s", self.cut)
        own = stream_of(self.train_documents, data, data.batch_size - data.mixed_rows, seed)
        if not data.mixed_rows:
            return own
        return MixedStream(own, self.old.stream(data.mixed_rows, seed))

    @property
    def rows_an_epoch(self) -> int:
        """How many rows a pass over the training rows takes, which is fewer if they are packed."""
        if self.recipe.data.length is None:
            return len(self.train_documents)
        return stream_of(self.train_documents, self.recipe.data, 1, self.recipe.train.seed).n_rows

    def measure(self, model) -> Measured:
        """Perplexity of the validation rows, and exact match where their answers are short."""
        problems = [*self.problems, *(self.old.problems if self.old else [])]
        device = next(model.parameters()).device
        with autocast(self.recipe.step.precision, device):
            told = perplexity(model, self._valid_batches())
        measured = RowsMeasured(
            exact_match(model, self.tokenizer, problems) if problems else None, told
        )
        measured.samples = [self._sample(model, d) for d in self.valid_documents[:SAMPLES]]
        return measured

    def _valid_batches(self) -> Iterator[Batch]:
        size = self.recipe.data.batch_size
        for first in range(0, len(self.valid_documents), size):
            yield padded(self.valid_documents[first : first + size])

    def _sample(self, model, document: Document) -> dict[str, str]:
        """What the model makes of what comes before the first answer, or of a text's start."""
        ids, labels = list(document.input_ids), list(document.labels)
        start = next(i for i, label in enumerate(labels) if label != IGNORE)
        start = start or min(TEXT_START, len(ids) - 1)
        prompt = torch.tensor([ids[:start]], device=next(model.parameters()).device)
        end = self.tokenizer.eos_token_id
        new = generate(model, prompt, SAMPLE_TOKENS, eos_token_id=end)[0, start:].tolist()
        return {"prompt": self.tokenizer.decode(ids[:start]), "gave": self.tokenizer.decode(new)}


class RowsMeasured(Measured):
    """With sample generations, which go to the log; the best model is the best at the new rows."""

    samples: list[dict[str, str]]

    @property
    def score(self) -> float:
        """Exact match of the new rows where it is measured, or else how likely they are."""
        share = share_of(self.exact_match, old=False)
        return -self.perplexity.loss if share is None else share

    @property
    def values(self) -> dict[str, Any]:
        """As written to the log."""
        return super().values | {"samples": self.samples}


class OldData:
    """What a model knew before, to be mixed in and measured.

    Attributes:
        name: as a card says it.
        problems: what exact match of it is measured on; none where answers are long.
    """

    def __init__(self, data: DataRecipe, tokenizer: Tokenizer):
        self.data, self.tokenizer = data, tokenizer
        self.documents: list[Document] = []
        if data.mix_path == ARITHMETIC:
            self.name = f"stages {data.stages} of the arithmetic curriculum"
            problems = [
                problem
                for stage in data.stages
                for problem in arithmetic.eval_problems(
                    stage, MEASURED_PROBLEMS, options=data.problems
                )
            ]
            documents_of(problems, tokenizer)  # a tokenizer that cannot encode them says so here
        else:
            self.name = f"rows of {name_of(data.mix_path)}"
            rows = load_rows(data.mix_path, valid_fraction=data.valid_fraction)
            self.documents, _ = encoded(rows.train, tokenizer, data)
            problems = short_problems(rows.name, rows.valid[:MEASURED_ROWS], tokenizer)
            if not problems:
                logger.warning(
                    "%s has no short answers: it is mixed in, and not measured", self.name
                )
        self.problems = [problem._replace(task=OLD + problem.task) for problem in problems]

    def stream(self, batch_size: int, seed: int) -> Callable[[int], Batch]:
        """Batches of it."""
        data = self.data
        if self.documents:
            return stream_of(self.documents, data, batch_size, seed)
        size = batch_size if data.length is None else PACKED_PROBLEMS
        drawn = arithmetic.CurriculumStream(
            data.stages, self.tokenizer, batch_size=size, seed=seed, options=data.problems
        )
        if data.length is None:
            return drawn
        documents = documents_of(drawn.problems(0), self.tokenizer)
        return stream_of(documents, data, batch_size, seed)


def stream_of(
    documents: Sequence[Document], data: DataRecipe, batch_size: int, seed: int
) -> PackedStream | PaddedStream:
    """Batches of documents, packed if the recipe says so."""
    if data.length is None:
        return PaddedStream(documents, batch_size=batch_size, seed=seed)
    return PackedStream(documents, length=data.length, batch_size=batch_size, seed=seed)


def encoded(
    rows: Sequence[Row], tokenizer: Tokenizer, data: DataRecipe
) -> tuple[list[Document], str]:
    """Rows as documents of at most the recipe's length, and how many are longer, as text."""
    documents, n_long, n_gone = [], 0, 0
    for row in rows:
        document = document_of(row, tokenizer, all_tokens=data.loss_on == "all")
        parts = [document]
        if data.length is not None and len(document.input_ids) > data.length:
            n_long += 1
            keep = data.too_long == "cut"
            parts = cut(document, data.length, into_many=row.form == "text") if keep else []
            n_gone += not parts
        documents += parts
    if not documents:
        raise ValueError(
            f"nothing is left to train on: {n_long} of {len(rows)} rows have more than "
            f"{data.length} tokens; pack into longer rows"
        )
    if not n_long:
        return documents, ""
    gone = f"; {n_gone} of them are left out" if n_gone else ""
    return documents, f"{n_long} of {len(rows)} are too long for {data.length} tokens{gone}"


def short_problems(name: str, rows: Sequence[Row], tokenizer: Tokenizer) -> list[Problem]:
    """Prompts whose completions are all short, as problems; none of any other rows."""
    if any(row.form != "prompt" for row in rows):
        return []
    problems = [Problem(name, *row.content) for row in rows]
    longest = max(len(tokenizer.encode_answer(problem.answer)) for problem in problems)
    return problems if longest <= SHORT_ANSWER else []


def share_of(exact: ExactMatch | None, *, old: bool) -> float | None:
    """Exact match of the old tasks alone, or of the new ones; None if there are none."""
    if exact is None:
        return None
    tasks = [task for task in exact.per_task if task.startswith(OLD) == old]
    n = sum(exact.n_per_task[task] for task in tasks)
    right = sum(round(exact.per_task[task] * exact.n_per_task[task]) for task in tasks)
    return right / n if n else None


def mask_text(document: Document, tokenizer: Tokenizer, *, colour: bool = False) -> str:
    """A document as text with what is scored in green, or in [brackets].

    Args:
        document: ids and labels.
        tokenizer: that made them.
        colour: whether it is for a terminal.
    """
    opening, closing = ("\033[32m", "\033[0m") if colour else ("[", "]")
    special = tokenizer.special_tokens
    names = {
        tokenizer.bos_token_id: special.get("bos_token"),
        tokenizer.eos_token_id: special.get("eos_token"),
    }
    parts, scored_before, run = [], False, []

    def end_run() -> None:
        parts.append(tokenizer.decode(run).replace("\n", "\\n"))
        run.clear()

    for place, (i, label) in enumerate(zip(document.input_ids, document.labels, strict=True)):
        scored = label != IGNORE and place > 0  # nothing comes before the first
        if scored != scored_before:
            end_run()
            parts.append(opening if scored else closing)
            scored_before = scored
        name = names.get(i) or ("" if tokenizer.decode([i]) else f"<{i}>")
        if name:
            end_run()
            parts.append(name)
        else:
            run.append(i)
    end_run()
    return "".join(parts) + (closing if scored_before else "")
