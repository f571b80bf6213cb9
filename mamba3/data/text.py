"""Token files, a corpus as one long array of ids on disk, and training batches of it.

    NAME.bin    the ids of all documents, one after another; uint16 or uint32, little-endian
    NAME.idx    where each document begins, then where the last one ends; int64, little-endian
    NAME.json   dtype, vocab_size, n_tokens, n_documents, tokenizer; written last

The arrays are memory-mapped: a corpus may be larger than memory, and processes share it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from mamba3.atomic import replace_file, replace_text
from mamba3.data.groups import together
from mamba3.data.problems import Batch
from mamba3.data.shuffle import Shuffled
from mamba3.data.sources import Text
from mamba3.data.text_tokenizer import TextTokenizer
from mamba3.progress import progress_bar

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET = np.dtype("<i8")
ENDINGS = (".bin", ".idx", ".json")
# Tokens that a worker sends at once, of several batches where those are smaller: what a queue takes
# for each is more than what the tokens take.
_AT_ONCE = 1 << 17
# What is encoded at once: the tokenizers library shares it out over its threads.
GROUP_TEXTS, GROUP_CHARACTERS = 256, 2**24
logger = logging.getLogger(__name__)


class Written(NamedTuple):
    """What `write_tokens` came to.

    path: of the token file, without an ending.
    n_documents, n_tokens: what it holds.
    n_skipped: documents that were left out.
    """

    path: str
    n_documents: int
    n_tokens: int
    n_skipped: int


def write_tokens(
    texts: Iterable[Text],
    tokenizer: TextTokenizer,
    out: str | Path,
    *,
    on_error: str = "raise",
    overwrite: bool = False,
    n_bytes: float | None = None,
    progress: bool = True,
) -> Written:
    """Write the documents of a corpus as a token file, whole or not at all.

    Args:
        texts: such as those of `mamba3.data.sources.read_texts`.
        tokenizer: of `load_text_tokenizer`.
        out: FOLDER/NAME; the folder is made if needed.
        on_error: what a document that cannot be used does: "raise", or "skip", which leaves it
            out; a warning says how many there were, and names the first.
        overwrite: replace a token file of this name.
        n_bytes: of all texts, so that the progress bar knows its end.
        progress: show a bar on standard error if it takes more than a few seconds.

    Raises:
        FileExistsError: there is a token file of this name.
        ValueError: a document that cannot be used, with its file and line; no documents at all.
        OSError: writing failed, as on a full disk. After any of these errors, a token file that
            was there before is there still.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    path = _without_ending(out)
    if not overwrite and _file(path, ".json").exists():
        raise FileExistsError(f"{_file(path, '.json')} exists; choose another name, or overwrite")
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    skipped: list[str] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar(progress, total=n_bytes, unit="B", unit_scale=True, delay=2) as bar:
        documents = _documents(texts, tokenizer, bar, skipped if on_error == "skip" else None)
        n_documents, n_tokens = _write_arrays(path, DTYPES[dtype], documents)
    facts = {
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "n_tokens": n_tokens,
        "n_documents": n_documents,
        "tokenizer": tokenizer.name,
    }
    replace_text(_file(path, ".json"), json.dumps(facts, indent=2) + "\n")
    if skipped:
        logger.warning("%d documents were left out; the first: %s", len(skipped), skipped[0])
    return Written(str(path), n_documents, n_tokens, len(skipped))


def _documents(
    texts: Iterable[Text], tokenizer: TextTokenizer, bar: tqdm, skipped: list[str] | None
) -> Iterator[list[int]]:
    """The ids of each text; one that cannot be used goes to `skipped`, or raises without it."""
    for group in _groups(texts):
        for text, ids in zip(group, _encode(group, tokenizer), strict=True):
            bar.update(text.n_bytes)
            if isinstance(ids, list):
                yield ids
            elif skipped is not None:
                skipped.append(f"{text.where}: {ids}")
            else:
                raise ValueError(f"{text.where}: {ids}") from ids


