"""Rows of channels as the real and imaginary parts of their pairs, in either layout of pairs.

HALVES says which: pairs (i, i + N/2), as in the weights of MIMO, or else (2i, 2i + 1).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pairs(at, real, N: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
               ROWS: tl.constexpr):  # fmt: skip
    """Parts (ROWS, HALF) of the N channels of the rows that start `at`, 0 where nothing is.

    at, real: (ROWS, 1).
    """
    if HALVES:
        pair = tl.arange(0, HALF)[None, :]
        mask = real & (pair < N // 2)
        return tl.load(at + pair, mask, 0.0), tl.load(at + N // 2 + pair, mask, 0.0)
    channel = tl.arange(0, 2 * HALF)[None, :]
    both = tl.load(at + channel, real & (channel < N), 0.0)
    return tl.split(tl.reshape(both, [ROWS, HALF, 2]))


@triton.jit
def store_pairs(at, re, im, real, N: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """Undo `load_pairs`."""
    if HALVES:
        pair = tl.arange(0, HALF)[None, :]
        mask = real & (pair < N // 2)
        tl.store(at + pair, re, mask)
        tl.store(at + N // 2 + pair, im, mask)
    else:
        channel = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(re, im), [ROWS, 2 * HALF])
        tl.store(at + channel, both, real & (channel < N))
