"""Exact match: does greedy generation give the answer, the whole answer, and then stop?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mamba3.data.problems import Problem, prompt_ids
from mamba3.data.tokenizer import CharTokenizer
from mamba3.fill import fill
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
    per_group, n_per_group: shares and numbers of problems by each of their traits, such as "sum,
        7 digits" and "sum, 3 carries".
    scaled: of tasks with a known chance, (share - chance) / (1 - chance).
    malformed: answers that do not have the form of one, those truncated among them; None where no
        form is known.
    """

    overall: float
    per_task: dict[str, float]
    n: int
    n_per_task: dict[str, int]
    truncated: int
    misses: list[Miss]
    per_group: dict[str, float] = {}  # noqa: RUF012, it is not changed
    n_per_group: dict[str, int] = {}  # noqa: RUF012
    scaled: dict[str, float] = {}  # noqa: RUF012
    malformed: int | None = None


def exact_match(
    model,
    tokenizer: CharTokenizer,
    problems: Sequence[Problem],
    *,
    batch_size: int = 256,
    max_new_tokens: int | None = None,
    max_misses: int = 10,
    chance: Mapping[str, float] | None = None,
    well_formed: Callable[[Problem, str], bool] | None = None,
) -> ExactMatch:
    """Measure how many problems a model answers exactly, by greedy generation.

    Prompts of a batch are padded on the left. The answer must be followed by eos. Where a prompt
    has blanks, the answer begins with what the model writes there.

    Args:
        model: a `Mamba3LM`.
        tokenizer: the model's.
        problems: at least one.
        batch_size: prompts generated at once.
        max_new_tokens: most ids made for an answer; None takes the longest answer and its eos.
        max_misses: most wrong answers kept in the result.
        chance: share that guessing gets right, of tasks where that is known.
        well_formed: tells whether a text has the form of an answer to a problem.

    Raises:
        ValueError: no problems.
    """
    if not problems:
        raise ValueError("exact_match needs at least one problem, got none")
    answers = [tokenizer.encode_answer(problem.answer) for problem in problems]
    rows, blanks = zip(*(prompt_ids(problem, tokenizer) for problem in problems), strict=True)
    if max_new_tokens is None:
        max_new_tokens = max(len(a) - len(b) for a, b in zip(answers, blanks, strict=True))
    rows = fill(model, rows, blanks, batch_size=batch_size)
    new = []
    for first in range(0, len(problems), batch_size):
        some = rows[first : first + batch_size]
        new += _generate_ids(model, tokenizer, some, max_new_tokens)
    written = ([row[i] for i in places] for row, places in zip(rows, blanks, strict=True))
    made = [before + after for before, after in zip(written, new, strict=True)]

    got = [tokenizer.decode(ids) for ids in made]
    right = [ids == answer for ids, answer in zip(made, answers, strict=True)]
    ended = [ids[-1] == tokenizer.eos_token_id for ids in made]
    told = list(zip(problems, got, right, ended, strict=True))
    malformed = None
    if well_formed is not None:
        malformed = sum(not (end and well_formed(p, text)) for p, text, _, end in told)
    per_task, n_per_task = _shares([[p.task] for p in problems], right)
    # By (task, trait, number), and named once they are in order.
    traits = [[(p.task, *trait) for trait in p.traits] for p in problems]
    per_group, n_per_group = (
        {f"{task}, {number} {trait}": each[task, trait, number]
         for task, trait, number in sorted(each)}
        for each in _shares(traits, right)
    )  # fmt: skip
    return ExactMatch(
        overall=sum(right) / len(right),
        per_task=per_task,
        n=len(problems),
        n_per_task=n_per_task,
        truncated=len(ended) - sum(ended),
        misses=[Miss(*p[:3], text) for p, text, is_right, _ in told if not is_right][:max_misses],
        per_group=per_group,
        n_per_group=n_per_group,
        scaled={
            task: scaled_accuracy(per_task[task], of_guessing)
            for task, of_guessing in (chance or {}).items()
            if task in per_task
        },
        malformed=malformed,
    )


def _shares(groups: Sequence[Sequence], right: Sequence[bool]) -> tuple[dict, dict]:
    """Share of right answers, and number of answers, of each group that there is."""
    n, of_them = Counter(), Counter()
    for names, is_right in zip(groups, right, strict=True):
        n.update(names)
        of_them.update(names if is_right else ())
    return {name: of_them[name] / count for name, count in n.items()}, dict(n)


def scaled_accuracy(share: float, chance: float) -> float:
    """How much of the way from guessing to always being right a share is."""
    return (share - chance) / (1 - chance)


def _generate_ids(model, tokenizer, rows: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The ids generated for each prompt, up to and including eos."""
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
