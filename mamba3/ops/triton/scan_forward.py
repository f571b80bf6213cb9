"""Kernels of the scan, forward: states at the chunks' borders, then outputs; see `chunk`.

Programs walk segments of consecutive chunks, each from a zero state, or from the given one where
the segment opens its sequence. What earlier segments hand on is worked out afterwards, from the
segments' last states alone, and added where a chunk's state is read. So a segment may be as short
as is needed to fill the chip, and one that spans its sequence costs nothing more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk import (
    chunk_state,
    mask_of,
    outputs_at,
    phases,
    rotated,
    rows_of,
    state_at,
    values,
)


@triton.jit
def states_kernel(
    rows_ptr, mimo_ptr, bias_ptr, maps_ptr, weights_ptr, turns_ptr, phase_ptr, table_ptr,
    segments_ptr, start_ptr, states_ptr, lead_ptr, end_ptr, decay_ptr,
    rows_stride, heads, per_group,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, BLOCK_P: tl.constexpr, HALF: tl.constexpr,
    MIMO: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    HAS_START: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Walk a segment and keep the state at every chunk's border.

    Forward:  h <- exp(cum_Q) h + sum_m exp(cum_Q - cum_m) scale_m v_m k_m^T, kept before a chunk.
    REVERSE:  dh <- exp(cum_Q) dh + sum_m exp(cum_m) dy_m q_m^T, kept after a chunk, from the last
    chunk to the first. `lead` is what a state carried into the segment has decayed to by then.
    """
    walk = tl.program_id(0).to(tl.int64)
    segment, head = walk // heads, walk % heads
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    first, last = tl.load(segments_ptr + segment * 5), tl.load(segments_ptr + segment * 5 + 1)
    Q: tl.constexpr = ROWS // BR
    DOT = states_ptr.dtype.element_ty
    pair = tl.arange(0, HALF)[None, :]
    mask = (p < P)[:, None] & (pair < N // 2)

    h_re = tl.zeros([BLOCK_P, HALF], tl.float32)
    h_im = tl.zeros([BLOCK_P, HALF], tl.float32)
    if HAS_START:
        sequence = tl.load(segments_ptr + segment * 5 + 2)
        opens = tl.load(segments_ptr + segment * 5 + (4 if REVERSE else 3))
        given = mask & (p < P * opens)[:, None]
        start_ptr += state_at(sequence * heads + head, p, P, N) + pair
        h_re += tl.load(start_ptr, given, 0.0)
        h_im += tl.load(start_ptr + N // 2, given, 0.0)
    total = 0.0
    for i in range(first, last):
        chunk = (first + last - 1 - i) if REVERSE else i
        index = chunk * heads + head
        own = states_ptr + state_at(index, p, P, N) + pair
        tl.store(own, h_re.to(DOT), mask)
        tl.store(own + N // 2, h_im.to(DOT), mask)
        tl.store(lead_ptr + index, tl.exp(total))

        place, token, stream, real = rows_of(table_ptr, chunk, ROWS, BR, R)
        weights = weights_ptr + index * (4 * Q)
        cum = tl.load(weights + place)
        cum_end = tl.load(weights + Q - 1)
        if REVERSE:
            row = outputs_at(token, stream, heads, head, p, R, P)
            v = tl.load(rows_ptr + row, real[:, None] & (p < P)[None, :], 0.0).to(tl.float32)
            v *= tl.exp(cum)[:, None]
        else:
            v = values(
                rows_ptr, rows_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO, UNIT
            )
            v *= (tl.exp(tl.minimum(cum_end - cum, 0.0)) * tl.load(weights + Q + place))[:, None]
        phase = phases(turns_ptr, phase_ptr, index, place, S, Q, HALF)
        m_re, m_im = rotated(
            maps_ptr, 1 if REVERSE else 0, bias_ptr, head, head // per_group, token, stream, real,
            phase, R, G, N, HALF, MIMO, FAST,
        )  # fmt: skip
        decay = tl.exp(cum_end)
        v = tl.trans(v.to(DOT))
        h_re = tl.dot(v, m_re, h_re * decay, input_precision=PRECISION)
        h_im = tl.dot(v, m_im, h_im * decay, input_precision=PRECISION)
        total += cum_end
    at = end_ptr + state_at(walk, p, P, N) + pair
    tl.store(at, h_re, mask)
    tl.store(at + N // 2, h_im, mask)
    tl.store(decay_ptr + walk, tl.exp(total))


@triton.jit
def carry_kernel(
    end_ptr, decay_ptr, sequences_ptr, final_ptr, heads,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Last states of a sequence's segments, in place, to the state carried into each."""
    walk = tl.program_id(0).to(tl.int64)
    sequence, head = walk // heads, walk % heads
    first = tl.load(sequences_ptr + sequence * 4 + 2)
    last = tl.load(sequences_ptr + sequence * 4 + 3)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = element < SIZE
    carry = tl.zeros([BLOCK], tl.float32)
    for some in range(first, last, UNROLL):
        # Loads do not wait for one another: the carry is needed by the sums alone.
        for i in tl.static_range(UNROLL):
            here = some + i < last
            at = tl.minimum(some + i, last - 1)
            at = ((first + last - 1 - at) if REVERSE else at) * heads + head
            end = tl.load(end_ptr + at * SIZE + element, mask, 0.0)
            decay = tl.load(decay_ptr + at)
            tl.store(end_ptr + at * SIZE + element, carry, element < tl.where(here, SIZE, 0))
            carry = tl.where(here, end + decay * carry, carry)
    tl.store(final_ptr + walk * SIZE + element, carry, mask)


@triton.jit
def outputs_kernel(
    x_ptr, mimo_ptr, b_bias_ptr, c_bias_ptr, d_ptr, maps_ptr, weights_ptr, turns_ptr, phase_ptr,
    table_ptr, states_ptr, lead_ptr, carried_ptr, y_ptr,
    x_stride, heads, per_group,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, BLOCK_P: tl.constexpr, HALF: tl.constexpr,
    MIMO: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = (q k^T * M) v + exp(cum) q h^T + D v for the rows of a chunk.

    M_ts = exp(cum_t - cum_s) scale_s for t > s, gamma_t for t = s, else 0.
    """
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // heads, index % heads
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    Q: tl.constexpr = ROWS // BR
    DOT = states_ptr.dtype.element_ty
    group = head // per_group
    place, token, stream, real = rows_of(table_ptr, chunk, ROWS, BR, R)
    weights = weights_ptr + index * (4 * Q)
    cum, scale = tl.load(weights + place), tl.load(weights + Q + place)
    gamma = tl.load(weights + 2 * Q + place)
    phase = phases(turns_ptr, phase_ptr, index, place, S, Q, HALF)
    q_re, q_im = rotated(
        maps_ptr, 1, c_bias_ptr, head, group, token, stream, real, phase, R, G, N, HALF, MIMO, FAST
    )
    k_re, k_im = rotated(
        maps_ptr, 0, b_bias_ptr, head, group, token, stream, real, phase, R, G, N, HALF, MIMO, FAST
    )
    w = tl.dot(q_re, tl.trans(k_re), input_precision=PRECISION)
    w = tl.dot(q_im, tl.trans(k_im), w, input_precision=PRECISION)
    w *= mask_of(cum, scale, gamma, place)

    segment, opens = tl.load(table_ptr + chunk * 6 + 2), tl.load(table_ptr + chunk * 6 + 4)
    h_re, h_im = chunk_state(
        states_ptr, lead_ptr, carried_ptr, index, segment, heads, head, opens == 0, p,
        P, N, HALF,
    )  # fmt: skip
    y = tl.dot(q_re, tl.trans(h_re), input_precision=PRECISION)
    y = tl.dot(q_im, tl.trans(h_im), y, input_precision=PRECISION)
    y *= tl.exp(cum)[:, None]
    v = values(x_ptr, x_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO, UNIT)
    y += tl.load(d_ptr + head) * v
    y = tl.dot(w.to(DOT), v.to(DOT), y, input_precision=PRECISION)
    at = y_ptr + outputs_at(token, stream, heads, head, p, R, P)
    tl.store(at, y, real[:, None] & (p < P)[None, :])
