"""The arithmetic curriculum: stages 1 (digits), 2 (facts) and 3 (arithmetic without carry).

A problem reads ``PROMPT=ANSWER``; numbers are plain decimal, most significant digit first.

    stage  task       prompt   answer       what it asks
    1      copy       c1203    1203         the same digits
    1      reverse    r1203    3021         the digits from the end (zeros stay: r120 is 021)
    1      successor  s1299    1300         the number plus one
    1      compare    120?45   >            "<", "=" or ">" between the two numbers
    2      add        3+9      12           sum of two digits
    2      subtract   3-9      -6           difference of two digits
    3      plus       312+57   369          sum of numbers of 2 or 3 digits, nothing to carry
    3      minus      978-45   933          difference, nothing to borrow
    3      chain      31+57-8  80           a sum and then a difference, neither to carry

Numbers of stage 1 have 1 to 4 digits, each count equally often, and so have their successors (9999
is not asked). Half of the numbers to succeed end in 9s, and most of those to compare share their
first digits or are equal, since those are the hard cases.

What is measured. Stage 1 is split by a hash of the prompt: a tenth of all its problems is held out,
is never drawn for training at any seed, and is what exact match is measured on. Stage 2 has 200
problems in all, a table to be known by heart: a fact that was never shown cannot be known, so all
200 are trained on, and exact match over all 200 measures recall, not generalisation. Stage 3 is
split by the hash, too, and trains on 10,000 problems that are drawn once and stay the same.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from mamba3.data.problems import Batch, Problem, collate, hash_share
from mamba3.data.tokenizer import CharTokenizer

# 32 tokens with the three special ones. Letters name tasks: c, r and s are those of stage 1, the
# others are free for later stages and for tasks of a user's own.
CHARACTERS = "0123456789+-*%=()<>,?crspwxyz"
TEST_SHARE = 0.1
MAX_DIGITS = 4
SKILL_FILE = Path(__file__).parent / "assets" / "sort_digits.jsonl"


def tokenizer() -> CharTokenizer:
    """The curriculum's tokenizer; a prompt ends with "="."""
    return CharTokenizer(CHARACTERS, prompt_suffix="=")


def _number(rng: random.Random, digits: int | None = None) -> int:
    digits = digits or rng.randint(1, MAX_DIGITS)
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def _copy(rng: random.Random) -> Problem:
    digits = str(_number(rng))
    return Problem("copy", f"c{digits}", digits)


def _reverse(rng: random.Random) -> Problem:
    digits = str(_number(rng))
    return Problem("reverse", f"r{digits}", digits[::-1])


def _successor(rng: random.Random) -> Problem:
    digits = str(_number(rng))
    if rng.random() < 0.5:
        nines = rng.randint(1, len(digits))
        digits = digits[: len(digits) - nines] + "9" * nines
    if digits == "9999":
        return _successor(rng)
    return Problem("successor", f"s{digits}", str(int(digits) + 1))


def _compare(rng: random.Random) -> Problem:
    a = b = str(_number(rng))
    kind = rng.random()
    if kind < 0.2:
        b = str(_number(rng))
    elif kind < 0.9:
        b = _neighbour(rng, a)
    sign = "<" if int(a) < int(b) else ">" if int(a) > int(b) else "="
    return Problem("compare", f"{a}?{b}", sign)


def _neighbour(rng: random.Random, number: str) -> str:
    """A number with the same first digits; the first other one is often one more or less."""
    same = rng.randrange(len(number))
    rest = [rng.choice("0123456789") for _ in number[same:]]
    if rng.random() < 0.5:
        rest[0] = str(min(9, max(0, int(number[same]) + rng.choice((-1, 1)))))
    return str(int(number[:same] + "".join(rest)))


def facts() -> list[Problem]:
    """All 200 problems of stage 2."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    adds = [Problem("add", f"{a}+{b}", str(a + b)) for a, b in pairs]
    return adds + [Problem("subtract", f"{a}-{b}", str(a - b)) for a, b in pairs]


_FACTS = {task: [p for p in facts() if p.task == task] for task in ("add", "subtract")}


def _add(rng: random.Random) -> Problem:
    return rng.choice(_FACTS["add"])


def _subtract(rng: random.Random) -> Problem:
    return rng.choice(_FACTS["subtract"])


def _plus(rng: random.Random) -> Problem:
    a, b = _without_carry(rng)
    return Problem("plus", f"{a}+{b}", str(a + b))


def _minus(rng: random.Random) -> Problem:
    total, b = _without_borrow(rng, None)
    return Problem("minus", f"{total}-{b}", str(total - b))


def _chain(rng: random.Random) -> Problem:
    a, b = _without_carry(rng)
    total, c = _without_borrow(rng, a + b)
    return Problem("chain", f"{a}+{b}-{c}", str(total - c))


def _without_carry(rng: random.Random) -> tuple[int, int]:
    """Two numbers of 2 or 3 digits, no two digits of one place over 9 together."""
    while True:
        a, b = (_number(rng, rng.choice((2, 3))) for _ in range(2))
        if all(x + y <= 9 for x, y in _places(a, b)):
            return a, b


def _without_borrow(rng: random.Random, total: int | None) -> tuple[int, int]:
    """Two such numbers, the first `total` if given, no digit of the second over that above it."""
    while True:
        a = total or _number(rng, rng.choice((2, 3)))
        b = _number(rng, rng.choice((2, 3)))
        if all(x >= y for x, y in _places(a, b)):
            return a, b


def _places(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of two numbers of up to three, place by place."""
    return [(int(x), int(y)) for x, y in zip(f"{a:03}", f"{b:03}", strict=True)]


