import pytest
import torch

from mamba3.data.problems import Problem, collate, hash_share
from mamba3.data.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("0123456789+=", prompt_suffix="=")


def test_collate_by_hand():
    batch = collate([Problem("add", "1+2", "3"), Problem("add", "9+1=", "10")], TOKENIZER)
    plus, equals = 13, 14
    assert batch.input_ids.tolist() == [
        [1, 4, plus, 5, equals, 6, 2, 0],
        [1, 12, plus, 4, equals, 4, 3, 2],
    ]
    ignored = [-100] * 5
    assert batch.labels.tolist() == [[*ignored, 6, 2, -100], [*ignored, 4, 3, 2]]
    assert batch.n_tokens == 15
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


def test_hash_share_is_pinned():
    assert hash_share("c123") == pytest.approx(0.9748089143434058, abs=1e-12)
