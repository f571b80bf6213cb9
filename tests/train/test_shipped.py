"""The checkpoint that ships does what its card says."""

import math

from huggingface_hub import ModelCard

from mamba3 import load_model, load_tokenizer
from mamba3.data.arithmetic import eval_problems
from mamba3.eval.exact_match import exact_match
from mamba3.zoo import resolve

NAME = "arithmetic-tiny"


def test_stage_1_on_held_out_problems_and_all_facts_of_stage_2():
    model, tokenizer = load_model(NAME), load_tokenizer(NAME)
    digits = exact_match(model, tokenizer, eval_problems(1, 2000))
    facts = exact_match(model, tokenizer, eval_problems(2, 200))
    assert digits.n == 2000
    assert digits.overall >= 0.999, digits.misses
    assert facts.per_task == {"add": 1.0, "subtract": 1.0}

    card = ModelCard.load(resolve(NAME) / "README.md")
    told = {entry.dataset_config: entry.metric_value for entry in card.data.eval_results}
    assert told == digits.per_task | facts.per_task
    overall = (digits.overall * digits.n + facts.n) / (digits.n + facts.n)
    assert f"| all | 2200 | {math.floor(overall * 1e4) / 100:.2f} % |" in card.text


def test_another_draw_of_held_out_problems():
    result = exact_match(load_model(NAME), load_tokenizer(NAME), eval_problems(1, 2000, seed=1))
    assert result.overall >= 0.998, result.misses


def test_the_folder_is_small():
    assert sum(p.stat().st_size for p in resolve(NAME).rglob("*")) < 2_000_000
