"""Blanks are filled one after the other, each by the likeliest token after what is before it."""

import pytest
import torch

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.fill import fill


def random_model(seed=0):
    torch.manual_seed(seed)
    config = Mamba3Config(vocab_size=13, d_model=16, n_layer=2, d_state=8, headdim=8)
    model = Mamba3LM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def by_hand(model, row, blanks):
    row = list(row)
    for place in blanks:
        row[place] = int(model(torch.tensor([row[:place]])).logits[0, -1, :13].argmax())
    return row


def test_each_is_the_likeliest_token_after_all_before_it():
    model = random_model()
    lengths, batches = (5, 3, 7, 5, 6, 4, 9, 12), (1, 3, 256)
    rows = [torch.randint(13, (n,)).tolist() for n in lengths]
    blanks = [[2], [], [2], [1, 4], [2], [1, 3], [2, 3, 8], [1, 2, 5, 11]]
    given = [list(row) for row in rows]
    expected = [by_hand(model, *each) for each in zip(rows, blanks, strict=True)]
    assert expected != rows
    for batch_size in batches:
        assert fill(model, rows, blanks, batch_size=batch_size) == expected
    assert rows == given


@pytest.mark.parametrize("blanks", [[0], [4, 2], [2, 2], [5]])
def test_places_that_cannot_be(blanks):
    with pytest.raises(ValueError, match=r"blanks must rise, and lie between 1 and 4"):
        fill(random_model(), [[0] * 5], [blanks])
