"""Kernels of the scan, backward: every gradient of a chunk from the states at its two borders.

The gradients of the states are found by `scan_forward.states_kernel`, walking back. Rotated maps,
scores and masks are computed again, never stored. With W = q k^T, M its mask, dW = dy v^T,
e_t = exp(cum_t) and o_s = exp(cum_Q - cum_s) scale_s:

    inputs_kernel       dk = (dW * M)^T q + o v dh,  dv = (W * M)^T dy + D dy + o k dh^T
    readouts_kernel     dq = (dW * M) k + e dy h
    turn_back_kernel    from dk and dq: what decays, phases and biases get
    sums_kernel         dB, dC and drate, sums over heads

Transposes of products are computed as products, never taken: Triton up to 3.7.0 compiles a dot of
a transposed dot wrongly on Hopper. dk and dq of all heads are large, so that the kernels are run
on some chunks at a time, the last ones first.

The step that made a phase turned all later tokens too, and the decay of a token weighs on all later
outputs. Both sums run over (dq q* - dk k*) as complex numbers: decays get the real parts, phases
the imaginary ones, by the same rule. What the tokens after a chunk give is known without a pass
over them: turning or scaling them all is turning or scaling the state handed to them, and in return
the final state.

    turned     dk and dq in float32, of the chunks of a launch    (2, K', H, ROWS, N)
    d_rates    by token and head, of those chunks                 (K', H, Q, S)
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
    biased_maps,
    chunk_state,
    mask_of,
    outputs_at,
    phases,
    phasors,
    rotate,
    rotated,
    rows_of,
    stored_phase,
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
def store_per_stream(ptr, t, column, exists, Q: tl.constexpr, BR: tl.constexpr, R: tl.constexpr,
                     WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store t (ROWS, BLOCK), summed over the tokens of a stream, as (R, WIDTH)."""
    t = tl.sum(tl.reshape(t, [Q, BR, BLOCK]), 0)
    stream = tl.arange(0, BR)
    at = ptr + (stream * WIDTH)[:, None] + column[None, :]
    tl.store(at, t, (stream < R)[:, None] & exists[None, :])


