"""Perplexity: how well a model predicts a text, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from mamba3.data.problems import Batch, scored_tokens


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
