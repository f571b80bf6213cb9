"""Documents of ragged length packed into rows of one length, with nothing leaking between them.

A row holds several documents, one after another, and pads at its end. `Batch.seq_idx` numbers the
documents of a row, the pads being one more: the model starts anew where the number changes, and
does not score a document's first token, so that loss and gradients are those of the documents by
themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from mamba3.data.problems import Batch, Problem, ids_and_labels
from mamba3.data.shuffle import Shuffled
from mamba3.data.tokenizer import CharTokenizer
from mamba3.models.lm import IGNORE


class Document(NamedTuple):
    """Ids of a text, and their labels: the ids again where they are scored, else `IGNORE`."""

    input_ids: Sequence[int]
    labels: Sequence[int]


def documents_of(problems: Iterable[Problem], tokenizer: CharTokenizer) -> list[Document]:
    """Problems as documents; their answers are scored."""
    return [Document(*ids_and_labels(problem, tokenizer)) for problem in problems]


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
        # Three tensors instead of lists of lists: small, and shared with workers, not copied.
        self._input_ids = _flat(document.input_ids for document in documents)
        self._labels = _flat(document.labels for document in documents)
        self._starts = torch.tensor([0, *accumulate(lengths)])
        mixed = Shuffled(len(documents), seed)
        order = [mixed(i) for i in range(len(documents))]
        self._rows = [
            [order[i] for i in row] for row in best_fit([lengths[i] for i in order], length)
        ]
        self._order = Shuffled(len(self._rows), seed)
        self.fill = sum(lengths) / (length * len(self._rows))

    def __call__(self, index: int) -> Batch:
        """Batch number `index`, from 0."""
        first = index * self.batch_size
        rows = [self._rows[self._order(i)] for i in range(first, first + self.batch_size)]
        return pack([[self._document(number) for number in row] for row in rows], self.length)

    def _document(self, number: int) -> Document:
        start, stop = self._starts[number : number + 2].tolist()
        return Document(self._input_ids[start:stop], self._labels[start:stop])


def _flat(parts: Iterable[Sequence[int]]) -> torch.Tensor:
    tokens = array("i")
    for part in parts:
        tokens.extend(part)
    return torch.frombuffer(tokens, dtype=torch.int32)
