"""What the scan's kernels share: where a chunk's rows are, its weights, phases, maps and states.

A chunk of Q tokens is a tile of ROWS = Q * BR rows, row m being stream m % BR of token m // BR (BR
is R rounded up to a power of two). SISO and MIMO are then the same matrix products, R = 1 or not.
Channels of B, C and the state are handled as two half tiles, the real and the imaginary parts of
the N/2 pairs, so that a rotation moves no data between lanes. `maps` and states are stored so too:
N/2 real parts, then N/2 imaginary ones.

    code        meaning                                                     shape
    table       per chunk: first token, end of its sequence, segment,       (K, 6) int64
                sequence, whether the segment opens, closes its sequence
    segments    per segment: first chunk, last + 1, sequence, opens, closes (I, 5) int64
    sequences   per sequence: first chunk, last + 1, first segment, last+1  (B, 4) int64
    weights     per chunk and head: cum, scale, gamma, dt, as in            (K, H, 4, Q)
                `mamba3.ops.chunked`
    turns       phase of every token since the start of its chunk, as       (K, H, Q, S)
                65536ths of a turn in int16, or rad in float32
    phase       phase before a chunk's first token, rad                     (K, H, S)
    maps        B and C in x's dtype                                        (T, 2, R, G, N)

16 bits of a turn are 5e-5 rad at most off, far below what rounding q and k to half precision is.

Source: arXiv 2603.15569; symbols as in `mamba3.ops.reference` and `mamba3.ops.chunked`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..reference import TAU_HIGH, TAU_LOW
from .pairs import load_pairs, store_pairs

_TAU_HIGH = tl.constexpr(TAU_HIGH)
_TAU_LOW = tl.constexpr(TAU_LOW)
_TURN = tl.constexpr(1 / (TAU_HIGH + TAU_LOW))
_UNIT = tl.constexpr((TAU_HIGH + TAU_LOW) / 65536)
# exp(-60) is 1e-26: a token that forgets more forgets all the same, and running sums of longer
# decays would lose the digits that the decays after it are told apart by.
LEAST_LOG_DECAY = tl.constexpr(-60.0)


@triton.jit
def wrap(phase):
    """Reduce angles in rad to [-pi, pi] without losing precision."""
    turns = tl.floor(phase * _TURN + 0.5)
    return phase - turns * _TAU_HIGH - turns * _TAU_LOW


@triton.jit
def rows_of(table_ptr, chunk, ROWS: tl.constexpr, BR: tl.constexpr, R: tl.constexpr):
    """A chunk's rows: their token in the chunk, their token, their stream, whether they exist."""
    start, stop = tl.load(table_ptr + chunk * 6), tl.load(table_ptr + chunk * 6 + 1)
    row = tl.arange(0, ROWS)
    place, stream = row // BR, row % BR
    token = start + place
    return place, token, stream, (token < stop) & (stream < R)


@triton.jit
def stored_phase(at, exists):
    """Phases since the start of their chunk, in rad."""
    turns = tl.load(at, exists, 0.0).to(tl.float32)
    if at.dtype.element_ty == tl.int16:
        turns *= _UNIT
    return turns