# Stage -> its tasks, and how often each is drawn for training: the harder, the more often.
_TASKS: dict[int, dict[Callable[[random.Random], Problem], int]] = {
    1: {_copy: 2, _reverse: 2, _successor: 3, _compare: 8},
    2: {_add: 1, _subtract: 1},
    3: {_plus: 2, _minus: 2, _chain: 1},
}
# Stages whose training problems are a set of this many, drawn once.
_FIXED = {3: 10_000}
STAGES = tuple(_TASKS)


@functools.cache
def training_set(stage: int) -> dict[str, list[Problem]]:
    """The problems that a stage with a fixed training set is trained on, by task.

    Each is there once, none is held out, and tasks have their shares of the whole.
    """
    rng, size = random.Random(f"train/{stage}"), _FIXED[stage]
    shares = _TASKS[stage]
    found: dict[str, list[Problem]] = {}
    for task, share in shares.items():
        problems: dict[str, Problem] = {}
        while len(problems) < size * share // sum(shares.values()):
            if not is_held_out(problem := task(rng)):
                problems[problem.prompt] = problem
        found[problem.task] = list(problems.values())
    return found


def _training_tasks(stage: int) -> list[tuple[Callable[[random.Random], Problem], int]]:
    """What draws a stage's training problems, and how often each is asked."""
    if stage not in _FIXED:
        return list(_TASKS[stage].items())
    draws = [functools.partial(_drawn, stage, task) for task in training_set(stage)]
    return list(zip(draws, _TASKS[stage].values(), strict=True))


def _drawn(stage: int, task: str, rng: random.Random) -> Problem:
    return rng.choice(training_set(stage)[task])


def is_held_out(problem: Problem) -> bool:
    """Whether a problem is kept for measuring, and so never trained on."""
    return problem.task not in _FACTS and hash_share(problem.prompt) < TEST_SHARE


def check_stages(stages: Sequence[int]) -> tuple[int, ...]:
    """The stages as a tuple, or an error that says which there are."""
    if not isinstance(stages, (list, tuple)):
        raise TypeError(f"stages must be a list, got {stages!r}")
    stages = tuple(stages)
    if not stages or len(set(stages)) < len(stages) or not set(stages) <= set(STAGES):
        raise ValueError(f"stages must be some of {list(STAGES)}, each once, got {list(stages)}")
    return stages


class CurriculumStream:
    """An endless stream of training batches, the tasks of all stages mixed.

    Batch i is a function of (stages, batch_size, seed, i): a run continues from the number of its
    batch. Held-out problems never appear.

    Args:
        stages: stages to mix.
        tokenizer: turns problems into ids.
        batch_size: problems in a batch.
        seed: of the draws.
    """

    def __init__(
        self, stages: Sequence[int], tokenizer: CharTokenizer, *, batch_size: int, seed: int
    ):
        shares = [item for stage in check_stages(stages) for item in _training_tasks(stage)]
        self.tasks, weights = zip(*shares, strict=True)
        self.cum_weights = list(itertools.accumulate(weights))
        self.tokenizer, self.batch_size, self.seed = tokenizer, batch_size, seed

    def __call__(self, index: int) -> Batch:
        """Batch number `index`, from 0."""
        return collate(self.problems(index), self.tokenizer)

    def problems(self, index: int) -> list[Problem]:
        """The problems of batch number `index`."""
        rng = random.Random(f"{self.seed}/{index}")
        drawn = []
        while len(drawn) < self.batch_size:
            [task] = rng.choices(self.tasks, cum_weights=self.cum_weights)
            problem = task(rng)
            if not is_held_out(problem):
                drawn.append(problem)
        return drawn


def eval_problems(stage: int, n: int, *, seed: int = 0) -> list[Problem]:
    """What exact match of a stage is measured on: each problem once.

    Args:
        stage: one of `STAGES`.
        n: number of held-out problems, spread evenly over the tasks (rounded up). Stage 2 gives its
            200 facts, whatever n.
        seed: of the draw.

    Raises:
        ValueError: more problems than are held out.
    """
    check_stages([stage])
    if stage == 2:
        return facts()
    rng = random.Random(f"test/{seed}")
    share = -(-n // len(_TASKS[stage]))
    found: dict[str, Problem] = {}
    for number, task in enumerate(_TASKS[stage], start=1):
        for _ in range(100 * share):
            if len(found) == number * share:
                break
            if is_held_out(problem := task(rng)):
                found[problem.prompt] = problem
        else:
            raise ValueError(
                f"stage {stage} holds out fewer than {share} problems of a task; ask for fewer "
                f"than {n}"
            )
    return list(found.values())


def skill_rows(n: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Prompt/completion rows of a skill that is in no stage: sort the digits.

    ``x4132`` becomes ``1234``; 3 or 4 digits, each prompt once. `SKILL_FILE` holds 500 of them,
    those of seed 0.
    """
    rng = random.Random(f"skill/{seed}")
    rows: dict[str, str] = {}
    while len(rows) < n:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, MAX_DIGITS)))
        rows[f"x{digits}"] = "".join(sorted(digits))
    return [{"prompt": prompt, "completion": completion} for prompt, completion in rows.items()]
