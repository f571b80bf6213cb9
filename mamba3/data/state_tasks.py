"""Stage 6 of the curriculum: problems whose answer is a state, kept up to date symbol by symbol.

    task      prompt        answer   what it asks
    parity    p0110         0        whether the number of ones is odd
    modular   %3+4*2        1        digits 0 to 4 with + - * between, modulo 5; * goes first
    brackets  %((3+4)*2)    4        the same with a pair of brackets around each operation

A length counts the symbols after the letter. Both kinds of modular arithmetic are made as by
Delétang et al., "Neural Networks and the Chomsky Hierarchy" (arXiv 2207.02098), with all three
operators. Expressions without brackets have odd lengths (an even one is made one shorter); those
with brackets are split at a random place again and again, down to d, -d, (d) and (-d).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from mamba3.data.characters import ZERO

MODULUS = 5
OPERATORS = "+-*"
_OPERATORS = np.frombuffer(OPERATORS.encode(), np.uint8)


class Tracked(NamedTuple):
    """n problems.

    prompts: characters (n, width).
    running: the character of the value so far after each of them, 0 where there is none.
    answers: characters (n,).
    symbols: how many symbols each prompt has, its letter left out.
    working: of brackets, characters (n, width, 3): after each that closes a pair, the left operand
        and the operator, or two commas where it holds none, and the value; 0 elsewhere.
    """

    prompts: np.ndarray
    running: np.ndarray
    answers: np.ndarray
    symbols: np.ndarray
    working: np.ndarray | None = None


def _tracked(letter: str, symbols, running, answers, lengths) -> Tracked:
    """With the letter in front of all."""
    n, width = symbols.shape
    present = np.arange(width) < lengths[:, None]
    prompts = np.full((n, width + 1), ord(letter), np.uint8)
    values = np.zeros((n, width + 1), np.uint8)
    prompts[:, 1:] = symbols * present
    values[:, 1:] = running * present
    return Tracked(prompts, values, (answers + ZERO).astype(np.uint8), lengths)


def parity(rng: Generator, lengths: np.ndarray) -> Tracked:
    """Random bits, and whether the number of ones is odd."""
    bits = rng.integers(0, 2, (len(lengths), lengths.max(initial=1)), np.uint8)
    odd = np.bitwise_xor.accumulate(bits, axis=1)
    answers = np.take_along_axis(odd, lengths[:, None] - 1, axis=1)[:, 0]
    return _tracked("p", bits + np.uint8(ZERO), odd + np.uint8(ZERO), answers, lengths)


def modular(rng: Generator, lengths: np.ndarray) -> Tracked:
    """Expressions without brackets, in which multiplication goes first."""
    lengths = lengths - (lengths % 2 == 0)
    n, width = len(lengths), int(lengths.max(initial=1))
    digits = rng.integers(0, MODULUS, (n, width // 2 + 1), np.uint8)
    operators = rng.integers(0, 3, (n, width // 2), np.uint8)
    following, value_of = _machine()
    state = digits[:, 0].astype(np.intp)  # nothing added up yet, and one factor
    values = [value_of[state]]
    symbols = operators * np.uint8(MODULUS) + digits[:, 1:]
    for place in range(width // 2):
        state = following[state, symbols[:, place]]
        values += [values[-1], value_of[state]]
    running = np.stack(values, axis=1)
    answers = np.take_along_axis(running, lengths[:, None] - 1, axis=1)[:, 0]
    chars = np.empty((n, width), np.uint8)
    chars[:, ::2] = digits + np.uint8(ZERO)
    chars[:, 1::2] = _OPERATORS[operators]
    return _tracked("%", chars, running + np.uint8(ZERO), answers, lengths)


@functools.cache
def _machine() -> tuple[np.ndarray, np.ndarray]:
    """What an operator and a digit make of a state, and the value of each state.

    A state is 5 t + p: t, the sum of the terms before, and p, the product that goes on.
    """
    terms, product = np.divmod(np.arange(MODULUS**2)[:, None], MODULUS)
    operator, digit = np.divmod(np.arange(3 * MODULUS)[None], MODULUS)
    times = OPERATORS.index("*")
    signed = np.where(operator == OPERATORS.index("-"), -digit, digit)
    after = np.where(operator == times, product * digit, signed) % MODULUS
    terms_after = np.where(operator == times, terms, terms + product) % MODULUS
    value = (terms + product)[:, 0] % MODULUS
    return terms_after * MODULUS + after, value.astype(np.uint8)


def brackets(rng: Generator, lengths: np.ndarray) -> Tracked:
    """Expressions with a pair of brackets around each operation.

    All expressions of a batch are split level by level; values are put together on the way back.
    """
    n, width = len(lengths), int(lengths.max(initial=1))
    chars, running, lefts, signs = np.zeros((4, n * width), np.uint8)
    at, sizes, levels = np.arange(n) * width, lengths, []
    while len(at):
        inner = np.flatnonzero(sizes > 4)
        start, size = at[inner], sizes[inner]
        operators = rng.integers(0, 3, len(inner))
        left = 1 + (rng.random(len(inner)) * (size - 4)).astype(np.intp)
        chars[start], chars[start + size - 1] = ord("("), ord(")")
        chars[start + 1 + left] = _OPERATORS[operators]
        leaf = np.flatnonzero(sizes <= 4)
        values = np.zeros(len(at), np.int64)
        values[leaf] = _leaves(rng, chars, running, at[leaf], sizes[leaf])
        alone = (at + sizes - 1)[leaf[sizes[leaf] > 2]]
        lefts[alone] = signs[alone] = ord(",")
        levels.append((inner, operators, start + size - 1, values))
        at = np.concatenate([start + 1, start + 2 + left])
        sizes = np.concatenate([left, size - left - 3])
    below = np.zeros(0, np.int64)
    for inner, operators, end, values in reversed(levels):
        a, b = np.split(below, 2)
        values[inner] = np.choose(operators, [a + b, a - b, a * b]) % MODULUS
        running[end] = values[inner] + ZERO
        lefts[end], signs[end] = a + ZERO, _OPERATORS[operators]
        below = values
    shape = (n, width)
    tracked = _tracked("%", chars.reshape(shape), running.reshape(shape), below, lengths)
    working = np.zeros((n, width + 1, 3), np.uint8)
    written = np.stack([lefts, signs, running * (signs != 0)], axis=1)
    working[:, 1:] = written.reshape(n, width, 3)
    return tracked._replace(working=working)


def _leaves(rng: Generator, chars, running, at, sizes) -> np.ndarray:
    """Write d, -d, (d) or (-d), by the size, from a place on; returns the values."""
    digits = rng.integers(0, MODULUS, len(at))
    bracketed, negative = sizes > 2, sizes % 2 == 0
    values = np.where(negative, -digits, digits) % MODULUS
    place = at + bracketed + negative
    chars[place], running[place] = digits + ZERO, values + ZERO
    chars[place[negative] - 1] = ord("-")
    start, end = at[bracketed], (at + sizes - 1)[bracketed]
    chars[start], chars[end] = ord("("), ord(")")
    running[end] = values[bracketed] + ZERO
    return values