@triton.jit
def phases(
    turns_ptr, phase_ptr, index, place, S: tl.constexpr, Q: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Every row's phase in [-2 pi, 2 pi], (ROWS, HALF); pairs from S on do not turn."""
    pair = tl.arange(0, HALF)
    at = turns_ptr + index * (Q * S) + (place * S)[:, None] + pair[None, :]
    before = tl.load(phase_ptr + index * S + pair, pair < S, 0.0)
    return stored_phase(at, (pair < S)[None, :]) + before[None, :]


@triton.jit
def phasors(phase, FAST: tl.constexpr):
    """cos and sin of phases in [-2 pi, 2 pi]."""
    if FAST:
        # The hardware's own: off by about 1e-6 in that range.
        return libdevice.fast_cosf(phase), libdevice.fast_sinf(phase)
    return tl.cos(phase), tl.sin(phase)


@triton.jit
def rotate(re, im, cos, sin):
    """Turn pairs."""
    return re * cos - im * sin, re * sin + im * cos


@triton.jit
def biased_maps(
    maps_ptr, which, bias_ptr, head, group, token, stream, real, pair, exists,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr,
):  # fmt: skip
    """Rows of B (which = 0) or C (1) plus bias: both parts of the given pairs, in float32.

    Zero where no row is.
    """
    mask = real[:, None] & exists[None, :]
    at = (((token * 2 + which) * R + stream) * G + group) * N
    at = maps_ptr + at[:, None] + pair[None, :]
    re = tl.load(at, mask, 0.0).to(tl.float32)
    im = tl.load(at + N // 2, mask, 0.0).to(tl.float32)
    if MIMO:
        at = bias_ptr + ((head * R + stream) * N)[:, None] + pair[None, :]
        return re + tl.load(at, mask, 0.0), im + tl.load(at + N // 2, mask, 0.0)
    at = bias_ptr + head * N + 2 * pair
    re += tl.load(at, exists, 0.0)[None, :]
    im += tl.load(at + 1, exists, 0.0)[None, :]
    # Without this the compiler makes cos and sin twice, once for each layout of a dot's operands.
    return tl.where(mask, re, 0.0), tl.where(mask, im, 0.0)


@triton.jit
def rotated(
    maps_ptr, which, bias_ptr, head, group, token, stream, real, phase,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, MIMO: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """k (which = 0) or q (1): parts of their pairs, (ROWS, HALF) each, in the dtype of `maps`."""
    pair = tl.arange(0, HALF)
    re, im = biased_maps(
        maps_ptr, which, bias_ptr, head, group, token, stream, real, pair, pair < N // 2,
        R, G, N, MIMO,
    )  # fmt: skip
    cos, sin = phasors(phase, FAST)
    re, im = rotate(re, im, cos, sin)
    return re.to(maps_ptr.dtype.element_ty), im.to(maps_ptr.dtype.element_ty)


@triton.jit
def values(
    x_ptr, stride, mimo_ptr, head, token, stream, real, p,
    R: tl.constexpr, P: tl.constexpr, MIMO: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rows of x times their stream's weight, (ROWS, BLOCK_P), in float32."""
    mask = real[:, None] & (p < P)[None, :]
    x = tl.load(x_ptr + (token * stride * UNIT + head * P)[:, None] + p[None, :], mask, 0.0)
    x = x.to(tl.float32)
    if MIMO:
        x *= tl.load(mimo_ptr + ((head * R + stream) * P)[:, None] + p[None, :], mask, 0.0)
    return x


@triton.jit
def outputs_at(token, stream, heads, head, p, R: tl.constexpr, P: tl.constexpr):
    """Offsets of rows in a contiguous (T, H, R, P)."""
    return (((token * heads + head) * R + stream) * P)[:, None] + p[None, :]


@triton.jit
def state_at(index, p, P: tl.constexpr, N: tl.constexpr):
    """Offsets of the rows p of state `index` in (..., P, N)."""
    return ((index * P + p) * N)[:, None]


@triton.jit
def chunk_state(
    states_ptr, lead_ptr, carried_ptr, index, segment, heads, head, outer, p,
    P: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The state at a chunk's border: its segment's own, and what was carried into the segment.

    Nothing is carried into the segment that a walk starts with (outer = False).
    """
    pair = tl.arange(0, HALF)[None, :]
    mask = (p < P)[:, None] & (pair < N // 2)
    at = state_at(index, p, P, N) + pair
    h_re = tl.load(states_ptr + at, mask, 0.0)
    h_im = tl.load(states_ptr + at + N // 2, mask, 0.0)
    if outer:
        lead = tl.load(lead_ptr + index)
        carried = carried_ptr + state_at(segment * heads + head, p, P, N) + pair
        h_re = (h_re + lead * tl.load(carried, mask, 0.0)).to(h_re.dtype)
        h_im = (h_im + lead * tl.load(carried + N // 2, mask, 0.0)).to(h_im.dtype)
    return h_re, h_im


@triton.jit
def mask_of(cum, scale, gamma, place):
    """M (ROWS, ROWS): the weight of row s (a column) in the output of row t."""
    decay = tl.exp(tl.minimum(cum[:, None] - cum[None, :], 0.0)) * scale[None, :]
    later = place[:, None] > place[None, :]
    same = place[:, None] == place[None, :]
    return tl.where(later, decay, tl.where(same, gamma[:, None], 0.0))


@triton.jit(do_not_specialize=["tokens"])
def maps_kernel(
    b_ptr, c_ptr, maps_ptr, b_stride, c_stride, tokens,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    HALF: tl.constexpr, MIMO: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """B and C side by side in one dtype, pairs taken apart."""
    token = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    which, row = tl.program_id(1) // (R * G), tl.program_id(1) % (R * G)
    real = token < tokens
    DOT = maps_ptr.dtype.element_ty
    if which == 0:
        at = b_ptr + row * N + token * b_stride * UNIT
        re, im = load_pairs(at, real, N, HALF, MIMO, BLOCK)
        re, im = re.to(DOT), im.to(DOT)
    else:
        at = c_ptr + row * N + token * c_stride * UNIT
        re, im = load_pairs(at, real, N, HALF, MIMO, BLOCK)
        re, im = re.to(DOT), im.to(DOT)
    store_pairs(
        maps_ptr + ((token * 2 + which) * (R * G) + row) * N, re, im, real, N, HALF, True, BLOCK
    )


@triton.jit
def weights_kernel(
    dt_ptr, a_ptr, lam_ptr, rate_ptr, table_ptr, weights_ptr, turns_ptr, turn_ptr,
    dt_stride, a_stride, lam_stride, rate_stride, heads,
    S: tl.constexpr, Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Weights of a chunk's tokens for one head, how far they turn, and how far the whole chunk.

    cum_t = sum_{..t} dt a,  scale_s = lam_s dt_s + (1 - lam_{s+1}) dt_{s+1},  gamma_s = lam_s dt_s,
    turns_t = sum_{..t} dt rate. The last token of a sequence has no look-ahead.
    """
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // heads, index % heads
    start, stop = tl.load(table_ptr + chunk * 6), tl.load(table_ptr + chunk * 6 + 1)
    place = tl.arange(0, Q)
    token = start + place
    real, next_real = token < stop, token + 1 < stop
    dt = tl.load(dt_ptr + token * dt_stride + head, real, 0.0).to(tl.float32)
    a = tl.load(a_ptr + token * a_stride + head, real, 0.0).to(tl.float32)
    lam = tl.load(lam_ptr + token * lam_stride + head, real, 0.0).to(tl.float32)
    next_dt = tl.load(dt_ptr + (token + 1) * dt_stride + head, next_real, 0.0).to(tl.float32)
    next_lam = tl.load(lam_ptr + (token + 1) * lam_stride + head, next_real, 0.0).to(tl.float32)
    gamma = lam * dt
    at = weights_ptr + index * (4 * Q) + place
    tl.store(at, tl.cumsum(tl.maximum(dt * a, LEAST_LOG_DECAY), 0))
    tl.store(at + Q, gamma + (1 - next_lam) * next_dt)
    tl.store(at + 2 * Q, gamma)
    tl.store(at + 3 * Q, dt)
    pair = tl.arange(0, BLOCK_S)
    mask = real[:, None] & (pair < S)[None, :]
    rate = tl.load(rate_ptr + token[:, None] * rate_stride + pair[None, :], mask, 0.0)
    steps = rate.to(tl.float32) * dt[:, None]
    phase = wrap(tl.cumsum(steps, 0))
    at = turn_ptr + index * S + pair[None, :] + tl.zeros([Q, 1], tl.int64)
    tl.store(at, phase, (place == Q - 1)[:, None] & (pair < S)[None, :])
    at = turns_ptr + index * (Q * S) + (place * S)[:, None] + pair[None, :]
    if turns_ptr.dtype.element_ty == tl.int16:
        phase = tl.floor(phase * (1 / _UNIT) + 0.5).to(tl.int32)
    tl.store(at, phase.to(turns_ptr.dtype.element_ty), (pair < S)[None, :])


@triton.jit
def phase_kernel(
    turn_ptr, phase_ptr, final_ptr, sequences_ptr, heads,
    S: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, HAS_START: tl.constexpr,
):  # fmt: skip
    """Turns of the chunks of a sequence, in place, to the phase before each; and the last phase."""
    walk = tl.program_id(0).to(tl.int64)
    sequence, head = walk // heads, walk % heads
    first, last = tl.load(sequences_ptr + sequence * 4), tl.load(sequences_ptr + sequence * 4 + 1)
    pair = tl.arange(0, BLOCK_S)
    at = walk * S + pair
    carry = tl.zeros([BLOCK_S], tl.float32)
    if HAS_START:
        carry += tl.load(phase_ptr + at, pair < S, 0.0)
    for block in range(first, last, BLOCK_C):
        chunk = block + tl.arange(0, BLOCK_C)
        mask = (chunk < last)[:, None] & (pair < S)[None, :]
        place = turn_ptr + ((chunk * heads + head) * S)[:, None] + pair[None, :]
        turn = tl.load(place, mask, 0.0)
        before = tl.cumsum(turn, 0) - turn
        tl.store(place, wrap(carry[None, :] + before), mask)
        carry = wrap(carry + tl.sum(turn, 0))
    tl.store(final_ptr + at, carry, pair < S)
