import pytest
import torch

from mamba3.data.problems import Problem, collate, hash_share, prompt_ids
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


def test_blanks_take_the_beginning_of_the_answer():
    problems = [
        Problem("sum", "85_74_", "321", blanks=True),
        Problem("sum", "9_", "9", blanks=True),
    ]
    batch = collate(problems, TOKENIZER)
    equals, no = 14, -100
    assert batch.input_ids.tolist() == [
        [1, 11, 8, 6, 10, 7, 5, equals, 4, 2],
        [1, 12, 12, equals, 2, 0, 0, 0, 0, 0],
    ]
    assert batch.labels.tolist() == [
        [no, no, no, 6, no, no, 5, no, 4, 2],
        [no, no, 12, no, 2, no, no, no, no, no],
    ]
    assert prompt_ids(problems[0], TOKENIZER) == ([1, 11, 8, 0, 10, 7, 0, equals], [3, 6])
    assert prompt_ids(Problem("w", "12", "3", blanks=True), TOKENIZER)[1] == []
    with pytest.raises(ValueError, match="character '_'"):
        prompt_ids(problems[0]._replace(blanks=False), TOKENIZER)


def test_hash_share_is_pinned():
    assert hash_share("c123") == pytest.approx(0.9748089143434058, abs=1e-12)
