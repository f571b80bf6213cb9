"""Kernels of the scan, backward: every gradient of a chunk from the states at its two borders.

The gradients of the states are found by `scan_forward.states_kernel`, walking back. Rotated maps,
scores and masks are computed again, never stored. With W = q k^T, M its mask, dW = dy v^T,
e_t = exp(cum_t) and o_s = exp(cum_Q - cum_s) scale_s:

    readouts_kernel     dq = (dW * M) k + e dy h
    inputs_kernel       dk = (dW * M)^T q + o v dh,  dv = (W * M)^T dy + D dy + o k dh^T
    later_kernel        sums over later tokens: what decays and phases get
    sums_kernel         dB, dC and drate, sums over heads

Transposes of products are computed as products, never taken: Triton up to 3.7.0 compiles a dot of
a transposed dot wrongly on Hopper. dk and dq of all heads are large, so that the kernels are run
on some chunks at a time, the last ones first: later_kernel reads the border of the next chunk.

The step that made a phase turned all later tokens too, and the decay of a token weighs on all later
outputs. Both sums run over (dq q* - dk k*) as complex numbers: decays get the real parts, phases
the imaginary ones, by the same rule. They cancel, for all that stays between two tokens of the
chunk: so q and k are rounded in these products as they were in those that the gradients were made
from, and the gradients not at all. What the tokens after a chunk give is known without a pass over
them: turning or scaling them all is turning or scaling the state handed to them, and in return the
final state.

    turned     dk and dq before rotation, in x's dtype, of the    (2, K', H, ROWS, N)
               chunks of a launch
    turning    imaginary parts by token and pair, of dk k* and    (K', H, Q, S) each
               of dq q*; later_kernel makes drate of the first
    scaling    real parts by token, of dk k* and of dq q*         (K', H, Q) each
    border     of the state before a chunk, h, and its gradient:  (K, H, S + 1)
               parts of sum_p h* dh, imaginary by pair, real
    tail       what is added for a sequence's own end, inner and  (B, H, 2, S + 1)
               last chunks apart
    d_weights  gradients of log alpha, gamma with scale, scale,   (K, H, 4, Q)
               and, by the phase alone, dt
    d_params   of B_bias, C_bias, D and, for MIMO, mimo_x         (K, H, 2 R N + 1 + R P)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk import (
    LEAST_LOG_DECAY,
    chunk_state,
    mask_of,
    outputs_at,
    phases,
    phasors,
    rotate,
    rotated,
    rows_of,
    values,
)
from .pairs import store_pairs


@triton.jit
def output_rows(
    dy_ptr, token, stream, real, heads, head, p, R: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Rows of the outputs' gradient, (ROWS, BLOCK_P)."""
    mask = real[:, None] & (p < P)[None, :]
    return tl.load(dy_ptr + outputs_at(token, stream, heads, head, p, R, P), mask, 0.0)


@triton.jit
def per_token(rows, Q: tl.constexpr, BR: tl.constexpr):
    """Sum (ROWS,) over the streams of a token: (Q,)."""
    return tl.sum(tl.reshape(rows, [Q, BR]), 1)


