"""The tasks of the arithmetic curriculum: each draws many problems at once.

A task is asked for problems of given sizes: digits of the longer number for stages 4 and 5, symbols
for stage 6. The others have one range of sizes, and leave that out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from mamba3.data import state_tasks
from mamba3.data.arithmetic_forms import WORKING, Form
from mamba3.data.characters import constant, squeezed
from mamba3.data.numbers import Numbers, numbers, numbers_of, pairs, places, random_numbers
from mamba3.data.problems import BLANK

MAX_DIGITS = 4  # of stage 1


class Drawn(NamedTuple):
    """n problems as characters.

    natural: prompts as a user writes them (n, width); what a problem is known by.
    prompts, answers: as a model reads and writes them.
    running: characters of the value after each character of the prompts, where there is one.
    traits: what a problem has so many of, by name, (n,) each.
    blanks: how many the prompts have, at most.
    """

    natural: np.ndarray
    prompts: np.ndarray
    answers: np.ndarray
    running: np.ndarray | None = None
    traits: dict[str, np.ndarray] = {}  # noqa: RUF012
    blanks: int = 0

    def take(self, rows: np.ndarray) -> Drawn:
        """Some of the problems."""
        arrays = (None if a is None else a.take(rows, axis=0) for a in self[:4])
        traits = {name: values[rows] for name, values in self.traits.items()}
        return Drawn(*arrays, traits, self.blanks)


@dataclass(frozen=True)
class Task:
    """A kind of problem.

    Args:
        name: what results are reported under.
        stage: of the curriculum.
        draw: makes n problems in a form, of sizes (n,).
        weight: how often it is drawn among the tasks of its stage.
        answer: regular expression that well-formed answers match, as a user reads them.
        chance: share of answers that are right by guessing, where that is a yardstick.
    """

    name: str
    stage: int
    draw: Callable[[Generator, int, Form, np.ndarray], Drawn] = field(repr=False)
    weight: int = 1
    answer: str = r"0|-?[1-9]\d*"
    chance: float | None = None


# Stage 1: digits


def _number_draw(rng: Generator, n: int) -> Numbers:
    return random_numbers(rng, rng.integers(1, MAX_DIGITS + 1, n), MAX_DIGITS)


def _of_one(letter: str, number: Numbers, answers: np.ndarray) -> Drawn:
    prompts = np.hstack([constant(letter, len(answers)), number.from_first()])
    return Drawn(prompts, prompts, answers)


def _copy(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    number = _number_draw(rng, n)
    return _of_one("c", number, number.from_first())


def _reverse(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    number = _number_draw(rng, n)
    return _of_one("r", number, number.from_ones())


def _successor(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    """Half of the numbers end in 9s; 9999 is not asked."""
    number = _number_draw(rng, n)
    nines = (1 + (rng.random(n) * number.lengths).astype(np.int16)) * (rng.random(n) < 0.5)
    digits = np.where(places(MAX_DIGITS) < nines, np.uint8(9), number.digits)
    digits[-1, (digits == 9).all(axis=0)] = 8
    number = Numbers(digits, number.lengths)
    after = numbers_of(number.values() + 1, MAX_DIGITS)
    return _of_one("s", number, after.from_first())


def _compare(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    """Most pairs share their first digits, or are equal: those are the hard cases.

    After what they share, the next digit is often one more or less.
    """
    a, other = (_number_draw(rng, n) for _ in range(2))
    shared = (rng.random(n) * a.lengths).astype(np.int16)
    at = a.lengths - 1 - places(MAX_DIGITS)  # counted from the first digit; negative beyond
    digits = np.where(at < shared, a.digits, rng.integers(0, 10, (MAX_DIGITS, n), np.uint8))
    step = rng.integers(0, 2, n, np.int8) * np.int8(2) - np.int8(1)
    near = np.clip(a.digits.view(np.int8) + step, 0, 9).view(np.uint8)
    np.copyto(digits, near, where=(at == shared) & (rng.random(n) < 0.5))
    kind = rng.random(n)
    b = other.where(kind < 0.2, numbers(digits * (at >= 0)).where(kind < 0.9, a))
    sign = np.sign(b.values() - a.values())
    prompts = np.hstack([a.from_first(), constant("?", n), b.from_first()])
    return Drawn(prompts, prompts, np.frombuffer(b">=<", np.uint8)[sign + 1][:, None])


# Stages 2 to 5: numbers


def _expression(
    form: Form,
    operators: str,
    operands: list[Numbers],
    result: Numbers | None = None,
    negative: np.ndarray | None = None,
    **rest,
) -> Drawn:
    """Problems of numbers with operators between, answered by a number or by `answers`."""
    n = len(operands[0].lengths)
    signs = [constant(sign, n) for sign in operators]
    natural = _between(signs, [number.from_first() for number in operands])
    layout, blanks, columns = form.layout_of(operators, len(operands[-1].digits)), 0, None
    if layout == "plain":
        prompts = natural
    elif layout == "reversed":
        prompts = _between(signs, [number.from_ones() for number in operands])
    else:
        columns = np.max([number.lengths for number in operands], axis=0)
        if operators == "*":
            first, digit = operands
            operands = [first, Numbers(np.repeat(digit.digits, len(first.digits), axis=0), columns)]
        digits = np.stack([number.from_ones(columns) for number in operands], axis=2)
        compared = []
        if form.compares(operators):
            compared = [digits.reshape(n, -1), constant(",", n)]
        if layout == "columns":
            places = (digits[:, :, :1] != 0) * np.uint8(ord(BLANK))
            digits, blanks = np.concatenate([digits, places], axis=2), digits.shape[1]
        prompts = np.hstack([*signs, *compared, digits.reshape(n, -1)])
    if result is not None:
        rest["answers"] = _result(form, result, negative, columns if blanks else None)
    return Drawn(natural=natural, prompts=prompts, blanks=blanks, **rest)


def _between(signs: list[np.ndarray], operands: list[np.ndarray]) -> np.ndarray:
    pieces = [operands[0]]
    for sign, operand in zip(signs, operands[1:], strict=True):
        pieces += [sign, operand]
    return np.hstack(pieces)


def _result(
    form: Form,
    number: Numbers,
    negative: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> np.ndarray:
    """Answers that are one number; in the last digit's order with zeros up to `columns` digits."""
    signs = [] if negative is None else [(negative * np.uint8(ord("-")))[:, None]]
    if form.answer_order == "lsd_first":
        lengths = None if columns is None else np.maximum(number.lengths, columns)
        return np.hstack([number.from_ones(lengths), *signs])
    return np.hstack([*signs, number.from_first()])


