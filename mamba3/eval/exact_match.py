"""Exact match: does greedy generation give the answer, the whole answer, and then stop?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mamba3.data.problems import Problem
from mamba3.data.tokenizer import CharTokenizer
from mamba3.generate import generate
from mamba3.generate_text import left_padded


class Miss(NamedTuple):
    """A problem that was answered wrongly, and the text that came instead."""

    task: str
    prompt: str
    answer: str
    got: str


class ExactMatch(NamedTuple):
    """Shares are in [0, 1].

    overall: share of all problems answered exactly.
    per_task: the same, task by task.
    n, n_per_task: number of problems.
    truncated: answers that had not ended when `max_new_tokens` were made; they count as wrong.
    misses: the first few wrong answers.
    """

    overall: float
    per_task: dict[str, float]
    n: int
    n_per_task: dict[str, int]
    truncated: int
    misses: list[Miss]


def exact_match(
    model,
    tokenizer: CharTokenizer,
    problems: Sequence[Problem],
    *,
    batch_size: int = 256,
    max_new_tokens: int | None = None,
    max_misses: int = 10,
) -> ExactMatch:
    """Measure how many problems a model answers exactly, by greedy generation.

    Prompts of a batch are padded on the left. The answer must be followed by eos.

    Args:
        model: a `Mamba3LM`.
        tokenizer: the model's.
        problems: at least one.
        batch_size: prompts generated at once.
        max_new_tokens: most ids made for an answer; None takes the longest answer and its eos.
        max_misses: most wrong answers kept in the result.

    Raises:
        ValueError: no problems.
    """
    if not problems:
        raise ValueError("exact_match needs at least one problem, got none")
    answers = [tokenizer.encode_answer(problem.answer) for problem in problems]
    if max_new_tokens is None:
        max_new_tokens = max(map(len, answers))
    made = []
    for first in range(0, len(problems), batch_size):
        prompts = [p.prompt for p in problems[first : first + batch_size]]
        made += _generate_ids(model, tokenizer, prompts, max_new_tokens)

    n, right, truncated, misses = Counter(), Counter(), 0, []
    for problem, answer, ids in zip(problems, answers, made, strict=True):
        n[problem.task] += 1
        right[problem.task] += ids == answer
        truncated += ids[-1] != tokenizer.eos_token_id
        if ids != answer and len(misses) < max_misses:
            misses.append(Miss(*problem, tokenizer.decode(ids)))
    return ExactMatch(
        overall=right.total() / n.total(),
        per_task={task: right[task] / n[task] for task in n},
        n=n.total(),
        n_per_task=dict(n),
        truncated=truncated,
        misses=misses,
    )


def _generate_ids(model, tokenizer, prompts: list[str], max_new_tokens: int) -> list[list[int]]:
    """The ids generated for each prompt, up to and including eos."""
    rows = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    input_ids, mask = left_padded(rows, next(model.parameters()).device)
    output = generate(
        model,
        input_ids,
        max_new_tokens,
        attention_mask=mask,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    new = output[:, input_ids.shape[1] :].tolist()
    return [_until(row, tokenizer.eos_token_id) for row in new]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def percent(share: float) -> str:
    """A share as text, rounded down, so that one wrong answer never reads as 100 %."""
    # 0.29 * 10000 is 2899.99...
    return f"{math.floor(round(share * 10000, 6)) / 100:.2f} %"
