"""Many numbers at once, of any number of digits: random ones, and pairs with so many carries.

Place 0 is that of ones. Where two numbers are added, a carry goes from a place to the next; where
the smaller is taken from the larger, so does a borrow, and both are called carries here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from mamba3.data.characters import ZERO

# What a digit of the second number may be: anything, not 0 (its first), or nothing but 0 (beyond).
_ANY, _FIRST, _BEYOND = range(3)


class Numbers(NamedTuple):
    """digits (n, places) uint8, 0 beyond the first digit; lengths (n,), how many there are."""

    digits: np.ndarray
    lengths: np.ndarray

    def from_ones(self, lengths: np.ndarray | None = None) -> np.ndarray:
        """As characters, least significant digit first; with zeros up to `lengths` digits."""
        lengths = self.lengths if lengths is None else lengths
        places = np.arange(self.digits.shape[1])
        return (self.digits + np.uint8(ZERO)) * (places < lengths[:, None])

    def from_first(self) -> np.ndarray:
        """As characters, most significant digit first."""
        return self.from_ones()[:, ::-1]

    def values(self) -> np.ndarray:
        """As int64, which holds 18 digits."""
        return self.digits @ 10 ** np.arange(self.digits.shape[1])

    def where(self, mask: np.ndarray, other: Numbers) -> Numbers:
        """These where a mask (n,) is true, and others elsewhere."""
        digits = np.where(mask[:, None], self.digits, other.digits)
        return Numbers(digits, np.where(mask, self.lengths, other.lengths))


def numbers(digits: np.ndarray) -> Numbers:
    """Numbers of these digits, which may have zeros in front."""
    some = digits != 0
    lengths = digits.shape[1] - np.argmax(some[:, ::-1], axis=1)
    return Numbers(digits, np.where(some.any(axis=1), lengths, 1))


def numbers_of(values: np.ndarray, places: int) -> Numbers:
    """The numbers that values (n,) are."""
    return numbers((values[:, None] // 10 ** np.arange(places) % 10).astype(np.uint8))


def random_numbers(rng: Generator, lengths: np.ndarray, places: int) -> Numbers:
    """Random numbers of so many digits each."""
    digits = rng.integers(0, 10, (len(lengths), places), np.uint8)
    first = np.where(lengths > 1, rng.integers(1, 10, len(lengths), np.uint8), digits[:, 0])
    at = np.arange(places)
    digits *= at < lengths[:, None]
    np.copyto(digits, first[:, None], where=at == lengths[:, None] - 1)
    return Numbers(digits, lengths)


class Pairs(NamedTuple):
    """Numbers, the first at least as long as the second, and their sum or difference."""

    first: Numbers
    second: Numbers
    result: Numbers


def pairs(
    rng: Generator, lengths: np.ndarray, others: np.ndarray, carries: np.ndarray, *, minus: bool
) -> Pairs:
    """Random pairs of so many digits and so many carries; none has a negative difference.

    Args:
        rng: source of random numbers.
        lengths: digits of the first number (n,).
        others: digits of the second, at most as many.
        carries: at most `lengths` for a sum, and one fewer for a difference.
        minus: whether the second number is subtracted.
    """
    places = int(lengths.max(initial=1)) + 1
    out = _carries_out(rng, lengths, others, carries, places, minus)
    into = np.zeros_like(out)
    into[:, 1:] = out[:, :-1]
    at = np.arange(places)
    first = (at == lengths[:, None] - 1) & (lengths[:, None] > 1)
    second = np.where(at >= others[:, None], _BEYOND, (at == others[:, None] - 1) * _FIRST)
    second *= (others[:, None] > 1) | (second == _BEYOND)
    code = (into * 2 + out) * 6 + first * 3 + second
    table, counts = _digit_pairs(minus)
    both = table[code, (rng.random(code.shape, np.float32) * counts[code]).astype(np.intp)]
    x, y = both // 10 * (at < lengths[:, None]), both % 10
    result = (10 + x - y - into) % 10 if minus else (x + y + into) % 10
    first, second = Numbers(x[:, :-1], lengths), Numbers(y[:, :-1], others)
    return Pairs(first, second, numbers(result[:, : places - minus]))


def _carries_out(rng, lengths, others, carries, places: int, minus: bool) -> np.ndarray:
    """Which places (n, places) carry into the next.

    Where both numbers have digits, any places may. Beyond the shorter number a carry only goes on
    from the place before, so the carries there are a chain that starts at the number's end.
    """
    same = lengths == others
    # The last place of a difference does not borrow.
    most_low = others - (same & minus)
    most_chain = np.where(same, 0, lengths - others - minus)
    least = np.maximum(carries - most_low, 0)
    most = np.minimum(most_chain, np.maximum(carries - 1, 0))
    chain = least + (rng.random(len(lengths)) * (most - least + 1)).astype(np.intp)
    low = carries - chain
    at = np.arange(places)
    keys = rng.random((len(lengths), places), np.float32)
    keys[at >= most_low[:, None]] = 2
    keys[(at == others[:, None] - 1) & (chain > 0)[:, None]] = -1
    last = np.take_along_axis(np.sort(keys, axis=1), np.maximum(low - 1, 0)[:, None], axis=1)
    out = (keys <= last) & (low > 0)[:, None]
    return out | ((at >= others[:, None]) & (at < (others + chain)[:, None]))


@functools.cache
def _digit_pairs(minus: bool) -> tuple[np.ndarray, np.ndarray]:
    """For each kind of place, the digits 10 x + y that fit there, and how many they are."""
    x, y = np.divmod(np.arange(100), 10)
    table, counts = np.zeros((24, 100), np.uint8), np.zeros(24, np.float32)
    for code in range(24):
        kinds, second = divmod(code, 3)
        into, out, first = kinds >> 2, kinds >> 1 & 1, kinds & 1
        carries = x < y + into if minus else x + y + into > 9
        allowed = (y == 0) if second == _BEYOND else (y > 0) | (second == _ANY)
        fits = np.flatnonzero((carries == out) & allowed & (x >= first))
        table[code, : len(fits)], counts[code] = fits, len(fits)
    return table, counts
