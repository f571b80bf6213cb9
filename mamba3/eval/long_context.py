"""Long context: how well a model predicts a token, by how many tokens stand before it.

A model that uses its context has a loss that falls with the position; one that was trained on
shorter texts, and does not carry over, has one that rises past their length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from mamba3.eval.perplexity import Document, batched, row_losses

FIRST_EDGE = 128


class Bucket(NamedTuple):
    """Tokens with at least `first` and fewer than `last` tokens before them.

    loss: mean cross-entropy, in nats a token.
    perplexity: exp(loss).
    n_tokens: that were predicted.
    """

    first: int
    last: int
    loss: float
    perplexity: float
    n_tokens: int


class LongContext(NamedTuple):
    """The curve of a model.

    length: tokens of a window.
    n_windows: that were read, all of this length, so that every bucket has the same texts.
    n_left_out: documents that are shorter.
    buckets: in order; the very first token of a window is not predicted.
    """

    length: int
    n_windows: int
    n_left_out: int
    buckets: list[Bucket]


def long_context(
    model,
    documents: Iterable[Document],
    length: int,
    *,
    edges: Sequence[int] | None = None,
    batch_size: int = 1,
) -> LongContext:
    """Measure a model on windows of one length, by the position in them.

    Args:
        model: a `Mamba3LM`; it is run as it is, under whatever autocast there is.
        documents: of `read_documents`. They are cut into windows without overlap; what is left
            over at the end of each is not used.
        length: tokens of a window, at least 2; it may be longer than the model was trained on.
        edges: where buckets begin, rising from 0, and where the last one ends, `length`. None
            takes 0, 128, 256, 512, ..., each twice the one before.
        batch_size: windows run at once.

    Raises:
        ValueError: no document is as long as a window; edges that do not fit.
    """
    edges = doubling_edges(length) if edges is None else list(edges)
    rising = all(a < b for a, b in pairwise(edges))
    if length < 2 or not rising or edges[:1] != [0] or edges[-1] != length:
        raise ValueError(
            f"edges must rise from 0 to the length, which is at least 2; got {edges} for {length}"
        )
    n_windows = n_left_out = longest = 0

    def windows() -> Iterator[Sequence[int]]:
        nonlocal n_windows, n_left_out, longest
        for ids, n_context, _ in documents:
            ids = ids[n_context - 1 :]
            longest = max(longest, len(ids))
            n_left_out += len(ids) < length
            for start in range(0, len(ids) - length + 1, length):
                n_windows += 1
                yield ids[start : start + length]

    total = torch.zeros(length - 1, dtype=torch.float64)
    for rows in batched(windows(), batch_size):
        total += torch.stack(row_losses(model, rows)).sum(0)
    if not n_windows:
        raise ValueError(
            f"no document has the {length} tokens of a window, the longest has {longest}: take a "
            "shorter length, or longer documents"
        )
    buckets = []
    for first, last in pairwise(edges):
        losses = total[max(first, 1) - 1 : last - 1]  # losses begin with position 1
        if len(losses):
            loss = losses.mean().item() / n_windows
            perplexity = math.exp(min(loss, 700.0))
            buckets.append(Bucket(first, last, loss, perplexity, len(losses) * n_windows))
    return LongContext(length, n_windows, n_left_out, buckets)


def doubling_edges(length: int) -> list[int]:
    """0, 128, 256, 512, ... up to a length."""
    edges, edge = [0], FIRST_EDGE
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def even_edges(length: int, width: int) -> list[int]:
    """Every `width` positions up to a length.

    Raises:
        ValueError: a width below 1.
    """
    if width < 1:
        raise ValueError(f"buckets must be at least 1 position wide, got {width}")
    return [*range(0, length, width), length]
