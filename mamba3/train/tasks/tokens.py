"""Token files: a corpus for pretraining."""

from __future__ import annotations

import shutil
from pathlib import Path

from mamba3.data.byte_tokenizer import ByteTokenizer
from mamba3.data.text import TokenStream, rows_of
from mamba3.data.tokenizer import BYTES, CONFIG_FILE, TOKENIZER_FILE, find_tokenizer
from mamba3.eval.perplexity import perplexity
from mamba3.train.config import Recipe
from mamba3.train.precision import autocast
from mamba3.train.tasks import Measured, Told, name_of


class Tokens:
    """The rows of a token file; a `Task`.

    Measured on rows of another file, or on the last ones, which are then never trained on.
    """

    own_ids = False
    measures_first = False

    def __init__(self, recipe: Recipe):
        data = recipe.data
        self.recipe = recipe
        self.held_out = data.eval_rows if data.eval_path is None else 0
        self._stream = TokenStream(
            data.path,
            length=data.length,
            batch_size=data.batch_size,
            seed=recipe.train.seed,
            hold_out=self.held_out,
        )
        corpus = self._stream.corpus
        self.eval_batches = rows_of(
            data.eval_path or data.path, data.length, data.eval_rows, batch_size=data.batch_size
        )
        self.vocab_size = corpus.vocab_size
        self.tokenizer = _Files.of(corpus.tokenizer)
        self.about = (
            f"{corpus.n_tokens:,} tokens of {data.path}, {data.batch_size} rows of {data.length} "
            f"a step; {data.eval_rows} rows to measure on"
        )
        rows = f"{data.eval_rows} rows of {data.length} tokens"
        if self.held_out:
            measured_on = f"the last {rows} of the corpus, which were never trained on"
        else:
            measured_on = f"the last {rows} of {name_of(data.eval_path)}"
        self.told = Told(
            data=f"{corpus.n_tokens:,} tokens of {name_of(corpus.path)}",
            units=f"rows of {data.length} tokens",
            measured_on=f"Measured on {measured_on}.",
        )

    def stream(self) -> TokenStream:
        """Batches of rows, each once an epoch."""
        return self._stream

    def measure(self, model) -> Measured:
        """Perplexity of the rows to measure on, in the precision of the training."""
        device = next(model.parameters()).device
        with autocast(self.recipe.step.precision, device):
            return Measured(perplexity=perplexity(model, self.eval_batches))


class _Files:
    """The files of a tokenizer, to lie beside a model."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def of(cls, name_or_path: str) -> _Files | ByteTokenizer | None:
        """Of the tokenizer that a corpus was made with, if it is still where it was."""
        if name_or_path == BYTES:
            return ByteTokenizer()
        try:
            return cls(find_tokenizer(name_or_path).parent)
        except (OSError, ValueError):
            return None

    def save(self, folder: str | Path) -> None:
        """Copy them into a folder."""
        for name in (TOKENIZER_FILE, CONFIG_FILE):
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, Path(folder) / name)
