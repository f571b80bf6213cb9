"""What the scan's kernels share: where a chunk's rows are, its weights, phases, maps and states.

A chunk of Q tokens is a tile of ROWS = Q * BR rows, row m being stream m % BR of token m // BR (BR
is R rounded up to a power of two). SISO and MIMO are then the same matrix products, R = 1 or not.
Channels of B, C and the state are handled as two half tiles, the real and the imaginary parts of
the N/2 pairs, so that a rotation moves no data between lanes. States are stored so too: N/2 real
parts, then N/2 imaginary ones.

    code        meaning                                                     shape
    table       per chunk: first token, end of its sequence, segment,       (K, 6) int64
                sequence, whether the segment opens, closes its sequence
    segments    per segment: first chunk, last + 1, sequence, opens, closes (I, 5) int64
    sequences   per sequence: first chunk, last + 1, first segment, last+1  (B, 4) int64
    weights     per chunk and head: cum, scale, gamma, dt, as in            (K, H, 4, Q)
                `mamba3.ops.chunked`
    phase       rotation before a chunk's first token                       (K, H, S)

Source: arXiv 2603.15569; symbols as in `mamba3.ops.reference` and `mamba3.ops.chunked`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..reference import TAU_HIGH, TAU_LOW

_TAU_HIGH = tl.constexpr(TAU_HIGH)
_TAU_LOW = tl.constexpr(TAU_LOW)
_TURN = tl.constexpr(1 / (TAU_HIGH + TAU_LOW))
# exp(-60) is 1e-26: a token that forgets more forgets all the same, and running sums of longer
# decays would lose the digits that the decays after it are told apart by.
_LEAST_LOG_DECAY = tl.constexpr(-60.0)


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
def phases(
    rate_ptr, rate_stride, phase_ptr, token, stream, real, dt, S: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Every row's phase (ROWS, HALF): that before the chunk plus a running sum.

    A token's rotation counts in its first row alone, so that the sum runs over rows.
    """
    pair = tl.arange(0, HALF)
    turns = (real & (stream == 0))[:, None] & (pair < S)[None, :]
    rate = tl.load(rate_ptr + token[:, None] * rate_stride + pair[None, :], turns, 0.0)
    phase = tl.cumsum(rate.to(tl.float32) * dt[:, None], 0)
    return wrap(phase + tl.load(phase_ptr + pair, pair < S, 0.0)[None, :])


@triton.jit
def rotate(re, im, phase, FAST: tl.constexpr):
    """Turn pairs by a phase in [-pi, pi]."""
    if FAST:
        # The hardware's own: off by less than 1e-6 in that range.
        cos, sin = libdevice.fast_cosf(phase), libdevice.fast_sinf(phase)
    else:
        cos, sin = tl.cos(phase), tl.sin(phase)
    return re * cos - im * sin, re * sin + im * cos


@triton.jit
def maps(
    maps_ptr, stride, bias_ptr, head, group, token, stream, real,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, MIMO: tl.constexpr,
):  # fmt: skip
    """Rows of B or C plus bias: real and imaginary parts of their pairs, (ROWS, HALF) each."""
    maps_ptr += token[:, None] * stride + ((stream * G + group) * N)[:, None]
    if MIMO:
        pair = tl.arange(0, HALF)[None, :]
        mask = real[:, None] & (pair < N // 2)
        bias_ptr += ((head * R + stream) * N)[:, None]
        re = tl.load(maps_ptr + pair, mask, 0.0).to(tl.float32)
        im = tl.load(maps_ptr + N // 2 + pair, mask, 0.0).to(tl.float32)
        re += tl.load(bias_ptr + pair, mask, 0.0)
        im += tl.load(bias_ptr + N // 2 + pair, mask, 0.0)
    else:
        channel = tl.arange(0, 2 * HALF)[None, :]
        mask = real[:, None] & (channel < N)
        m = tl.load(maps_ptr + channel, mask, 0.0).to(tl.float32)
        m += tl.where(mask, tl.load(bias_ptr + head * N + channel, channel < N, 0.0), 0.0)
        re, im = tl.split(tl.reshape(m, [m.shape[0], HALF, 2]))
    return re, im


@triton.jit
def values(
    x_ptr, stride, mimo_ptr, head, token, stream, real, p,
    R: tl.constexpr, P: tl.constexpr, MIMO: tl.constexpr,
):  # fmt: skip
    """Rows of x times their stream's weight, (ROWS, BLOCK_P), in float32."""
    mask = real[:, None] & (p < P)[None, :]
    x = tl.load(x_ptr + token[:, None] * stride + head * P + p[None, :], mask, 0.0)
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


@triton.jit
def weights_kernel(
    dt_ptr, a_ptr, lam_ptr, rate_ptr, table_ptr, weights_ptr, turn_ptr,
    dt_stride, a_stride, lam_stride, rate_stride, heads,
    S: tl.constexpr, Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Weights of a chunk's tokens for one head, and by how much the chunk turns.

    cum_t = sum_{..t} dt a,  scale_s = lam_s dt_s + (1 - lam_{s+1}) dt_{s+1},  gamma_s = lam_s dt_s,
    turn = sum_t dt_t rate_t. The last token of a sequence has no look-ahead.
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
    tl.store(at, tl.cumsum(tl.maximum(dt * a, _LEAST_LOG_DECAY), 0))
    tl.store(at + Q, gamma + (1 - next_lam) * next_dt)
    tl.store(at + 2 * Q, gamma)
    tl.store(at + 3 * Q, dt)
    pair = tl.arange(0, BLOCK_S)
    mask = real[:, None] & (pair < S)[None, :]
    rate = tl.load(rate_ptr + token[:, None] * rate_stride + pair[None, :], mask, 0.0)
    turn = wrap(tl.sum(rate.to(tl.float32) * dt[:, None], 0))
    tl.store(turn_ptr + index * S + pair, turn, pair < S)


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
