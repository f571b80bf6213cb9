"""Perplexity: how well a model predicts a text, token by token, and byte by byte."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mamba3.data.problems import Batch, scored_tokens
from mamba3.data.sources import read_texts, source_files
from mamba3.data.text import ENDINGS, TokenFile
from mamba3.data.text_tokenizer import TextTokenizer

# Logits that are in memory at once, in elements.
MAX_LOGITS = 2**27


class Perplexity(NamedTuple):
    """Over all scored tokens together, whatever batches they came in.

    loss: mean cross-entropy, in nats a token.
    perplexity: exp(loss).
    n_tokens: tokens that were predicted.
    """

    loss: float
    perplexity: float
    n_tokens: int


@torch.no_grad()
def perplexity(model, batches: Iterable[Batch]) -> Perplexity:
    """Measure a model on batches of tokens; their labels say which are scored.

    Args:
        model: a `Mamba3LM`; it is run as it is, under whatever autocast there is.
        batches: on any device.

    Raises:
        ValueError: no token is scored.
    """
    device = next(model.parameters()).device
    total, n_tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in batches:
        ids, labels, seq_idx = (
            None if t is None else t.to(device)
            for t in (batch.input_ids, batch.labels, batch.seq_idx)
        )
        count = int(scored_tokens(batch.labels, batch.seq_idx))
        if not count:
            continue
        loss = model(ids, labels=labels, seq_idx=seq_idx, return_logits=False).loss
        total += loss.double() * count
        n_tokens += count
    if not n_tokens:
        raise ValueError("perplexity needs at least one token to predict, got none")
    loss = total.item() / n_tokens
    return Perplexity(loss, math.exp(min(loss, 700.0)), n_tokens)


class Document(NamedTuple):
    """A text to predict.

    ids: its tokens, after those that it opens with.
    n_context: how many ids at the beginning are not predicted, at least 1.
    n_bytes: UTF-8 bytes of the predicted text; None if they are not known.
    """

    ids: Sequence[int]
    n_context: int
    n_bytes: int | None


class TextPerplexity(NamedTuple):
    """Over all tokens of all documents together.

    loss: mean cross-entropy, in nats a token.
    perplexity: exp(loss), of a token; it depends on the tokenizer.
    bits_per_byte: cross-entropy of all the text in bits, over its bytes; models of different
        tokenizers can be compared by it. None if the bytes are not known.
    byte_perplexity: 2 ** bits_per_byte.
    n_tokens, n_bytes, n_documents: that were predicted.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    byte_perplexity: float | None
    n_tokens: int
    n_bytes: int | None
    n_documents: int


def read_documents(
    path: str | Path,
    tokenizer: TextTokenizer | None = None,
    *,
    field: str = "text",
    lines: bool = False,
) -> Iterator[Document]:
    """Read the documents of a file of texts, or of a token file.

    Every token of a text is predicted, its end token is not: the first one from the token that the
    tokenizer opens texts with, or where there is none from the end token, which is what stands
    before a text in training. A token file holds neither texts nor what opens them: there, all
    ids of a document after its first are predicted, and bytes are not known.

    Args:
        path: a .jsonl, .parquet or text file, a folder of them, or a token file with an ending.
        tokenizer: of `load_text_tokenizer`; a token file needs none.
        field: key or column that holds the text.
        lines: a line of a text file is a document, instead of the file.

    Raises:
        OSError, RuntimeError: as for `mamba3.data.sources`.
        ValueError: a text that cannot be used, with its file and line; no tokenizer.
    """
    if Path(path).suffix in ENDINGS:
        corpus = TokenFile(path)
        for number in range(corpus.n_documents):
            yield Document(corpus.document(number).astype(np.int64), 1, None)
        return
    if tokenizer is None:
        raise ValueError(f"{path} is not a token file: it needs a tokenizer")
    *opening, end = tokenizer.encode([""])[0]
    for text in read_texts(source_files([path]), field=field, lines=lines):
        try:
            if text.text is None:
                raise ValueError(text.error)
            ids = tokenizer.encode([text.text])[0][:-1]
        except ValueError as error:
            raise ValueError(f"{text.where}: {error}") from error
        n_bytes = len(text.text.encode("utf-8"))
        # The end token may be what opens a text as well: then an empty one is this token alone.
        if not opening and ids[:1] != [end]:
            ids = [end, *ids]
        yield Document(ids, len(opening) or 1, n_bytes)


