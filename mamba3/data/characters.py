"""Many short texts at once: matrices of their characters, (n, width) uint8, 0 for "no character".

What a problem is made of lies side by side in a row, with gaps; `squeezed` closes them. Characters
are ASCII; `BOS` and `EOS` stand for those tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

BOS, EOS = 2, 3
ZERO = ord("0")


def characters(texts: Sequence[str]) -> np.ndarray:
    """Texts as a matrix, each from the left."""
    rows = np.array(texts, dtype=bytes)
    return rows.view(np.uint8).reshape(len(texts), -1)


def texts(chars: np.ndarray) -> list[str]:
    """The rows of a matrix as texts."""
    rows = np.ascontiguousarray(squeezed(chars, width=chars.shape[1]))
    return [row.decode("ascii") for row in rows.view(f"S{rows.shape[1]}").ravel().tolist()]


def squeezed(chars: np.ndarray, width: int, by: np.ndarray | None = None) -> np.ndarray:
    """Rows without their gaps, in a matrix of `width`; or what lies where `by` has no gaps."""
    present = (chars if by is None else by) != 0
    counts = present.view(np.uint8).sum(axis=1, dtype=np.int16)
    out = np.zeros((len(chars), width), chars.dtype)
    out[np.arange(width, dtype=np.int16) < counts[:, None]] = chars[present]
    return out


def constant(text: str, n: int) -> np.ndarray:
    """The same text in each of n rows."""
    return np.broadcast_to(characters([text]), (n, len(text)))


def hash_shares(chars: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each row that depends on its text alone.

    It is the same in every process and version, whatever the gaps and the width of the matrix: the
    characters, each times a constant of its place, are added modulo 2^64, and the sum is mixed.
    """
    words = squeezed(chars, chars.shape[1]).astype(np.uint64) @ _weights(chars.shape[1])
    return (_mixed(words) >> np.uint64(11)) / 2.0**53


@lru_cache(maxsize=64)
def _weights(width: int) -> np.ndarray:
    return _mixed(np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mixed(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
