import pytest
import torch

from mamba3.data.problems import EpochStream, Problem, collate, hash_share
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


def test_an_epoch_is_every_problem_once():
    problems = [Problem("t", str(i), "1") for i in range(10)]
    stream = EpochStream(problems, TOKENIZER, batch_size=4, seed=0)
    ids = [row for i in range(5) for row in stream(i).input_ids[:, 1].tolist()]
    first, second = ids[:10], ids[10:]
    assert sorted(first) == sorted(second) == list(range(3, 13))
    assert first != second
    again = EpochStream(problems, TOKENIZER, batch_size=4, seed=0)
    assert torch.equal(again(3).input_ids, stream(3).input_ids)
    other = EpochStream(problems, TOKENIZER, batch_size=4, seed=1)
    assert not torch.equal(other(0).input_ids, stream(0).input_ids)


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="no problems"):
        EpochStream([], TOKENIZER, batch_size=4, seed=0)