def text_perplexity(
    model, documents: Iterable[Document], *, length: int = 2048, batch_size: int = 8
) -> TextPerplexity:
    """Measure a model on documents; each of their tokens is predicted once.

    Args:
        model: a `Mamba3LM`; it is run as it is, under whatever autocast there is.
        documents: of `read_documents`.
        length: tokens seen at once. A longer document is cut into windows, which share one token,
            so that the first token of a window is predicted in the window before.
        batch_size: windows run at once.

    Raises:
        ValueError: no token is predicted, or a length below 2.
    """
    if length < 2 or batch_size < 1:
        raise ValueError(
            f"length must be at least 2 and batch_size at least 1, got {length} and {batch_size}"
        )
    nats, n_tokens, n_documents, n_bytes = 0.0, 0, 0, 0

    def windows() -> Iterator[tuple[Sequence[int], int]]:
        """Ids, and how many of their losses to leave out."""
        nonlocal n_documents, n_bytes
        for ids, n_context, size in documents:
            n_documents += 1
            n_bytes = None if n_bytes is None or size is None else n_bytes + size
            for start in range(0, len(ids) - 1, length - 1):
                yield ids[start : start + length], max(0, n_context - 1 - start)

    for group in batched(windows(), batch_size):
        rows, left_out = zip(*group, strict=True)
        for losses, skip in zip(row_losses(model, rows), left_out, strict=True):
            nats += losses[skip:].sum().item()
            n_tokens += len(losses[skip:])
    if not n_tokens:
        raise ValueError("text_perplexity needs at least one token to predict, got none")
    bits = nats / math.log(2) / n_bytes if n_bytes else None
    return TextPerplexity(
        loss=nats / n_tokens,
        perplexity=math.exp(min(nats / n_tokens, 700.0)),
        bits_per_byte=bits,
        byte_perplexity=None if bits is None else 2 ** min(bits, 1000.0),
        n_tokens=n_tokens,
        n_bytes=n_bytes,
        n_documents=n_documents,
    )


@torch.no_grad()
def row_losses(model, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The cross-entropy of every id of a row but the first, in nats, float64 on the CPU.

    Args:
        model: a `Mamba3LM`. A row is read in pieces, the state handed on from each to the next, so
            that only the logits of one piece are ever in memory.
        rows: ids; shorter rows are padded on the right, where nothing is scored.

    Returns:
        For each row a tensor of one less than its ids.
    """
    device = next(model.parameters()).device
    ids = pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True).to(device)
    n_rows, length = ids.shape
    piece = max(1, MAX_LOGITS // (n_rows * model.config.padded_vocab_size))
    losses, state = [], None
    for start in range(0, length - 1, piece):
        stop = min(start + piece, length - 1)
        output = model(ids[:, start:stop], state=state, return_state=True)
        state, logits = output.state, output.logits
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        targets = ids[:, start + 1 : stop + 1]
        loss = F.cross_entropy(logits, targets.flatten(), reduction="none")
        losses.append(loss.view(targets.shape).double().cpu())
    if not losses:
        return [torch.zeros(0, dtype=torch.float64) for _ in rows]
    together = torch.cat(losses, dim=1)
    return [together[i, : len(row) - 1] for i, row in enumerate(rows)]


def batched(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items; the last may have fewer."""
    items = iter(items)
    while group := list(itertools.islice(items, size)):
        yield group
