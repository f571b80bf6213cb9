"""Many numbers at once, of any number of digits: random ones, and pairs with so many carries.

Digits are (places, n), place 0 that of ones: numpy goes through few long rows faster than through
many short ones. Where two numbers are added, a carry goes from a place to the next; where the
smaller is taken from the larger, so does a borrow, and both are called carries here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from mamba3.data.characters import ZERO

# What a digit of the second number may be: anything, not 0 (its first), or nothing but 0 (beyond).
_ANY, _FIRST, _BEYOND = range(3)


def places(n: int) -> np.ndarray:
    """The places 0 to n - 1, as a column."""
    return np.arange(n, dtype=np.int16)[:, None]


class Numbers(NamedTuple):
    """digits (places, n) uint8, 0 beyond the first; lengths (n,) int16, how many each has."""

    digits: np.ndarray
    lengths: np.ndarray

    def from_ones(self, lengths: np.ndarray | None = None) -> np.ndarray:
        """As characters (n, places), ones first; with zeros up to `lengths` digits."""
        lengths = self.lengths if lengths is None else lengths
        return ((self.digits + np.uint8(ZERO)) * (places(len(self.digits)) < lengths)).T

    def from_first(self) -> np.ndarray:
        """As characters (n, places), most significant digit first."""
        return self.from_ones()[:, ::-1]

    def values(self) -> np.ndarray:
        """As int64 (n,), which holds 18 digits."""
        return 10 ** np.arange(len(self.digits)) @ self.digits

    def where(self, mask: np.ndarray, other: Numbers) -> Numbers:
        """These where a mask (n,) is true, and others elsewhere."""
        return Numbers(*(np.where(mask, *both) for both in zip(self, other, strict=True)))


def numbers(digits: np.ndarray) -> Numbers:
    """Numbers of these digits, which may have zeros in front."""
    lengths = np.max((digits != 0) * (places(len(digits)) + np.int16(1)), axis=0)
    return Numbers(digits, np.maximum(lengths, 1))


def numbers_of(values: np.ndarray, n_places: int) -> Numbers:
    """The numbers that values (n,) are."""
    return numbers((values // 10 ** np.arange(n_places)[:, None] % 10).astype(np.uint8))


def random_numbers(rng: Generator, lengths: np.ndarray, n_places: int) -> Numbers:
    """Random numbers of so many digits each."""
    lengths, at = lengths.astype(np.int16), places(n_places)
    digits = rng.integers(0, 10, (n_places, len(lengths)), np.uint8)
    first = rng.integers(1, 10, len(lengths), np.uint8)
    np.copyto(digits, first, where=(at == lengths - 1) & (lengths > 1))
    return Numbers(digits * (at < lengths), lengths)


class Pairs(NamedTuple):
    """Numbers, the first at least as long as the second, and their sum or difference."""

    first: Numbers
    second: Numbers
    result: Numbers


def pairs(
    rng: Generator,
    lengths: np.ndarray,
    others: np.ndarray,
    carries: np.ndarray,
    *,
    most: int,
    minus: bool,
) -> Pairs:
    """Random pairs of so many digits and so many carries; none has a negative difference.

    Args:
        rng: source of random numbers.
        lengths: digits of the first number (n,).
        others: digits of the second, at most as many.
        carries: at most `lengths` for a sum, and one fewer for a difference.
        most: places of both, at least as many as any has digits.
        minus: whether the second number is subtracted.
    """
    lengths, others, carries = (each.astype(np.int16) for each in (lengths, others, carries))
    at = places(most + 1)
    out = _carries_out(rng, lengths, others, carries, at, minus)
    into = np.zeros_like(out)
    into[1:] = out[:-1]
    first = (at == lengths - 1) & (lengths > 1)
    second = (at >= others) * np.uint8(_BEYOND)
    second += (at == others - 1) & (others > 1)
    code = second + np.uint8(3) * first + np.uint8(6) * out + np.uint8(12) * into
    digits, first_of, counts = _digit_pairs(minus)
    pick = (rng.random(code.shape, np.float32) * counts.take(code)).astype(np.intp)
    both = digits.take(first_of.take(code) + pick)
    x, y = both // np.uint8(10) * (at < lengths), both % np.uint8(10)
    result = (10 + x - y - into) % np.uint8(10) if minus else (x + y + into) % np.uint8(10)
    first, second = Numbers(x[:-1], lengths), Numbers(y[:-1], others)
    return Pairs(first, second, numbers(result[: len(at) - minus]))


def _carries_out(rng, lengths, others, carries, at, minus: bool) -> np.ndarray:
    """Which places (places, n) carry into the next.

    Where both numbers have digits, any places may. Beyond the shorter number a carry only goes on
    from the place before, so the carries there are a chain that starts at the number's end.
    """
    same = lengths == others
    # The last place of a difference does not borrow.
    most_low = others - (same & minus)
    most_chain = np.where(same, 0, lengths - others - minus)
    least = np.maximum(carries - most_low, 0)
    most = np.minimum(most_chain, np.maximum(carries - 1, 0))
    chain = least + (rng.random(len(lengths)) * (most - least + 1)).astype(np.int16)
    low = carries - chain
    # The places with the lowest keys carry: as many as are wanted.
    keys = rng.random((len(at), len(lengths)), np.float32)
    np.copyto(keys, 2, where=at >= most_low)
    np.copyto(keys, -1, where=(at == others - 1) & (chain > 0))
    last = np.take_along_axis(
        np.sort(keys, axis=0), np.maximum(low - 1, 0)[None].astype(np.intp), 0
    )
    return (keys <= last) & (low > 0) | (at >= others) & (at < others + chain)


@functools.cache
def _digit_pairs(minus: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The digits 10 x + y that fit in each kind of place: all, where each begins, how many."""
    x, y = np.divmod(np.arange(100), 10)
    kinds = []
    for code in range(24):
        second, first, out, into = code % 3, code // 3 % 2, code // 6 % 2, code // 12
        carries = x < y + into if minus else x + y + into > 9
        allowed = (y == 0) if second == _BEYOND else (y > 0) | (second == _ANY)
        kinds.append(np.flatnonzero((carries == out) & allowed & (x >= first)))
    counts = np.array([len(kind) for kind in kinds])
    digits = np.concatenate(kinds).astype(np.uint8)
    return digits, np.cumsum(counts) - counts, counts.astype(np.float32)
