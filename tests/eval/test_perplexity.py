"""Perplexity against all logits in float64."""

import math

import pytest
import torch
from compare import DEVICE, randomise
from torch.nn import functional as F

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data.problems import Batch
from mamba3.eval.perplexity import perplexity
from mamba3.models.lm import IGNORE


def test_all_scored_tokens_count_the_same():
    config = Mamba3Config(vocab_size=19, d_model=16, n_layer=2, d_state=6, headdim=8)
    model = randomise(Mamba3LM(config, device=DEVICE), scale=0.3).double().eval()
    batches, losses = [], []
    for rows, length, ignored in ((3, 9, 4), (1, 5, 0), (2, 4, 4)):
        ids = torch.randint(19, (rows, length))
        labels = ids.clone()
        labels[:, :ignored] = IGNORE
        batches.append(Batch(ids, labels, ids.numel()))
        with torch.no_grad():
            logits = model(ids.to(DEVICE)).logits[:, :-1]
        for i in range(rows):
            for t in range(length - 1):
                if labels[i, t + 1] != IGNORE:
                    losses.append(F.cross_entropy(logits[i, t], ids[i, t + 1].to(DEVICE)))
    found = perplexity(model, batches)
    assert found.n_tokens == len(losses)
    loss = torch.stack(losses).mean().item()
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    with pytest.raises(ValueError, match="at least one token"):
        perplexity(model, batches[2:])
