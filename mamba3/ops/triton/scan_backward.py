"""Kernels of the scan, backward: every gradient of a chunk from the states at its two borders.

The gradients of the states are found by `scan_forward.states_kernel`, walking back. Rotated maps,
scores and masks are computed again, never stored. A program does one chunk and several heads, whose
sums stay in registers. Two kernels, one by way of k and v and one by way of q, have no matrix
product in common, and half the registers of a single one. Transposes of products are computed as
products, never taken: Triton up to 3.7.0 compiles a dot of a transposed dot wrongly on Hopper.

With W = q k^T, M its mask and dW = dy v^T, a phase's gradient is that of turning its own q and k,
and the step that made it turned all later tokens too. Turning all tokens after a chunk is the same
as turning the state that it hands on backwards, and the final state along: that gives the sum over
them without a pass over them.

    d_maps     sums over a program's heads of dB, dC, drate       (H / per_program, T, 2 R N + S)
    d_weights  gradients of log alpha, gamma with scale, scale,   (K, H, 4, Q)
               and, by the phase alone, dt
    d_params   of B_bias, C_bias, D and, for MIMO, mimo_x         (K, H, 2 R N + 1 + R P)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk import chunk_state, maps, mask_of, outputs_at, phases, rotate, rows_of, values


@triton.jit
def outputs(
    dy_ptr, token, stream, real, heads, head, p, R: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Rows of the outputs' gradient, (ROWS, BLOCK_P)."""
    mask = real[:, None] & (p < P)[None, :]
    return tl.load(dy_ptr + outputs_at(token, stream, heads, head, p, R, P), mask, 0.0)


