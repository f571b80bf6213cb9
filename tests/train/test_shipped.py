"""The checkpoint that ships does what its card says."""

import math

import pytest
from huggingface_hub import ModelCard

from mamba3 import load_model, load_tokenizer
from mamba3.data.arithmetic import TEST_SHARE, eval_problems
from mamba3.data.problems import hash_share
from mamba3.eval.exact_match import exact_match
from mamba3.zoo import resolve

NAME = "arithmetic-tiny"


def never_trained_on(n):
    """Held-out problems of stage 1; when this model was trained, the split was by another hash."""
    return [p for p in eval_problems(1, n) if hash_share(p.prompt) < TEST_SHARE]


def test_stage_1_on_held_out_problems_and_all_facts_of_stage_2():
    model, tokenizer = load_model(NAME), load_tokenizer(NAME)
    digits = exact_match(model, tokenizer, never_trained_on(30_000))
    facts = exact_match(model, tokenizer, eval_problems(2, 200))
    assert digits.n > 1000
    assert digits.overall >= 0.998, digits.misses
    assert facts.per_task == {"add": 1.0, "subtract": 1.0}

    card = ModelCard.load(resolve(NAME) / "README.md")
    told = {entry.dataset_config: entry.metric_value for entry in card.data.eval_results}
    # Other problems than those of the card: three standard deviations of its least share.
    assert told == pytest.approx(digits.per_task | facts.per_task, abs=5e-3)
    overall = sum(told[task] * (100 if task in facts.per_task else 500) for task in told) / 2200
    assert f"| all | 2200 | {math.floor(overall * 1e4) / 100:.2f} % |" in card.text


def test_the_folder_is_small():
    assert sum(p.stat().st_size for p in resolve(NAME).rglob("*")) < 2_000_000
