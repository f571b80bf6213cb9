"""Documents of ragged length packed into rows of one length, with nothing leaking between them.

A row holds several documents, one after another, and pads at its end. `Batch.seq_idx` numbers the
documents of a row, the pads being one more: the model starts anew where the number changes, and
does not score a document's first token, so that loss and gradients are those of the documents by
themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mamba3.data.chat import encode_chat
from mamba3.data.problems import Batch, Problem, ids_and_labels
from mamba3.data.rows import Row
from mamba3.data.shuffle import Shuffled
from mamba3.data.tokenizer import Tokenizer
from mamba3.models.lm import IGNORE


class Document(NamedTuple):
    """Ids of a text, and their labels: the ids again where they are scored, else `IGNORE`."""

    input_ids: Sequence[int]
    labels: Sequence[int]


def documents_of(problems: Iterable[Problem], tokenizer: Tokenizer) -> list[Document]:
    """Problems as documents; their answers are scored."""
    return [Document(*ids_and_labels(problem, tokenizer)) for problem in problems]


def document_of(row: Row, tokenizer: Tokenizer, *, all_tokens: bool = False) -> Document:
    """A row of a user's own as a document.

    Of a text everything is scored, of a prompt with a completion the completion and its end, of a
    conversation what the assistant says.

    Args:
        row: of `mamba3.data.rows`.
        tokenizer: the model's.
        all_tokens: whether everything is scored, whatever the row is.

    Raises:
        ValueError: the tokenizer cannot encode it, or nothing of it would be scored; with its file
            and line.
    """
    try:
        ids, labels = _ids_and_labels(row, tokenizer)
    except ValueError as error:
        raise row.error(error) from None
    if all_tokens:
        labels = ids
    if all(label == IGNORE for label in labels[1:]):
        raise row.error("no token of it would be trained on")
    return Document(ids, labels)


def _ids_and_labels(row: Row, tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    if row.form == "messages":
        return encode_chat(row.content, tokenizer)
    if row.form == "prompt":
        return ids_and_labels(Problem("", *row.content), tokenizer)
    ids = [*tokenizer.encode(row.content), tokenizer.eos_token_id]
    if tokenizer.bos_token_id is not None:
        ids.insert(0, tokenizer.bos_token_id)
    return ids, ids


def cut(document: Document, length: int, *, into_many: bool) -> list[Document]:
    """A document cut to at most `length` tokens, without what has nothing scored then.

    Args:
        document: of any length.
        length: of the parts.
        into_many: whether the rest makes further documents, or is lost.
    """
    stop = len(document.input_ids) if into_many else length
    parts = [
        Document(document.input_ids[i : i + length], document.labels[i : i + length])
        for i in range(0, stop, length)
    ]
    return [part for part in parts if any(label != IGNORE for label in part.labels[1:])]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack documents into rows, each into the fullest row that still has room for it.

    Args:
        lengths: of the documents, each from 1 to `capacity`, in the order they are packed in.
        capacity: of a row.

    Returns:
        Rows, as lists of document numbers.

    Raises:
        ValueError: a document that is empty or does not fit a row, with its number.
    """
    _check_fits(lengths, capacity)
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of with_space, ascending
    for number, length in enumerate(lengths):
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = len(rows), capacity
            rows.append([])
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        rows[row].append(number)
        if left := space - length:
            if left not in with_space:
                insort(spaces, left)
            with_space.setdefault(left, []).append(row)
    return rows


def _check_fits(lengths: Sequence[int], capacity: int) -> None:
    for number, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(
                f"document {number} has {length} tokens, expected 1 to {capacity}, the length of "
                "a row; split it, leave it out, or make rows longer"
            )


def pack(rows: Sequence[Sequence[Document]], length: int) -> Batch:
    """Make a batch of rows of documents.

    Args:
        rows: the documents of each row; together they have at most `length` tokens.
        length: of every row; the rest is filled with pads (id 0), which are not scored.
    """
    shape = (len(rows), length)
    batch = Batch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        labels=torch.full(shape, IGNORE),
        n_tokens=sum(len(document.input_ids) for row in rows for document in row),
        seq_idx=torch.empty(shape, dtype=torch.long),
    )
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents):
            stop = start + len(document.input_ids)
            batch.input_ids[row, start:stop] = torch.as_tensor(document.input_ids)
            batch.labels[row, start:stop] = torch.as_tensor(document.labels)
            batch.seq_idx[row, start:stop] = number
            start = stop
        batch.seq_idx[row, start:] = len(documents)
    return batch