@triton.jit
def add(ptr, t, mask):
    """Add to what an earlier launch stored for this program."""
    tl.store(ptr, t + tl.load(ptr, mask, 0.0), mask)


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
def store_bias(ptr, re, im, Q: tl.constexpr, BR: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
               HALF: tl.constexpr, MIMO: tl.constexpr):  # fmt: skip
    """Store rows of pairs, summed over the tokens of a stream, as (R, N)."""
    pair = tl.arange(0, HALF)
    exists = pair < N // 2
    if MIMO:
        store_per_stream(ptr, re, pair, exists, Q, BR, R, N, HALF)
        store_per_stream(ptr, im, pair + N // 2, exists, Q, BR, R, N, HALF)
    else:
        tl.store(ptr + 2 * pair, tl.sum(re, 0), exists)
        tl.store(ptr + 2 * pair + 1, tl.sum(im, 0), exists)


@triton.jit
def store_channels(at, re, im, real, N: tl.constexpr, HALF: tl.constexpr, MIMO: tl.constexpr):
    """Store rows of pairs (ROWS, HALF) in the channels' own order, (ROWS, N)."""
    if MIMO:
        pair = tl.arange(0, HALF)[None, :]
        mask = real[:, None] & (pair < N // 2)
        tl.store(at + pair, re, mask)
        tl.store(at + N // 2 + pair, im, mask)
    else:
        channel = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(re, im), [re.shape[0], 2 * HALF])
        tl.store(at + channel, both, real[:, None] & (channel < N))


@triton.jit
def turned(
    d_re, d_im, re, im, after, rate_ptr, rate_stride, token, stream, real,
    S: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Gradient of every token's turn, (ROWS, HALF), and of its dt by way of that, (ROWS,).

    From gradients (d_re, d_im) of maps (re, im), both before rotation or both after, and what
    `after` adds for all later tokens. Only the first row of a token counts.
    """
    pair = tl.arange(0, HALF)[None, :]
    mask = (real & (stream == 0))[:, None] & (pair < S)
    turning = tl.cumsum(d_im * re - d_re * im, 0, reverse=True) + after[None, :]
    rate = tl.load(rate_ptr + token[:, None] * rate_stride + pair, mask, 0.0).to(tl.float32)
    return turning, tl.sum(turning * rate, 1)


@triton.jit
def inputs_kernel(
    x_ptr, dy_ptr, mimo_ptr, b_ptr, c_ptr, b_bias_ptr, c_bias_ptr, rate_ptr, d_ptr, weights_ptr,
    phase_ptr, table_ptr, dh_ptr, lead_ptr, carried_ptr,
    dx_ptr, d_maps_ptr, d_weights_ptr, d_params_ptr,
    x_stride, b_stride, c_stride, rate_stride, heads, per_group, per_program, tokens,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
    HALF: tl.constexpr, MIMO: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients by way of k and v: of B, x, D, the scale and gamma, and their share of the others.

    With o_s = exp(cum_Q - cum_s) scale_s, and everything of the scores transposed from the start:

        dk = (dW * M)^T q + o v dh,    dv = (W * M)^T dy + D dy + o k dh^T
    """
    program, blocks = tl.program_id(0).to(tl.int64), heads // per_program
    chunk, block = program // blocks, program % blocks
    Q: tl.constexpr = ROWS // BR
    DOT = dh_ptr.dtype.element_ty
    place, token, stream, real = rows_of(table_ptr, chunk, ROWS, BR, R)
    start, stop = tl.load(table_ptr + chunk * 6), tl.load(table_ptr + chunk * 6 + 1)
    token_of_place = start + tl.arange(0, Q)
    segment, closes = tl.load(table_ptr + chunk * 6 + 2), tl.load(table_ptr + chunk * 6 + 5)
    db_re = tl.zeros([ROWS, HALF], tl.float32)
    db_im = tl.zeros([ROWS, HALF], tl.float32)
    d_rate = tl.zeros([ROWS, HALF], tl.float32)
    for i in range(per_program):
        head = block * per_program + i
        index = chunk * heads + head
        group = head // per_group
        weights = weights_ptr + index * (4 * Q)
        cum, scale = tl.load(weights + place), tl.load(weights + Q + place)
        gamma, dt = tl.load(weights + 2 * Q + place), tl.load(weights + 3 * Q + place)
        cum_end, d = tl.load(weights + Q - 1), tl.load(d_ptr + head)
        phase = phases(
            rate_ptr, rate_stride, phase_ptr + index * S, token, stream, real, dt, S, HALF
        )
        q_re, q_im = maps(
            c_ptr, c_stride, c_bias_ptr, head, group, token, stream, real, R, G, N, HALF, MIMO
        )
        q_re, q_im = rotate(q_re, q_im, phase, FAST)
        k_re, k_im = maps(
            b_ptr, b_stride, b_bias_ptr, head, group, token, stream, real, R, G, N, HALF, MIMO
        )
        k_re, k_im = rotate(k_re, k_im, phase, FAST)
        q_re, q_im, k_re, k_im = q_re.to(DOT), q_im.to(DOT), k_re.to(DOT), k_im.to(DOT)
        params = d_params_ptr + index * (2 * R * N + 1 + (R * P if MIMO else 0))

        # Scores and their mask: rows s, columns t.
        w = tl.dot(k_re, tl.trans(q_re), input_precision=PRECISION)
        w = tl.dot(k_im, tl.trans(q_im), w, input_precision=PRECISION)
        dw = tl.zeros([ROWS, ROWS], tl.float32)
        dk_re = tl.zeros([ROWS, HALF], tl.float32)
        dk_im = tl.zeros([ROWS, HALF], tl.float32)
        d_d = 0.0
        for part in tl.static_range(PARTS):
            p = part * BLOCK_P + tl.arange(0, BLOCK_P)
            v = values(x_ptr, x_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO).to(DOT)
            dy = outputs(dy_ptr, token, stream, real, heads, head, p, R, P)
            d_d += tl.sum(v.to(tl.float32) * dy.to(tl.float32))
            dw = tl.dot(v, tl.trans(dy), dw, input_precision=PRECISION)
            dh_re, dh_im = chunk_state(
                dh_ptr, lead_ptr, carried_ptr, index, segment, heads, head, closes == 0, p,
                P, N, HALF,
            )  # fmt: skip
            dk_re = tl.dot(v, dh_re, dk_re, input_precision=PRECISION)
            dk_im = tl.dot(v, dh_im, dk_im, input_precision=PRECISION)
        tl.store(params + 2 * R * N, d_d)

        # By way of the state after the chunk.
        carry = tl.exp(tl.minimum(cum_end - cum, 0.0))
        out = carry * scale
        d_out = tl.sum(dk_re * k_re + dk_im * k_im, 1)
        dk_re *= out[:, None]
        dk_im *= out[:, None]
        after = -tl.sum(dk_im * k_re - dk_re * k_im, 0)

        # By way of the scores.
        same = place[:, None] == place[None, :]
        decay = tl.exp(tl.minimum(cum[None, :] - cum[:, None], 0.0))
        decay = tl.where(place[:, None] < place[None, :], decay, 0.0)
        both = w * dw
        d_gamma = tl.sum(tl.where(same, both, 0.0), 1)
        both *= decay
        d_scale = tl.sum(both, 1) + d_out * carry
        d_cum = tl.sum(both * scale[:, None], 0) - d_scale * scale
        mask = decay * scale[:, None] + tl.where(same, gamma[:, None], 0.0)
        w = (w * mask).to(DOT)
        dw = (dw * mask).to(DOT)
        dk_re = tl.dot(dw, q_re, dk_re, input_precision=PRECISION)
        dk_im = tl.dot(dw, q_im, dk_im, input_precision=PRECISION)

        at = d_weights_ptr + index * (4 * Q)
        d_scale = per_token(d_scale, Q, BR)
        tl.store(at + Q + tl.arange(0, Q), per_token(d_gamma, Q, BR) + d_scale)
        tl.store(at + 2 * Q + tl.arange(0, Q), d_scale)
        d_log_a = tl.cumsum(d_cum, 0, reverse=True) + tl.sum(d_out * out)
        tl.store(at + place, d_log_a, stream == 0)
        dk_re, dk_im = rotate(dk_re, dk_im, -phase, FAST)
        db_re += dk_re
        db_im += dk_im
        store_bias(params, dk_re, dk_im, Q, BR, R, N, HALF, MIMO)
        b_re, b_im = maps(
            b_ptr, b_stride, b_bias_ptr, head, group, token, stream, real, R, G, N, HALF, MIMO
        )
        turning, d_dt = turned(
            dk_re, dk_im, b_re, b_im, after, rate_ptr, rate_stride, token, stream, real, S, HALF
        )
        tl.store(at + 3 * Q + place, d_dt, stream == 0)
        d_rate += turning * dt[:, None]

        for part in tl.static_range(PARTS):
            p = part * BLOCK_P + tl.arange(0, BLOCK_P)
            dy = outputs(dy_ptr, token, stream, real, heads, head, p, R, P)
            dh_re, dh_im = chunk_state(
                dh_ptr, lead_ptr, carried_ptr, index, segment, heads, head, closes == 0, p,
                P, N, HALF,
            )  # fmt: skip
            dv = tl.dot(k_re, tl.trans(dh_re), input_precision=PRECISION)
            dv = tl.dot(k_im, tl.trans(dh_im), dv, input_precision=PRECISION)
            dv = dv * out[:, None] + d * dy.to(tl.float32)
            dv = tl.dot(w, dy, dv, input_precision=PRECISION)
            if MIMO:
                mask = real[:, None] & (p < P)[None, :]
                x_at = x_ptr + token[:, None] * x_stride + head * P + p[None, :]
                x = tl.load(x_at, mask, 0.0).to(tl.float32)
                store_per_stream(params + 2 * R * N + 1, dv * x, p, p < P, Q, BR, R, P, BLOCK_P)
                weight = ((head * R + stream) * P)[:, None] + p[None, :]
                dv *= tl.load(mimo_ptr + weight, mask, 0.0)
                dv = tl.sum(tl.reshape(dv, [Q, BR, BLOCK_P]), 1)
            at = (token_of_place * heads + head)[:, None] * P + p[None, :]
            tl.store(dx_ptr + at, dv, (token_of_place < stop)[:, None] & (p < P)[None, :])

    at = d_maps_ptr + (block * tokens + token)[:, None] * (2 * R * N + S)
    store_channels(at + (stream * N)[:, None], db_re, db_im, real, N, HALF, MIMO)
    pair = tl.arange(0, HALF)[None, :]
    tl.store(at + 2 * R * N + pair, d_rate, (real & (stream == 0))[:, None] & (pair < S))


@triton.jit
def readouts_kernel(
    x_ptr, dy_ptr, mimo_ptr, b_ptr, c_ptr, b_bias_ptr, c_bias_ptr, rate_ptr, weights_ptr,
    phase_ptr, table_ptr, h_ptr, h_lead_ptr, h_carried_ptr, dh_ptr, dh_lead_ptr, dh_carried_ptr,
    tail_ptr, d_maps_ptr, d_weights_ptr, d_params_ptr,
    x_stride, b_stride, c_stride, rate_stride, heads, per_group, per_program, tokens,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
    HALF: tl.constexpr, MIMO: tl.constexpr, HAS_TAIL: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients by way of q: of C, and its share of the others, added to `inputs_kernel`'s.

    dq = (dW * M) k + exp(cum) dy h,  and what the two states of the chunk tell together.
    """
    program, blocks = tl.program_id(0).to(tl.int64), heads // per_program
    chunk, block = program // blocks, program % blocks
    Q: tl.constexpr = ROWS // BR
    DOT = h_ptr.dtype.element_ty
    place, token, stream, real = rows_of(table_ptr, chunk, ROWS, BR, R)
    segment, sequence = tl.load(table_ptr + chunk * 6 + 2), tl.load(table_ptr + chunk * 6 + 3)
    opens, closes = tl.load(table_ptr + chunk * 6 + 4), tl.load(table_ptr + chunk * 6 + 5)
    dc_re = tl.zeros([ROWS, HALF], tl.float32)
    dc_im = tl.zeros([ROWS, HALF], tl.float32)
    d_rate = tl.zeros([ROWS, HALF], tl.float32)
    for i in range(per_program):
        head = block * per_program + i
        index = chunk * heads + head
        group = head // per_group
        weights = weights_ptr + index * (4 * Q)
        cum, scale = tl.load(weights + place), tl.load(weights + Q + place)
        gamma, dt = tl.load(weights + 2 * Q + place), tl.load(weights + 3 * Q + place)
        decay = tl.exp(tl.load(weights + Q - 1))

        dw = tl.zeros([ROWS, ROWS], tl.float32)
        dq_re = tl.zeros([ROWS, HALF], tl.float32)
        dq_im = tl.zeros([ROWS, HALF], tl.float32)
        after = tl.zeros([HALF], tl.float32)
        handed_on = 0.0
        for part in tl.static_range(PARTS):
            p = part * BLOCK_P + tl.arange(0, BLOCK_P)
            v = values(x_ptr, x_stride, mimo_ptr, head, token, stream, real, p, R, P, MIMO).to(DOT)
            dy = outputs(dy_ptr, token, stream, real, heads, head, p, R, P)
            dw = tl.dot(dy, tl.trans(v), dw, input_precision=PRECISION)
            h_re, h_im = chunk_state(
                h_ptr, h_lead_ptr, h_carried_ptr, index, segment, heads, head, opens == 0, p,
                P, N, HALF,
            )  # fmt: skip
            dq_re = tl.dot(dy, h_re, dq_re, input_precision=PRECISION)
            dq_im = tl.dot(dy, h_im, dq_im, input_precision=PRECISION)
            dh_re, dh_im = chunk_state(
                dh_ptr, dh_lead_ptr, dh_carried_ptr, index, segment, heads, head, closes == 0, p,
                P, N, HALF,
            )  # fmt: skip
            h_re, h_im = h_re.to(tl.float32) * decay, h_im.to(tl.float32) * decay
            after -= tl.sum(h_re * dh_im - h_im * dh_re, 0)
            handed_on += tl.sum(h_re * dh_re + h_im * dh_im)
        if HAS_TAIL:
            pair = tl.arange(0, HALF)
            after += tl.load(tail_ptr + (sequence * heads + head) * S + pair, pair < S, 0.0)

        phase = phases(
            rate_ptr, rate_stride, phase_ptr + index * S, token, stream, real, dt, S, HALF
        )
        q_re, q_im = maps(
            c_ptr, c_stride, c_bias_ptr, head, group, token, stream, real, R, G, N, HALF, MIMO
        )
        q_re, q_im = rotate(q_re, q_im, phase, FAST)
        k_re, k_im = maps(
            b_ptr, b_stride, b_bias_ptr, head, group, token, stream, real, R, G, N, HALF, MIMO
        )
        k_re, k_im = rotate(k_re, k_im, phase, FAST)
        dq_re *= tl.exp(cum)[:, None]
        dq_im *= tl.exp(cum)[:, None]
        d_cum = tl.sum(dq_re * q_re + dq_im * q_im, 1)
        dw = (dw * mask_of(cum, scale, gamma, place)).to(DOT)
        dq_re = tl.dot(dw, k_re.to(DOT), dq_re, input_precision=PRECISION)
        dq_im = tl.dot(dw, k_im.to(DOT), dq_im, input_precision=PRECISION)

        at = d_weights_ptr + index * (4 * Q)
        d_log_a = tl.cumsum(d_cum, 0, reverse=True) + handed_on
        add(at + place, d_log_a, stream == 0)
        dq_re, dq_im = rotate(dq_re, dq_im, -phase, FAST)
        dc_re += dq_re
        dc_im += dq_im
        params = d_params_ptr + index * (2 * R * N + 1 + (R * P if MIMO else 0))
        store_bias(params + R * N, dq_re, dq_im, Q, BR, R, N, HALF, MIMO)
        c_re, c_im = maps(
            c_ptr, c_stride, c_bias_ptr, head, group, token, stream, real, R, G, N, HALF, MIMO
        )
        turning, d_dt = turned(
            dq_re, dq_im, c_re, c_im, after, rate_ptr, rate_stride, token, stream, real, S, HALF
        )
        add(at + 3 * Q + place, d_dt, stream == 0)
        d_rate += turning * dt[:, None]

    at = d_maps_ptr + (block * tokens + token)[:, None] * (2 * R * N + S)
    store_channels(at + (R * N + stream * N)[:, None], dc_re, dc_im, real, N, HALF, MIMO)
    pair = tl.arange(0, HALF)[None, :]
    add(at + 2 * R * N + pair, d_rate, (real & (stream == 0))[:, None] & (pair < S))


@triton.jit
def weights_gradients_kernel(
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
    d_dt = d_log_a * a + d_gamma * lam + d_late * (1 - lam) + tl.load(at + 3 * Q)
    out = token * heads + head
    tl.store(d_dt_ptr + out, d_dt, real)
    tl.store(d_a_ptr + out, d_log_a * dt, real)
    tl.store(d_lam_ptr + out, (d_gamma - d_late) * dt, real)