@triton.jit
def store_bias(ptr, re, im, pair, exists, BR: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
               MIMO: tl.constexpr):  # fmt: skip
    """Store rows of pairs, summed over the tokens of a stream, in the channels' order: (R, N)."""
    if MIMO:
        Q: tl.constexpr = re.shape[0] // BR
        store_per_stream(ptr, re, pair, exists, Q, BR, R, N, re.shape[1])
        store_per_stream(ptr, im, pair + N // 2, exists, Q, BR, R, N, re.shape[1])
    else:
        tl.store(ptr + 2 * pair, tl.sum(re, 0), exists)
        tl.store(ptr + 2 * pair + 1, tl.sum(im, 0), exists)


@triton.jit
def params_at(index, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr):
    """Offset of the gradients of a chunk's and head's parameters; see d_params."""
    return index * (2 * R * N + 1 + (R * P if MIMO else 0))


@triton.jit
def store_turned(
    turned_ptr, own, re, im, real, N: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Store the rows (ROWS, HALF) of dk or dq of one chunk and head of this launch."""
    at = turned_ptr + (own * ROWS + tl.arange(0, ROWS))[:, None] * N
    store_pairs(at, re, im, real[:, None], N, HALF, True, ROWS)


@triton.jit(do_not_specialize=["offset"])
def inputs_kernel(
    x_ptr, dy_ptr, mimo_ptr, b_bias_ptr, c_bias_ptr, d_ptr, maps_ptr, weights_ptr, turns_ptr,
    phase_ptr, table_ptr, dh_ptr, lead_ptr, carried_ptr,
    turned_ptr, dx_ptr, d_weights_ptr, d_params_ptr,
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
    store_turned(turned_ptr, own, dk_re, dk_im, real, N, HALF, ROWS)

    token_of_place = start + tl.arange(0, Q)
    for part in tl.static_range(PARTS):
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        v = values(x_ptr, x_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO, UNIT)
        dy = output_rows(dy_ptr, token, stream, real, heads, head, p, R, P)
        dh_re, dh_im = chunk_state(
            dh_ptr, lead_ptr, carried_ptr, index, segment, heads, head, closes == 0, p, P, N, HALF
        )
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
            store_per_stream(d_mimo, dv * x, p, p < P, Q, BR, R, P, BLOCK_P)
            at = ((head * R + stream) * P)[:, None] + p[None, :]
            dv *= tl.load(mimo_ptr + at, here, 0.0)
            dv = tl.sum(tl.reshape(dv, [Q, BR, BLOCK_P]), 1)
        at = ((token_of_place * heads + head) * P)[:, None] + p[None, :]
        tl.store(dx_ptr + at, dv, (token_of_place < stop)[:, None] & (p < P)[None, :])
    at = d_weights_ptr + index * (4 * Q) + tl.arange(0, Q)
    d_scale = per_token(d_scale, Q, BR)
    tl.store(at + Q, per_token(d_gamma, Q, BR) + d_scale)
    tl.store(at + 2 * Q, d_scale)


@triton.jit(do_not_specialize=["offset"])
def readouts_kernel(
    x_ptr, dy_ptr, mimo_ptr, b_bias_ptr, maps_ptr, weights_ptr, turns_ptr, phase_ptr, table_ptr,
    h_ptr, h_lead_ptr, h_carried_ptr, dh_ptr, dh_lead_ptr, dh_carried_ptr,
    turned_ptr, border_ptr, d_params_ptr,
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
    tl.store(d_params_ptr + params_at(index, R, P, N, MIMO) + 2 * R * N, d_d)
    pair = tl.arange(0, HALF)
    at = border_ptr + index * (S + 1)
    tl.store(at + pair, turning, pair < S)
    tl.store(at + S, scaling)
    phase = phases(turns_ptr, phase_ptr, index, place, S, Q, HALF)
    k_re, k_im = rotated(
        maps_ptr, 0, b_bias_ptr, head, head // per_group, token, stream, real, phase,
        R, G, N, HALF, MIMO, FAST,
    )  # fmt: skip
    into = tl.exp(cum)[:, None]
    dw = (dw * mask_of(cum, scale, gamma, place)).to(DOT)
    dq_re = tl.dot(dw, k_re, dq_re * into, input_precision=PRECISION)
    dq_im = tl.dot(dw, k_im, dq_im * into, input_precision=PRECISION)
    store_turned(turned_ptr, own, dq_re, dq_im, real, N, HALF, ROWS)


@triton.jit(do_not_specialize=["plane", "offset"])
def turn_back_kernel(
    turned_ptr, rate_ptr, b_bias_ptr, c_bias_ptr, maps_ptr, weights_ptr, turns_ptr, phase_ptr,
    table_ptr, border_ptr, tail_ptr, d_rates_ptr, d_weights_ptr, d_params_ptr,
    rate_stride, heads, per_group, plane, offset,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, MIMO: tl.constexpr,
    FAST: tl.constexpr, HAS_TAIL: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_S: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """Turn dk and dq back, in place; gradients of decays, phases and biases.

    A program is one warp and walks a chunk's rows from the last, PIECE at a time: sums then need
    no exchange between warps. Pairs from S on do not turn, and are only read.
    """
    own = tl.program_id(0).to(tl.int64)
    index = own + offset * heads
    chunk, head = index // heads, index % heads
    group = head // per_group
    Q: tl.constexpr = ROWS // BR
    start, stop = tl.load(table_ptr + chunk * 6), tl.load(table_ptr + chunk * 6 + 1)
    pair = tl.arange(0, BLOCK_S)
    still = S + tl.arange(0, STILL)
    exists, rests = pair < S, still < N // 2

    # Sums over all later tokens. What the next chunks give is the border before the next one; a
    # sequence's last chunk has none.
    inner = (start + Q < stop).to(tl.int64)
    border = border_ptr + (index + inner * heads) * (S + 1)
    turned_on = -inner * tl.load(border + pair, exists, 0.0)
    scaled_on = inner * tl.load(border + S)
    if HAS_TAIL:
        sequence = tl.load(table_ptr + chunk * 6 + 3)
        tail = tail_ptr + ((sequence * heads + head) * 2 + 1 - inner) * (S + 1)
        turned_on += tl.load(tail + pair, exists, 0.0)
        scaled_on += tl.load(tail + S)
    first_phase = tl.load(phase_ptr + index * S + pair, exists, 0.0)[None, :]

    weights_ptr += index * (4 * Q)
    d_weights_ptr += index * (4 * Q)
    turned_ptr += own * (ROWS * N)
    turns_ptr += index * (Q * S)
    d_rates_ptr += own * (Q * S)
    db_re = tl.zeros([PIECE, BLOCK_S], tl.float32)
    db_im = tl.zeros([PIECE, BLOCK_S], tl.float32)
    dc_re = tl.zeros([PIECE, BLOCK_S], tl.float32)
    dc_im = tl.zeros([PIECE, BLOCK_S], tl.float32)
    sb_re = tl.zeros([PIECE, STILL], tl.float32)
    sb_im = tl.zeros([PIECE, STILL], tl.float32)
    sc_re = tl.zeros([PIECE, STILL], tl.float32)
    sc_im = tl.zeros([PIECE, STILL], tl.float32)
    for piece in range(ROWS // PIECE):
        row = ROWS - PIECE * (piece + 1) + tl.arange(0, PIECE)
        place, stream = row // BR, row % BR
        token = start + place
        real = (token < stop) & (stream < R)
        leads = stream == 0

        mask = real[:, None] & exists[None, :]
        at = (place * S)[:, None] + pair[None, :]
        phase = stored_phase(turns_ptr + at, exists[None, :]) + first_phase
        cos, sin = phasors(phase, FAST)
        g_re, g_im, turning, b_scaling = turn_one_back(
            turned_ptr, maps_ptr, 0, b_bias_ptr, head, group, token, stream, real, row, pair,
            exists, cos, sin, R, G, N, MIMO,
        )  # fmt: skip
        db_re += g_re
        db_im += g_im
        g_re, g_im, c_turning, scaling = turn_one_back(
            turned_ptr + plane, maps_ptr, 1, c_bias_ptr, head, group, token, stream, real, row,
            pair, exists, cos, sin, R, G, N, MIMO,
        )  # fmt: skip
        dc_re += g_re
        dc_im += g_im
        turning += c_turning
        scaling = tl.sum(scaling - b_scaling, 1)
        if S < N // 2:
            g_re, g_im, b_scaling = read_still(
                turned_ptr, maps_ptr, 0, b_bias_ptr, head, group, token, stream, real, row, still,
                rests, R, G, N, MIMO,
            )  # fmt: skip
            sb_re += g_re
            sb_im += g_im
            g_re, g_im, c_scaling = read_still(
                turned_ptr + plane, maps_ptr, 1, c_bias_ptr, head, group, token, stream, real, row,
                still, rests, R, G, N, MIMO,
            )  # fmt: skip
            sc_re += g_re
            sc_im += g_im
            scaling += tl.sum(c_scaling - b_scaling, 1)

        till_here = tl.cumsum(scaling, 0, reverse=True) + scaled_on
        scaled_on += tl.sum(scaling, 0)
        tl.store(d_weights_ptr + place, till_here, leads)
        till_here = tl.cumsum(turning, 0, reverse=True) + turned_on[None, :]
        turned_on += tl.sum(turning, 0)
        mask = mask & leads[:, None]
        rate = tl.load(rate_ptr + token[:, None] * rate_stride + pair[None, :], mask, 0.0)
        d_dt = tl.sum(till_here * rate.to(tl.float32), 1)
        tl.store(d_weights_ptr + 3 * Q + place, d_dt, leads)
        dt = tl.load(weights_ptr + 3 * Q + place)
        tl.store(d_rates_ptr + at, till_here * dt[:, None], mask)
    d_bias_ptr = d_params_ptr + params_at(index, R, P, N, MIMO)
    store_bias(d_bias_ptr, db_re, db_im, pair, exists, BR, R, N, MIMO)
    store_bias(d_bias_ptr + R * N, dc_re, dc_im, pair, exists, BR, R, N, MIMO)
    if S < N // 2:
        store_bias(d_bias_ptr, sb_re, sb_im, still, rests, BR, R, N, MIMO)
        store_bias(d_bias_ptr + R * N, sc_re, sc_im, still, rests, BR, R, N, MIMO)


@triton.jit
def turn_one_back(
    turned_ptr, maps_ptr, which, bias_ptr, head, group, token, stream, real, row, pair, exists,
    cos, sin, R: tl.constexpr, G: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr,
):  # fmt: skip
    """Gradients of turning pairs before rotation, stored; products m* g of maps and theirs.

    Sums of the products cancel, for all that stays between two tokens of the chunk: so the maps
    are rounded as those were that the gradients were made from, and the gradients not at all.
    """
    DOT = maps_ptr.dtype.element_ty
    mask = real[:, None] & exists[None, :]
    at = turned_ptr + (row * N)[:, None] + pair[None, :]
    g_re, g_im = tl.load(at, mask, 0.0), tl.load(at + N // 2, mask, 0.0)
    re, im = biased_maps(
        maps_ptr, which, bias_ptr, head, group, token, stream, real, pair, exists, R, G, N, MIMO
    )
    re, im = rotate(re, im, cos, sin)
    re, im = re.to(DOT).to(tl.float32), im.to(DOT).to(tl.float32)
    turning, scaling = re * g_im - im * g_re, re * g_re + im * g_im
    g_re, g_im = rotate(g_re, g_im, cos, -sin)
    tl.store(at, g_re, mask)
    tl.store(at + N // 2, g_im, mask)
    return g_re, g_im, turning, scaling


@triton.jit
def read_still(
    turned_ptr, maps_ptr, which, bias_ptr, head, group, token, stream, real, row, pair, exists,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr,
):  # fmt: skip
    """Gradients of pairs that do not turn, and the real parts of their products with the maps."""
    DOT = maps_ptr.dtype.element_ty
    mask = real[:, None] & exists[None, :]
    at = turned_ptr + (row * N)[:, None] + pair[None, :]
    g_re, g_im = tl.load(at, mask, 0.0), tl.load(at + N // 2, mask, 0.0)
    re, im = biased_maps(
        maps_ptr, which, bias_ptr, head, group, token, stream, real, pair, exists, R, G, N, MIMO
    )
    re, im = re.to(DOT).to(tl.float32), im.to(DOT).to(tl.float32)
    return g_re, g_im, re * g_re + im * g_im


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
                re += tl.load(at, mask, 0.0)
                im += tl.load(at + N // 2, mask, 0.0)
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