class PackedStream:
    """An endless stream of batches of packed rows, every document once an epoch.

    Documents are packed once, in an order drawn from the seed; an epoch takes the rows in a new
    order. Batch i is a function of (documents, length, batch_size, seed, i).

    Args:
        documents: what to train on, each of at most `length` tokens.
        length: tokens in a row.
        batch_size: rows in a batch; a batch may reach over the end of an epoch.
        seed: of the packing and the orders.

    Attributes:
        n_rows: rows in an epoch.
        fill: share of the tokens that are not pads, over an epoch.

    Raises:
        ValueError: there are no documents, or one does not fit a row.
    """

    def __init__(self, documents: Sequence[Document], *, length: int, batch_size: int, seed: int):
        if not documents:
            raise ValueError("there are no documents to train on")
        lengths = [len(document.input_ids) for document in documents]
        _check_fits(lengths, length)  # here, where numbers are the caller's
        self.length, self.batch_size = length, batch_size
        self._documents = _Documents(documents)
        mixed = Shuffled(len(documents), seed)
        order = [mixed(i) for i in range(len(documents))]
        self._rows = [
            [order[i] for i in row] for row in best_fit([lengths[i] for i in order], length)
        ]
        self.n_rows = len(self._rows)
        self._order = Shuffled(self.n_rows, seed)
        self.fill = sum(lengths) / (length * self.n_rows)

    def __call__(self, index: int) -> Batch:
        """Batch number `index`, from 0."""
        first = index * self.batch_size
        rows = [self._rows[self._order(i)] for i in range(first, first + self.batch_size)]
        return pack([[self._documents[number] for number in row] for row in rows], self.length)


class PaddedStream:
    """An endless stream of batches with a document a row, every document once an epoch.

    Rows are padded on the right to the longest of their batch. Batch i is a function of (documents,
    batch_size, seed, i).

    Args:
        documents: what to train on.
        batch_size: documents in a batch; a batch may reach over the end of an epoch.
        seed: of the orders.

    Raises:
        ValueError: there are no documents.
    """

    def __init__(self, documents: Sequence[Document], *, batch_size: int, seed: int):
        if not documents:
            raise ValueError("there are no documents to train on")
        self.batch_size = batch_size
        self._documents = _Documents(documents)
        self._order = Shuffled(len(documents), seed)

    def __call__(self, index: int) -> Batch:
        """Batch number `index`, from 0."""
        first = index * self.batch_size
        numbers = map(self._order, range(first, first + self.batch_size))
        return padded([self._documents[number] for number in numbers])


class MixedStream:
    """Batches whose rows come from two streams, those of the first one before the others.

    Args:
        first, second: streams of batches, both with `seq_idx` or both without.
    """

    def __init__(self, first: Callable[[int], Batch], second: Callable[[int], Batch]):
        self.first, self.second = first, second

    def __call__(self, index: int) -> Batch:
        """Batch number `index`, from 0."""
        parts = self.first(index), self.second(index)
        length = max(part.input_ids.shape[1] for part in parts)

        def joined(tensors: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
            return torch.cat([F.pad(t, (0, length - t.shape[1]), value=fill) for t in tensors])

        numbers = None
        if parts[0].seq_idx is not None:
            numbers = joined([part.seq_idx for part in parts], 0)
        return Batch(
            joined([part.input_ids for part in parts], 0),
            joined([part.labels for part in parts], IGNORE),
            sum(part.n_tokens for part in parts),
            numbers,
        )


def padded(documents: Sequence[Document]) -> Batch:
    """Make a batch with a document a row, as long as the longest."""
    length = max(len(document.input_ids) for document in documents)
    return pack([[document] for document in documents], length)._replace(seq_idx=None)


class _Documents:
    """Documents as three tensors: small, and shared with workers instead of copied."""

    def __init__(self, documents: Sequence[Document]):
        self._input_ids = _flat(document.input_ids for document in documents)
        self._labels = _flat(document.labels for document in documents)
        self._starts = torch.tensor(
            [0, *accumulate(len(document.input_ids) for document in documents)]
        )

    def __getitem__(self, number: int) -> Document:
        start, stop = self._starts[number : number + 2].tolist()
        return Document(self._input_ids[start:stop], self._labels[start:stop])


def _flat(parts: Iterable[Sequence[int]]) -> torch.Tensor:
    tokens = array("i")
    for part in parts:
        tokens.extend(part)
    return torch.frombuffer(tokens, dtype=torch.int32)