def _groups(texts: Iterable[Text]) -> Iterator[list[Text]]:
    group, characters = [], 0
    for text in texts:
        group.append(text)
        characters += len(text.text or "")
        if len(group) == GROUP_TEXTS or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _encode(group: list[Text], tokenizer: TextTokenizer) -> list[list[int] | ValueError]:
    """Ids, or what is wrong, of each text; together if they are all good, else one by one."""
    try:
        for text in group:
            if text.text is None:
                raise ValueError(text.error)
        return tokenizer.encode([text.text for text in group])
    except ValueError as error:
        if len(group) == 1:
            return [error]
        return [found for text in group for found in _encode([text], tokenizer)]


def _write_arrays(path: Path, dtype: np.dtype, documents: Iterable[list[int]]) -> tuple[int, int]:
    """Write ids and offsets; return the number of documents and of ids."""
    n_documents = n_tokens = 0

    def write(ids_file: IO[bytes], offsets_file: IO[bytes]) -> None:
        nonlocal n_documents, n_tokens
        offsets_file.write(np.zeros(1, OFFSET).tobytes())
        for ids in documents:
            n_documents += 1
            n_tokens += len(ids)
            ids_file.write(np.array(ids, dtype).tobytes())
            offsets_file.write(np.array(n_tokens, OFFSET).tobytes())
        if not n_documents:
            raise ValueError(f"there are no documents to write to {path}")
        for file in (ids_file, offsets_file):
            file.flush()  # a full disk shows here
        # From now on the old description must not be found beside the new arrays.
        _file(path, ".json").unlink(missing_ok=True)

    def write_ids(ids_file: IO[bytes]) -> None:
        replace_file(_file(path, ".idx"), lambda offsets_file: write(ids_file, offsets_file))

    replace_file(_file(path, ".bin"), write_ids)
    return n_documents, n_tokens


class TokenFile:
    """A token file, memory-mapped.

    Args:
        path: FOLDER/NAME, with or without one of its endings.

    Attributes:
        tokens: all ids, (n_tokens,).
        offsets: where each document begins, and the end of the last, (n_documents + 1,).
        vocab_size, n_tokens, n_documents: sizes.
        tokenizer: name or path it was made with.

    Raises:
        FileNotFoundError: one of its three files is missing.
        ValueError: they are damaged, or do not belong together.
    """

    def __init__(self, path: str | Path):
        self.path = _without_ending(path)
        facts = _read_facts(_file(self.path, ".json"))
        self.vocab_size, self.tokenizer = facts["vocab_size"], facts["tokenizer"]
        self.n_tokens, self.n_documents = facts["n_tokens"], facts["n_documents"]
        self.tokens = _mapped(_file(self.path, ".bin"), DTYPES[facts["dtype"]], self.n_tokens)
        self.offsets = _mapped(_file(self.path, ".idx"), OFFSET, self.n_documents + 1)
        if self.offsets[0] != 0 or self.offsets[-1] != self.n_tokens:
            raise ValueError(
                f"{_file(self.path, '.idx')} is damaged: it goes from {self.offsets[0]} to "
                f"{self.offsets[-1]}, expected 0 to {self.n_tokens}; {_REMEDY}"
            )

    def __reduce__(self):
        return TokenFile, (self.path,)  # another process maps the files itself

    def document(self, number: int) -> np.ndarray:
        """The ids of document `number`, from 0."""
        start, stop = self.offsets[number : number + 2]
        return self.tokens[start:stop]


_REMEDY = "write it again with `mamba3 tokenize`"
_FACTS = {"dtype": str, "vocab_size": int, "n_tokens": int, "n_documents": int, "tokenizer": str}