@triton.jit
def store_per_stream(ptr, t, column, exists, BR: tl.constexpr, R: tl.constexpr,
                     WIDTH: tl.constexpr):  # fmt: skip
    """Store t (ROWS, columns), summed over the tokens of a stream, as (R, WIDTH)."""
    if BR == 1:
        tl.store(ptr + column, tl.sum(t, 0), exists)
    else:
        t = tl.sum(tl.reshape(t, [t.shape[0] // BR, BR, t.shape[1]]), 0)
        stream = tl.arange(0, BR)
        at = ptr + (stream * WIDTH)[:, None] + column[None, :]
        tl.store(at, t, (stream < R)[:, None] & exists[None, :])


@triton.jit
def params_at(index, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr):
    """Offset of the gradients of a chunk's and head's parameters; see d_params."""
    return index * (2 * R * N + 1 + (R * P if MIMO else 0))


@triton.jit
def store_maps_gradient(
    turned_ptr, turning_ptr, scaling_ptr, d_bias_ptr, own, m_re, m_im, g_re, g_im, phase,
    R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr,
    HALF: tl.constexpr, MIMO: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """From the gradient g of rotated maps m of one chunk and head: all that others need of it.

    The gradient before rotation, the parts of m* g summed over streams, and the bias's gradient.
    """
    Q: tl.constexpr = ROWS // BR
    row, place, pair = tl.arange(0, ROWS), tl.arange(0, Q), tl.arange(0, HALF)
    re, im = m_re.to(tl.float32), m_im.to(tl.float32)
    scaling = per_token(tl.sum(re * g_re + im * g_im, 1), Q, BR)
    turning = re * g_im - im * g_re
    if BR > 1:
        turning = tl.sum(tl.reshape(turning, [Q, BR, HALF]), 1)
    tl.store(scaling_ptr + own * Q + place, scaling)
    at = turning_ptr + ((own * Q + place) * S)[:, None] + pair[None, :]
    tl.store(at, turning, (pair < S)[None, :])

    cos, sin = phasors(phase, FAST)
    g_re, g_im = rotate(g_re, g_im, cos, -sin)
    DOT = turned_ptr.dtype.element_ty
    at = turned_ptr + ((own * ROWS + row) * N)[:, None]
    store_pairs(at, g_re.to(DOT), g_im.to(DOT), row[:, None] < ROWS, N, HALF, True, ROWS)
    exists = pair < N // 2
    re_channel = pair if MIMO else 2 * pair
    im_channel = pair + N // 2 if MIMO else 2 * pair + 1
    store_per_stream(d_bias_ptr, g_re, re_channel, exists, BR, R, N)
    store_per_stream(d_bias_ptr, g_im, im_channel, exists, BR, R, N)


@triton.jit(do_not_specialize=["offset"])
def inputs_kernel(
    x_ptr, dy_ptr, mimo_ptr, b_bias_ptr, c_bias_ptr, d_ptr, maps_ptr, weights_ptr, turns_ptr,
    phase_ptr, table_ptr, dh_ptr, lead_ptr, carried_ptr,
    turned_ptr, turning_ptr, scaling_ptr, dx_ptr, d_weights_ptr, d_params_ptr,
    x_stride, heads, per_group, offset,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
    HALF: tl.constexpr, MIMO: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dx, and gradients of mimo_x, scale and gamma; scores are transposed."""
    own = tl.program_id(0).to(tl.int64)
    index = own + offset * heads
    chunk, head = index // heads, index % heads
    group = head // per_group
    Q: tl.constexpr = ROWS // BR
    DOT = dh_ptr.dtype.element_ty
    place, token, stream, real = rows_of(table_ptr, chunk, ROWS, BR, R)
    start, stop = tl.load(table_ptr + chunk * 6), tl.load(table_ptr + chunk * 6 + 1)
    segment, closes = tl.load(table_ptr + chunk * 6 + 2), tl.load(table_ptr + chunk * 6 + 5)
    weights = weights_ptr + index * (4 * Q)
    cum, scale = tl.load(weights + place), tl.load(weights + Q + place)
    gamma, cum_end = tl.load(weights + 2 * Q + place), tl.load(weights + Q - 1)
    d = tl.load(d_ptr + head)
    phase = phases(turns_ptr, phase_ptr, index, place, S, Q, HALF)
    q_re, q_im = rotated(
        maps_ptr, 1, c_bias_ptr, head, group, token, stream, real, phase, R, G, N, HALF, MIMO, FAST
    )
    k_re, k_im = rotated(
        maps_ptr, 0, b_bias_ptr, head, group, token, stream, real, phase, R, G, N, HALF, MIMO, FAST
    )

    # Rows s, columns t.
    w = tl.dot(k_re, tl.trans(q_re), input_precision=PRECISION)
    w = tl.dot(k_im, tl.trans(q_im), w, input_precision=PRECISION)
    dw = tl.zeros([ROWS, ROWS], tl.float32)
    dk_re = tl.zeros([ROWS, HALF], tl.float32)
    dk_im = tl.zeros([ROWS, HALF], tl.float32)
    for part in tl.static_range(PARTS):
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        v = values(x_ptr, x_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO, UNIT)
        dy = output_rows(dy_ptr, token, stream, real, heads, head, p, R, P)
        dw = tl.dot(v.to(DOT), tl.trans(dy), dw, input_precision=PRECISION)
        dh_re, dh_im = chunk_state(
            dh_ptr, lead_ptr, carried_ptr, index, segment, heads, head, closes == 0, p, P, N, HALF
        )
        dk_re = tl.dot(v.to(DOT), dh_re, dk_re, input_precision=PRECISION)
        dk_im = tl.dot(v.to(DOT), dh_im, dk_im, input_precision=PRECISION)

    same = place[:, None] == place[None, :]
    decay = tl.exp(tl.minimum(cum[None, :] - cum[:, None], 0.0))
    decay = tl.where(place[:, None] < place[None, :], decay, 0.0)
    both = w * dw
    d_gamma = tl.sum(tl.where(same, both, 0.0), 1)
    d_scale = tl.sum(both * decay, 1)
    mask = decay * scale[:, None] + tl.where(same, gamma[:, None], 0.0)
    w = (w * mask).to(DOT)
    dw = (dw * mask).to(DOT)
    carry = tl.exp(tl.minimum(cum_end - cum, 0.0))
    out = carry * scale
    dk_re = tl.dot(dw, q_re, dk_re * out[:, None], input_precision=PRECISION)
    dk_im = tl.dot(dw, q_im, dk_im * out[:, None], input_precision=PRECISION)
    token_of_place = start + tl.arange(0, Q)
    for part in tl.static_range(PARTS):
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        v = values(x_ptr, x_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO, UNIT)
        if PARTS > 1:
            dy = output_rows(dy_ptr, token, stream, real, heads, head, p, R, P)
            dh_re, dh_im = chunk_state(
                dh_ptr, lead_ptr, carried_ptr, index, segment, heads, head, closes == 0, p,
                P, N, HALF,
            )  # fmt: skip
        dv = tl.dot(k_re, tl.trans(dh_re), input_precision=PRECISION)
        dv = tl.dot(k_im, tl.trans(dh_im), dv, input_precision=PRECISION)
        d_scale += tl.sum(dv * v, 1) * carry
        dv = dv * out[:, None] + d * dy.to(tl.float32)
        dv = tl.dot(w, dy, dv, input_precision=PRECISION)
        if MIMO:
            at = (token * x_stride * UNIT + head * P)[:, None] + p[None, :]
            here = real[:, None] & (p < P)[None, :]
            x = tl.load(x_ptr + at, here, 0.0).to(tl.float32)
            d_mimo = d_params_ptr + params_at(index, R, P, N, MIMO) + 2 * R * N + 1
            store_per_stream(d_mimo, dv * x, p, p < P, BR, R, P)
            at = ((head * R + stream) * P)[:, None] + p[None, :]
            dv *= tl.load(mimo_ptr + at, here, 0.0)
            dv = tl.sum(tl.reshape(dv, [Q, BR, BLOCK_P]), 1)
        at = ((token_of_place * heads + head) * P)[:, None] + p[None, :]
        tl.store(dx_ptr + at, dv, (token_of_place < stop)[:, None] & (p < P)[None, :])
    at = d_weights_ptr + index * (4 * Q) + tl.arange(0, Q)
    d_scale = per_token(d_scale, Q, BR)
    tl.store(at + Q, per_token(d_gamma, Q, BR) + d_scale)
    tl.store(at + 2 * Q, d_scale)
    # Asked for again: kept till here, they would take registers that there are none of.
    phase = phases(turns_ptr, phase_ptr, index, place, S, Q, HALF)
    if BR > 1:
        k_re, k_im = rotated(
            maps_ptr, 0, b_bias_ptr, head, group, token, stream, real, phase,
            R, G, N, HALF, MIMO, FAST,
        )  # fmt: skip
    store_maps_gradient(
        turned_ptr, turning_ptr, scaling_ptr, d_params_ptr + params_at(index, R, P, N, MIMO), own,
        k_re, k_im, dk_re, dk_im, phase, R, N, S, ROWS, BR, HALF, MIMO, FAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["offset"])
def readouts_kernel(
    x_ptr, dy_ptr, mimo_ptr, b_bias_ptr, c_bias_ptr, maps_ptr, weights_ptr, turns_ptr, phase_ptr,
    table_ptr, h_ptr, h_lead_ptr, h_carried_ptr, dh_ptr, dh_lead_ptr, dh_carried_ptr,
    turned_ptr, turning_ptr, scaling_ptr, border_ptr, d_params_ptr,
    x_stride, heads, per_group, offset,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
    HALF: tl.constexpr, MIMO: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, gradients of D, and the border before the chunk; scores have rows t and columns s."""
    own = tl.program_id(0).to(tl.int64)
    index = own + offset * heads
    chunk, head = index // heads, index % heads
    group = head // per_group
    Q: tl.constexpr = ROWS // BR
    DOT = h_ptr.dtype.element_ty
    place, token, stream, real = rows_of(table_ptr, chunk, ROWS, BR, R)
    segment, opens = tl.load(table_ptr + chunk * 6 + 2), tl.load(table_ptr + chunk * 6 + 4)
    # Nobody asks for the border before a sequence's first chunk: any gradient does.
    before = tl.maximum(chunk - 1, 0)
    before_segment = tl.load(table_ptr + before * 6 + 2)
    before_closes = tl.load(table_ptr + before * 6 + 5)
    weights = weights_ptr + index * (4 * Q)
    cum, scale = tl.load(weights + place), tl.load(weights + Q + place)
    gamma = tl.load(weights + 2 * Q + place)
    dw = tl.zeros([ROWS, ROWS], tl.float32)
    dq_re = tl.zeros([ROWS, HALF], tl.float32)
    dq_im = tl.zeros([ROWS, HALF], tl.float32)
    turning = tl.zeros([HALF], tl.float32)
    scaling = 0.0
    d_d = 0.0
    for part in tl.static_range(PARTS):
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        v = values(x_ptr, x_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO, UNIT)
        dy = output_rows(dy_ptr, token, stream, real, heads, head, p, R, P)
        d_d += tl.sum(dy.to(tl.float32) * v)
        dw = tl.dot(dy, tl.trans(v.to(DOT)), dw, input_precision=PRECISION)
        h_re, h_im = chunk_state(
            h_ptr, h_lead_ptr, h_carried_ptr, index, segment, heads, head, opens == 0, p,
            P, N, HALF,
        )  # fmt: skip
        dq_re = tl.dot(dy, h_re, dq_re, input_precision=PRECISION)
        dq_im = tl.dot(dy, h_im, dq_im, input_precision=PRECISION)
        dh_re, dh_im = chunk_state(
            dh_ptr, dh_lead_ptr, dh_carried_ptr, before * heads + head, before_segment, heads, head,
            before_closes == 0, p, P, N, HALF,
        )  # fmt: skip
        h_re, h_im = h_re.to(tl.float32), h_im.to(tl.float32)
        turning += tl.sum(h_re * dh_im - h_im * dh_re, 0)
        scaling += tl.sum(h_re * dh_re + h_im * dh_im)
    d_params_ptr += params_at(index, R, P, N, MIMO) + R * N
    tl.store(d_params_ptr + R * N, d_d)
    pair = tl.arange(0, HALF)
    at = border_ptr + index * (S + 1)
    tl.store(at + pair, turning, pair < S)
    tl.store(at + S, scaling)
    phase = phases(turns_ptr, phase_ptr, index, place, S, Q, HALF)
    k_re, k_im = rotated(
        maps_ptr, 0, b_bias_ptr, head, group, token, stream, real, phase, R, G, N, HALF, MIMO, FAST
    )
    into = tl.exp(cum)[:, None]
    dw = (dw * mask_of(cum, scale, gamma, place)).to(DOT)
    dq_re = tl.dot(dw, k_re, dq_re * into, input_precision=PRECISION)
    dq_im = tl.dot(dw, k_im, dq_im * into, input_precision=PRECISION)
    q_re, q_im = rotated(
        maps_ptr, 1, c_bias_ptr, head, group, token, stream, real, phase, R, G, N, HALF, MIMO, FAST
    )
    store_maps_gradient(
        turned_ptr, turning_ptr, scaling_ptr, d_params_ptr, own,
        q_re, q_im, dq_re, dq_im, phase, R, N, S, ROWS, BR, HALF, MIMO, FAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["offset"])
def later_kernel(
    k_turning_ptr, q_turning_ptr, k_scaling_ptr, q_scaling_ptr, rate_ptr, weights_ptr, table_ptr,
    border_ptr, tail_ptr, d_weights_ptr, rate_stride, heads, offset,
    S: tl.constexpr, Q: tl.constexpr, BLOCK_S: tl.constexpr, HAS_TAIL: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Sums over all later tokens, for a chunk and head: gradients of decays, rate and dt.

    A program is one warp, and takes PIECE rows at a time: rows' sums of larger tiles would meet in
    shared memory, where several lanes write one of them.
    """
    own = tl.program_id(0).to(tl.int64)
    index = own + offset * heads
    chunk, head = index // heads, index % heads
    start, stop = tl.load(table_ptr + chunk * 6), tl.load(table_ptr + chunk * 6 + 1)
    pair = tl.arange(0, BLOCK_S)
    exists = pair < S
    # What the next chunks give is the border before the next one; a sequence's last has none.
    inner = (start + Q < stop).to(tl.int64)
    border = border_ptr + (index + inner * heads) * (S + 1)
    turned_on = -inner * tl.load(border + pair, exists, 0.0)
    scaled_on = inner * tl.load(border + S)
    if HAS_TAIL:
        sequence = tl.load(table_ptr + chunk * 6 + 3)
        tail = tail_ptr + ((sequence * heads + head) * 2 + 1 - inner) * (S + 1)
        turned_on += tl.load(tail + pair, exists, 0.0)
        scaled_on += tl.load(tail + S)

    # The last token first: a running sum over them is one over later tokens.
    d_weights_ptr += index * (4 * Q)
    place = Q - 1 - tl.arange(0, Q)
    at = own * Q + place
    scaling = tl.load(q_scaling_ptr + at) - tl.load(k_scaling_ptr + at)
    tl.store(d_weights_ptr + place, tl.cumsum(scaling, 0) + scaled_on)
    for first in tl.static_range(0, Q, PIECE):
        place = Q - 1 - first - tl.arange(0, PIECE)
        token = start + place
        mask = (token < stop)[:, None] & exists[None, :]
        at = ((own * Q + place) * S)[:, None] + pair[None, :]
        turning = tl.load(k_turning_ptr + at, mask, 0.0) + tl.load(q_turning_ptr + at, mask, 0.0)
        till_here = tl.cumsum(turning, 0) + turned_on[None, :]
        turned_on += tl.sum(turning, 0)
        rate = tl.load(rate_ptr + token[:, None] * rate_stride + pair[None, :], mask, 0.0)
        d_dt = tl.sum(till_here * rate.to(tl.float32), 1)
        tl.store(d_weights_ptr + 3 * Q + place, d_dt)
        dt = tl.load(weights_ptr + index * (4 * Q) + 3 * Q + place)
        tl.store(k_turning_ptr + at, till_here * dt[:, None], mask)


@triton.jit(do_not_specialize=["plane", "offset"])
def sums_kernel(
    turned_ptr, d_rates_ptr, table_ptr, d_b_ptr, d_c_ptr, d_rate_ptr,
    heads, per_group, plane, offset,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, HALF: tl.constexpr, MIMO: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum over heads: dB, dC of a group, in the channels' own order, and drate."""
    Q: tl.constexpr = ROWS // BR
    PIECES: tl.constexpr = ROWS // BLOCK
    own = (tl.program_id(0) // PIECES).to(tl.int64)
    row = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    start = tl.load(table_ptr + (own + offset) * 6)
    stop = tl.load(table_ptr + (own + offset) * 6 + 1)
    token, stream = start + row // BR, row % BR
    real = ((token < stop) & (stream < R))[:, None]
    pair = tl.arange(0, HALF)[None, :]
    if part == 2 * G:
        turns = real & (stream == 0)[:, None] & (pair < S)
        total = tl.zeros([BLOCK, HALF], tl.float32)
        for some in range(0, heads, UNROLL):
            for head in tl.static_range(UNROLL):
                at = ((own * heads + some + head) * Q + row // BR)[:, None] * S + pair
                total += tl.load(d_rates_ptr + at, turns, 0.0)
        tl.store(d_rate_ptr + (token * S)[:, None] + pair, total, turns)
    else:
        which, group = part // G, part % G
        mask = real & (pair < N // 2)
        re = tl.zeros([BLOCK, HALF], tl.float32)
        im = tl.zeros([BLOCK, HALF], tl.float32)
        for some in range(0, per_group, UNROLL):
            for head in tl.static_range(UNROLL):
                at = (own * heads + group * per_group + some + head) * ROWS + row
                at = turned_ptr + at[:, None] * N + which * plane + pair
                re += tl.load(at, mask, 0.0).to(tl.float32)
                im += tl.load(at + N // 2, mask, 0.0).to(tl.float32)
        at = (((token * R + stream) * G + group) * N)[:, None]
        if which == 0:
            store_pairs(d_b_ptr + at, re, im, real, N, HALF, MIMO, BLOCK)
        else:
            store_pairs(d_c_ptr + at, re, im, real, N, HALF, MIMO, BLOCK)


@triton.jit
def weights_kernel(
    d_weights_ptr, dt_ptr, a_ptr, lam_ptr, table_ptr, d_dt_ptr, d_a_ptr, d_lam_ptr,
    dt_stride, a_stride, lam_stride, heads, Q: tl.constexpr,
):  # fmt: skip
    """From gradients of a chunk's weights to those of dt, a and lam; see `chunk.weights_kernel`."""
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // heads, index % heads
    start, stop = tl.load(table_ptr + chunk * 6), tl.load(table_ptr + chunk * 6 + 1)
    place = tl.arange(0, Q)
    token = start + place
    real = token < stop
    at = d_weights_ptr + index * (4 * Q) + place
    d_log_a, d_gamma = tl.load(at), tl.load(at + Q)
    # scale_s holds (1 - lam) dt of the next token, which may start a chunk.
    begin = tl.load(table_ptr + tl.maximum(chunk - 1, 0) * 6 + 3)
    follows = (chunk > 0) & (begin == tl.load(table_ptr + chunk * 6 + 3))
    before = tl.where(place > 0, at - 1, at - heads * (4 * Q) + Q - 1) + 2 * Q
    d_late = tl.load(before, place >= tl.where(follows, 0, 1), 0.0)
    dt = tl.load(dt_ptr + token * dt_stride + head, real, 0.0).to(tl.float32)
    a = tl.load(a_ptr + token * a_stride + head, real, 0.0).to(tl.float32)
    lam = tl.load(lam_ptr + token * lam_stride + head, real, 0.0).to(tl.float32)
    # A decay that the sums were cut off at has no gradient; what rounding left may be multiplied by
    # a large rate.
    d_log_a = tl.where(dt * a > LEAST_LOG_DECAY, d_log_a, 0.0)
    d_dt = d_log_a * a + d_gamma * lam + d_late * (1 - lam) + tl.load(at + 3 * Q)
    out = token * heads + head
    tl.store(d_dt_ptr + out, d_dt, real)
    tl.store(d_a_ptr + out, d_log_a * dt, real)
    tl.store(d_lam_ptr + out, (d_gamma - d_late) * dt, real)