def _in_any_order(rng: Generator, a: Numbers, b: Numbers) -> tuple[Numbers, Numbers, np.ndarray]:
    swapped = rng.random(len(a.lengths)) < 0.5
    return b.where(swapped, a), a.where(swapped, b), swapped


def _fact(sign: str, rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    return fact_table(sign, form).take(rng.integers(0, 100, n))


@cache
def fact_table(sign: str, form: Form) -> Drawn:
    """All 100 problems a+b or a-b of single digits."""
    a, b = np.divmod(np.arange(100), 10)
    result = a + b if sign == "+" else a - b
    operands = [numbers_of(a, 1), numbers_of(b, 1)]
    if sign == "+":
        return _expression(form, sign, operands, numbers_of(result, 2))
    return _expression(form, sign, operands, numbers_of(np.abs(result), 1), result < 0)


def _plus(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    a, b, total = _without_carry(rng, n)
    return _expression(form, "+", [a, b], total)


def _minus(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    a, b, rest = pairs(rng, *_two_or_three(rng, n), np.zeros(n), most=3, minus=True)
    return _expression(form, "-", [a, b], rest)


def _chain(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    a, b, total = _without_carry(rng, n)
    # Of two digits where that can be, and neither of fewer nor with a 0 in front.
    short = (rng.random(n) < 0.5) & (total.digits[1] > 0)
    lengths, at = np.where(short, np.int16(2), total.lengths), places(len(total.digits))
    any_digit, first = (
        least + (rng.random(total.digits.shape) * (total.digits + 1 - least)).astype(np.uint8)
        for least in (np.uint8(0), np.uint8(1))
    )
    digits = np.where(at == lengths - 1, first, any_digit) * (at < lengths)
    c, rest = Numbers(digits, lengths), numbers(total.digits - digits)
    return _expression(form, "+-", [a, b, c], rest)


def _two_or_three(rng: Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits of two numbers, those of the longer first."""
    lengths = np.sort(rng.integers(2, 4, (n, 2)), axis=1)
    return lengths[:, 1], lengths[:, 0]


def _without_carry(rng: Generator, n: int) -> tuple[Numbers, Numbers, Numbers]:
    """Two numbers of 2 or 3 digits in either order, and their sum."""
    a, b, total = pairs(rng, *_two_or_three(rng, n), np.zeros(n), most=3, minus=False)
    total = Numbers(total.digits[:-1], total.lengths)
    return *_in_any_order(rng, a, b)[:2], total


def _carry(sign: str, rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    """Sums or differences, of as many carries as there can be, or fewer; each count as often.

    Half of the pairs have as many digits each. The first number is the shorter one, or the one that
    is less, in half of them.
    """
    minus = sign == "-"
    others = 1 + (rng.random(n) * sizes).astype(np.intp)
    others = np.where(rng.random(n) < 0.5, sizes, others)
    carries = (rng.random(n) * (sizes + 1 - minus)).astype(np.intp)
    most = int(sizes.max(initial=1))
    a, b, result = pairs(rng, sizes, others, carries, most=most, minus=minus)
    a, b, swapped = _in_any_order(rng, a, b)
    negative = swapped & result.digits.any(axis=0) if minus else None
    traits = {"digits": sizes, "carries": carries}
    return _expression(form, sign, [a, b], result, negative, traits=traits)


def _times(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    """A number times a single digit."""
    a = random_numbers(rng, sizes, int(sizes.max(initial=1)))
    b = numbers_of(rng.integers(0, 10, n), 1)
    return _expression(form, "*", [a, b], _product(a, b), traits={"digits": sizes})


def _product(a: Numbers, b: Numbers) -> Numbers:
    """A number times a single digit, place by place."""
    digits, carry = [], np.zeros(len(a.lengths), np.uint8)
    for place in a.digits:
        carry, digit = np.divmod(place * b.digits[0] + carry, 10)
        digits.append(digit)
    return numbers(np.stack([*digits, carry]))


def _partial(rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    """Two numbers of two digits; 47*36 is answered 282+1410=1692."""
    a, b = (random_numbers(rng, np.full(n, 2), 2) for _ in range(2))
    x, y = a.values(), b.values()
    ones, tens, whole = (
        numbers_of(*each) for each in ((x * (y % 10), 3), (x * (y // 10 * 10), 4), (x * y, 4))
    )
    pieces = [_result(form, ones), constant("+", n), _result(form, tens)]
    answers = np.hstack([*pieces, constant("=", n), _result(form, whole)])
    return _expression(form, "*", [a, b], answers=answers)


# Stage 6: state


def _state(
    make: Callable[[Generator, np.ndarray], state_tasks.Tracked],
    rng: Generator,
    n: int,
    form: Form,
    sizes: np.ndarray,
) -> Drawn:
    prompts, running, answers, symbols, working = make(rng, sizes)
    drawn = Drawn(prompts, prompts, answers[:, None], running, {"symbols": symbols})
    if working is None or form.brackets == "plain":
        return drawn
    most = int(sizes.max(initial=1)) // 3  # pairs of brackets, of which the shortest is (d)
    blanks, width = WORKING * most, prompts.shape[1]
    blank = (working != 0) * np.uint8(ord(BLANK))
    prompts = np.concatenate([prompts[:, :, None], blank], axis=2).reshape(n, -1)
    return drawn._replace(
        prompts=squeezed(prompts, width + blanks),
        answers=np.hstack([squeezed(working.reshape(n, -1), blanks), drawn.answers]),
        running=None,
        blanks=blanks,
    )


TASKS = {
    task.name: task
    for task in (
        Task("copy", 1, _copy, 2),
        Task("reverse", 1, _reverse, 2, r"\d+"),
        Task("successor", 1, _successor, 3),
        Task("compare", 1, _compare, 8, r"[<=>]"),
        Task("add", 2, partial(_fact, "+")),
        Task("subtract", 2, partial(_fact, "-")),
        Task("plus", 3, _plus, 2),
        Task("minus", 3, _minus, 2),
        Task("chain", 3, _chain),
        Task("sum", 4, partial(_carry, "+")),
        Task("difference", 4, partial(_carry, "-")),
        Task("times", 5, _times, 2),
        Task("product", 5, _partial, 1, r"\d+\+\d+=\d+"),
        Task("parity", 6, partial(_state, state_tasks.parity), answer="[01]", chance=1 / 2),
        Task("modular", 6, partial(_state, state_tasks.modular), answer="[0-4]", chance=1 / 5),
        Task("brackets", 6, partial(_state, state_tasks.brackets), answer="[0-4]", chance=1 / 5),
    )
}