def _read_facts(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `mamba3 tokenize` writes token files")
    try:
        facts = json.loads(path.read_bytes())
        for name, kind in _FACTS.items():
            value = facts.get(name)
            if not isinstance(value, kind) or (kind is int and value < 1):
                raise ValueError(f"{name} is {value!r}")
        if facts["dtype"] not in DTYPES:
            raise ValueError(f"dtype is {facts['dtype']!r}, expected {' or '.join(DTYPES)}")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a token file: {error}; {_REMEDY}") from None
    return facts


def _mapped(path: Path, dtype: np.dtype, n: int) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {_REMEDY}")
    if (size := path.stat().st_size) != n * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, expected {n * dtype.itemsize}: it is cut off or of another "
            f"token file; {_REMEDY}"
        )
    return np.memmap(path, dtype, "r")


class TokenStream:
    """An endless stream of batches of a token file, each of its windows once an epoch.

    A window is `length` ids; the corpus is cut into windows without overlap, across the ends of
    documents, and what is left over at its end is not used. Every epoch has a new order. Batch i
    is a function of (corpus, length, batch_size, seed, i), and costs the same whatever i.

    Args:
        path: of the token file.
        length: ids in a row.
        batch_size: rows in a batch; a batch may reach over the end of an epoch.
        seed: of the orders.
        hold_out: windows at the end of the corpus that are left out, for measuring.

    Raises:
        OSError, ValueError: as for `TokenFile`; a corpus of too few rows. In a batch, an id that
            the vocabulary does not have.
    """

    def __init__(
        self, path: str | Path, *, length: int, batch_size: int, seed: int, hold_out: int = 0
    ):
        self.corpus = TokenFile(path)
        windows = _windows(self.corpus, length)
        if not 0 <= hold_out < windows:
            raise ValueError(
                f"{hold_out} of the {windows} rows of {length} tokens that {self.corpus.path} has "
                "cannot be held out: take fewer, or shorter ones"
            )
        self.length, self.batch_size = length, batch_size
        self.batches_at_once = together(length * batch_size, _AT_ONCE)
        self._order = Shuffled(windows - hold_out, seed)

    def __call__(self, index: int) -> Batch:
        """Batch number `index`, from 0; labels are the ids, since the model shifts them."""
        first = index * self.batch_size
        numbers = [self._order(i) for i in range(first, first + self.batch_size)]
        return _batch(self.corpus, numbers, self.length)


def rows_of(path: str | Path, length: int, count: int, *, batch_size: int) -> list[Batch]:
    """The last windows of a token file, in order, to measure on.

    Args:
        path: of the token file.
        length: ids in a row.
        count: of rows.
        batch_size: rows in a batch; the last one may have fewer.

    Raises:
        OSError, ValueError: as for `TokenStream`.
    """
    corpus = TokenFile(path)
    windows = _windows(corpus, length)
    if count > windows:
        raise ValueError(f"{corpus.path} has {windows} rows of {length} tokens, not {count}")
    numbers = range(windows - count, windows)
    return [
        _batch(corpus, numbers[i : i + batch_size], length) for i in range(0, count, batch_size)
    ]


def _windows(corpus: TokenFile, length: int) -> int:
    """How many windows a corpus has."""
    if not 1 <= length <= corpus.n_tokens:
        raise ValueError(
            f"length must be 1 to {corpus.n_tokens}, the tokens of {corpus.path}, got {length}"
        )
    return corpus.n_tokens // length


def _batch(corpus: TokenFile, numbers: Iterable[int], length: int) -> Batch:
    """Windows by their numbers; labels are the ids."""
    starts = [number * length for number in numbers]
    rows = np.stack([corpus.tokens[start : start + length] for start in starts])
    if rows.max() >= corpus.vocab_size:
        row, place = np.argwhere(rows >= corpus.vocab_size)[0]
        raise ValueError(
            f"{_file(corpus.path, '.bin')} is damaged: token {starts[row] + place} is "
            f"{rows[row, place]}, expected less than {corpus.vocab_size}; {_REMEDY}"
        )
    ids = torch.from_numpy(rows.astype(np.int64))
    return Batch(ids, ids, ids.numel())


def _without_ending(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in ENDINGS else path


def _file(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
