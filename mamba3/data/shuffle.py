"""Shuffled: an endless pass over range(n) whose order is computed place by place, not stored.

A Feistel network permutes the numbers of 2 h bits, the fewest that hold n; it is applied again to
a result of n or more until one is below n (cycle walking), which leaves a permutation of range(n).
Since 4^h < 4 n, that takes fewer than 4 turns on average.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

_ROUNDS = 6
_WORD = 2**64 - 1


class Shuffled:
    """Every number of range(n) once an epoch, in a new pseudo-random order each epoch.

    Args:
        n: how many numbers, at least 1.
        seed: of the orders.

    Example:
        >>> order = Shuffled(5, seed=0)
        >>> sorted(order(i) for i in range(5, 10))
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, seed: int):
        if n < 1:
            raise ValueError(f"there must be at least 1 number to shuffle, got {n}")
        self.n, self.seed = n, seed
        self._bits = max(1, ((n - 1).bit_length() + 1) // 2)

    def __call__(self, i: int) -> int:
        """The number at place i, from 0; epochs follow one another."""
        epoch, number = divmod(i, self.n)
        keys = _keys(self.seed, epoch)
        while True:
            number = self._permuted(number, keys)
            if number < self.n:
                return number

    def _permuted(self, number: int, keys: tuple[int, ...]) -> int:
        mask = (1 << self._bits) - 1
        left, right = number >> self._bits, number & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self._bits | right


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "big") for i in range(0, len(digest), 8))


def _mixed(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
