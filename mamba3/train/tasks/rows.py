"""Prompt/completion rows of a user's own."""

from __future__ import annotations

from mamba3 import zoo
from mamba3.data.jsonl import read_rows, split_rows
from mamba3.data.packing import PackedStream, documents_of
from mamba3.data.problems import EpochStream
from mamba3.data.tokenizer import load_tokenizer
from mamba3.eval.exact_match import exact_match
from mamba3.train.config import Recipe
from mamba3.train.tasks import Measured, Told, name_of


class PromptRows:
    """A file of rows for the model that a recipe starts from; a `Task`.

    Rows are split by a hash of the prompt; the loss is on the completion and the end token.
    """

    own_ids = True
    measures_first = True

    def __init__(self, recipe: Recipe):
        data, base = recipe.data, recipe.train.init_from
        if base is None:
            raise ValueError("data of kind rows needs train.init_from, whose tokenizer it takes")
        self.recipe = recipe
        self.tokenizer = load_tokenizer(zoo.resolve(base))
        self.vocab_size = self.tokenizer.vocab_size
        rows = read_rows(data.path, self.tokenizer)
        self.train_rows, self.valid_rows = split_rows(rows, data.valid_fraction)
        form = "one a line" if data.length is None else f"packed into {data.length} tokens"
        self.about = (
            f"{len(self.train_rows)} rows of {data.path}, {form}, {data.batch_size} a step; "
            f"{len(self.valid_rows)} to measure on"
        )
        self.told = Told(
            data=f"{len(self.train_rows)} rows of {name_of(data.path)}",
            units="rows",
            measured_on=(
                f"Measured on {len(self.valid_rows)} other rows of the file, split off by a hash "
                "and never trained on, before and after."
            ),
            example=self.valid_rows[0].prompt,
        )

    def stream(self) -> EpochStream | PackedStream:
        """Batches of the training rows, each once an epoch."""
        data, seed = self.recipe.data, self.recipe.train.seed
        if data.length is None:
            return EpochStream(
                self.train_rows, self.tokenizer, batch_size=data.batch_size, seed=seed
            )
        return PackedStream(
            documents_of(self.train_rows, self.tokenizer),
            length=data.length,
            batch_size=data.batch_size,
            seed=seed,
        )

    def measure(self, model) -> Measured:
        """Exact match on the validation rows."""
        return Measured(exact_match(model, self.tokenizer, self.valid_rows))
