"""Kernels of `mamba3.ops.selective_scan`, over chunks of tokens that a thread keeps in registers.

A thread has one channel, or a few, and all `T` tokens of a chunk, and takes the state's numbers one
after the other. So the recurrence, sums over N and those over time stay within a thread; nothing
but sums over channels (gradients of b and c) crosses threads. Per token and channel, for each n:

    decay = exp(dt a_n),  u = dt x b_n,   h = decay h_prev + u,              y += h c_n
    g = dy c_n + decay_next g_next,       d(dt a_n) = g decay h_prev = g (h - u)

    table, segments  where chunks and segments of chunks lie, as in `mamba3.ops.triton.chunk`
    maps      b and c of every chunk, (chunks, N, 2, T) float32, zeros behind a sequence's end
    borders   the state before every chunk, (chunks, N, D) float32, or where nobody will need them
              the last one of every segment, (segments, N, D)
    ends      of a segment that starts from nothing: the state after it, or with REVERSE what the
              gradient before it is, (segments, N, D) float32; `total` is the sum of dt, (segments,
              D). A segment's start is made from the ends of those before it.

`lane` is the distance of neighbouring channels: always 1, but Triton must not know it. It would
then load several channels at once, with tokens spread over threads, and run across those.

Source: arXiv 2312.00752, section 3.2; symbols as in `mamba3.ops.selective`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _segment(segment, segments_ptr):
    """Its row of the table."""
    row = segments_ptr + segment * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _places(chunk, table_ptr, t, d, channels, lane):
    """First row of a chunk, its rows from there, columns, and which of its tile are real.

    What is not repeats the last that is: loads are not masked, since each would take a predicate of
    its own, and wait for the one before.
    """
    first = tl.load(table_ptr + chunk * 6)
    count = (tl.load(table_ptr + chunk * 6 + 1) - first).to(tl.int32)
    real = (t < count)[:, None] & (d < channels)[None, :]
    at = tl.max_contiguous(tl.minimum(d, channels - 1) * lane, 2)[None, :]
    return first, tl.minimum(t, count - 1)[:, None], at, real


@triton.jit
def _row(tile, t, which):
    """One row of a tile: a sum with zeros, which costs nothing where the compiler knows which."""
    bits = tl.where((t == which)[:, None], tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _run(decay, u, h, t, T: tl.constexpr):
    """All states from what enters each and the one before the first; and the last one."""
    for i in tl.static_range(T):
        h = _row(decay, t, i) * h + _row(u, t, i)
        u = tl.where((t == i)[:, None], h[None, :], u)
    return u, h


@triton.jit
def _run_back(decay, g, after, t, T: tl.constexpr):
    """All states' gradients from what each gets by itself; and what the state before gets."""
    through = tl.full(after.shape, 1.0, tl.float32)
    for i in tl.static_range(T):
        after = through * after + _row(g, t, T - 1 - i)
        g = tl.where((t == T - 1 - i)[:, None], after[None, :], g)
        through = _row(decay, t, T - 1 - i)
    return g, through * after


@triton.jit
def silu(x):
    """x sigmoid(x) in one division; where the exponential overflows it is 0, as it should be."""
    return x / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def steps(dt, real, SOFTPLUS: tl.constexpr):
    """Step sizes from what is stored; 0 where there is no token, which changes no state."""
    if SOFTPLUS:
        # max(dt, 0) + log(1 + e), e = exp(-|dt|), as e times a polynomial, to 5e-9: it keeps the
        # digits of small steps, and has no branch, which the library's logarithm has.
        e = tl.exp2(-tl.abs(dt) * LOG2E)
        log = -0.00317605701 * e + 0.0195425272
        log = log * e - 0.0563736128
        log = log * e + 0.105436238
        log = log * e - 0.152696671
        log = log * e + 0.196632743
        log = log * e - 0.249516163
        log = log * e + 0.333297105
        log = log * e - 0.499998926
        log = log * e + 0.999999995
        dt = tl.maximum(dt, 0.0) + e * log
    return tl.where(real, dt, 0.0)


@triton.jit
def maps_kernel(
    b_ptr, c_ptr, table_ptr, maps_ptr, b_stride, c_stride, b_lane, c_lane,
    N: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gather b and c of a chunk, transposed."""
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.load(table_ptr + chunk * 6) + tl.arange(0, T)
    n = tl.arange(0, BLOCK_N)
    real = (row < tl.load(table_ptr + chunk * 6 + 1))[None, :] & (n < N)[:, None]
    to = maps_ptr + (chunk * N + n[:, None]) * 2 * T + tl.arange(0, T)[None, :]
    b = tl.load(b_ptr + row[None, :] * b_stride + n[:, None] * b_lane, real, 0.0)
    c = tl.load(c_ptr + row[None, :] * c_stride + n[:, None] * c_lane, real, 0.0)
    tl.store(to, b.to(tl.float32), (n < N)[:, None])
    tl.store(to + T, c.to(tl.float32), (n < N)[:, None])


@triton.jit
def _start(
    n, segment, sequence, opens, a, ends_ptr, total_ptr, start_ptr, segments_ptr, d, here,
    channels, N: tl.constexpr, HAS_START: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """What a segment starts from: the sequence's start, taken through the segments before it."""
    h = tl.zeros_like(a)
    if HAS_START:
        h = tl.load(start_ptr + (sequence * N + n) * channels + d, here, 0.0)
    # The first one of the sequence (the last one, for gradients).
    other = segment
    while opens == 0:
        other += 1 if REVERSE else -1
        opens = tl.load(segments_ptr + other * 5 + (4 if REVERSE else 3))
    while other != segment:
        total = tl.load(total_ptr + other * channels + d, here, 0.0)
        own = tl.load(ends_ptr + (other * N + n) * channels + d, here, 0.0)
        h = tl.exp2(total * a) * h + own
        other += -1 if REVERSE else 1
    return h


@triton.jit(do_not_specialize=["lane"])
def ends_kernel(
    rows_ptr, z_ptr, dt_ptr, a_ptr, maps_ptr, table_ptr, segments_ptr, ends_ptr, total_ptr,
    rows_stride, z_stride, dt_stride, channels, lane,
    N: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """State after a segment that starts from zeros; with REVERSE the gradient before it.

    rows are x, or the gradient of the output, which the gate z then scales.
    """
    segment, t = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    here = d < channels
    begin, end, _sequence, _opens, _closes = _segment(segment, segments_ptr)
    total = tl.zeros([BLOCK_D], tl.float32)
    for i in range(end - begin):
        chunk = (end - 1 - i) if REVERSE else (begin + i)
        first, row, at, real = _places(chunk, table_ptr, t, d, channels, lane)
        dt = tl.load(dt_ptr + first * dt_stride + (row * dt_stride + at)).to(tl.float32)
        dt = steps(dt, real, SOFTPLUS)
        values = tl.load(rows_ptr + first * rows_stride + (row * rows_stride + at)).to(tl.float32)
        if REVERSE:
            if GATE:
                z = tl.load(z_ptr + first * z_stride + (row * z_stride + at)).to(tl.float32)
                values *= silu(z)
        else:
            values *= dt
        total += tl.sum(dt, 0)
        tl.debug_barrier()  # what other threads have stored in the round before
        for n in tl.range(0, N, num_stages=STAGES):
            place = ends_ptr + (segment * N + n) * channels + d
            a = tl.load(a_ptr + n * channels + d, here, 0.0) * LOG2E
            h = tl.load(place, here & (i > 0), 0.0)
            own = maps_ptr + (chunk * N + n) * 2 * T + t
            decay = tl.exp2(dt * a[None, :])
            if REVERSE:
                g = values * tl.load(own + T)[:, None]
                _, h = _run_back(decay, g, h, t, T)
            else:
                u = values * tl.load(own)[:, None]
                _, h = _run(decay, u, h, t, T)
            tl.store(place, h, here)
    tl.store(total_ptr + segment * channels + d, total, here)


@triton.jit(do_not_specialize=["lane"])
def forward_kernel(
    x_ptr, z_ptr, dt_ptr, a_ptr, d_ptr, maps_ptr, table_ptr, segments_ptr, ends_ptr, total_ptr,
    start_ptr, y_ptr, borders_ptr, final_ptr, x_stride, z_stride, dt_stride, channels, lane,
    N: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr,
    GATE: tl.constexpr, SKIP: tl.constexpr, HAS_START: tl.constexpr, KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of a segment, the states before its chunks, and the one after a sequence."""
    segment, t = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    here = d < channels
    begin, end, sequence, opens, closes = _segment(segment, segments_ptr)
    skip = tl.load(d_ptr + d, here, 0.0) if SKIP else tl.zeros([BLOCK_D], tl.float32)
    for n in range(N):
        a = tl.load(a_ptr + n * channels + d, here, 0.0) * LOG2E
        h = _start(
            n, segment, sequence, opens, a, ends_ptr, total_ptr, start_ptr, segments_ptr, d, here,
            channels, N, HAS_START, False,
        )  # fmt: skip
        border = begin if KEEP else segment
        if begin < end:
            tl.store(borders_ptr + (border * N + n) * channels + d, h, here)
        elif closes != 0:
            tl.store(final_ptr + (sequence * N + n) * channels + d, h, here)
    for chunk in range(begin, end):
        first, row, at, real = _places(chunk, table_ptr, t, d, channels, lane)
        dt = tl.load(dt_ptr + first * dt_stride + (row * dt_stride + at)).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + (row * x_stride + at)).to(tl.float32)
        if GATE:
            z = tl.load(z_ptr + first * z_stride + (row * z_stride + at))
        dt = steps(dt, real, SOFTPLUS)
        y = skip[None, :] * x
        x *= dt
        tl.debug_barrier()  # what other threads have stored in the round before
        before = (chunk if KEEP else segment) * N
        # The state behind a segment is that before its successor, which makes it for itself.
        out_ptr = borders_ptr + ((chunk + 1) if KEEP else segment) * N * channels
        kept = here
        if chunk + 1 == end:
            out_ptr = final_ptr + sequence * N * channels
            if closes == 0:
                kept = d < 0
        for n in tl.range(0, N, num_stages=STAGES):
            a = tl.load(a_ptr + n * channels + d, here, 0.0) * LOG2E
            h = tl.load(borders_ptr + (before + n) * channels + d, here, 0.0)
            own = maps_ptr + (chunk * N + n) * 2 * T + t
            b, c = tl.load(own), tl.load(own + T)
            decay = tl.exp2(dt * a[None, :])
            u = x * b[:, None]
            states, h = _run(decay, u, h, t, T)
            y += states * c[:, None]
            tl.store(out_ptr + n * channels + d, h, kept)
        if GATE:
            y *= silu(z.to(tl.float32))
        tl.store(y_ptr + first * channels + (row * channels + at), y, real)


@triton.jit(do_not_specialize=["lane"])
def backward_kernel(
    x_ptr, z_ptr, dt_ptr, a_ptr, d_ptr, maps_ptr, table_ptr, segments_ptr, ends_ptr, total_ptr,
    dy_ptr, d_final_ptr, borders_ptr, dx_ptr, dz_ptr, d_dt_ptr, d_a_ptr, d_d_ptr, d_maps_ptr,
    d_h_ptr, d_start_ptr, x_stride, z_stride, dt_stride, channels, count, lane,
    N: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, GATE: tl.constexpr, SKIP: tl.constexpr, HAS_START: tl.constexpr,
    HAS_FINAL: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of a segment, from its last chunk to its first.

    d_h (segments, N, D) carries the states' gradient from a chunk to the one before it, d_a and d_d
    sum over the segment, d_maps (D blocks, chunks, 2, T, BLOCK_N) over the channels of a program.
    """
    segment, t = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    here = d < channels
    columns = tl.arange(0, BLOCK_N)
    begin, end, sequence, opens, closes = _segment(segment, segments_ptr)
    skip = tl.load(d_ptr + d, here, 0.0) if SKIP else tl.zeros([BLOCK_D], tl.float32)
    for n in range(N):
        a = tl.load(a_ptr + n * channels + d, here, 0.0) * LOG2E
        g = _start(
            n, segment, sequence, closes, a, ends_ptr, total_ptr, d_final_ptr, segments_ptr, d,
            here, channels, N, HAS_FINAL, True,
        )  # fmt: skip
        place = (segment * N + n) * channels + d
        tl.store(d_h_ptr + place, g, here)
        tl.store(d_a_ptr + place, tl.zeros([BLOCK_D], tl.float32), here)
    d_skip = tl.zeros([BLOCK_D], tl.float32)
    ones = tl.full([BLOCK_D, BLOCK_N], 1.0, tl.bfloat16)
    for i in range(end - begin):
        chunk = end - 1 - i
        first, row, at, real = _places(chunk, table_ptr, t, d, channels, lane)
        dt = tl.load(dt_ptr + first * dt_stride + (row * dt_stride + at)).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + (row * x_stride + at)).to(tl.float32)
        dy = tl.load(dy_ptr + first * channels + (row * channels + at)).to(tl.float32)
        dt = steps(dt, real, SOFTPLUS)
        if GATE:
            z = tl.load(z_ptr + first * z_stride + (row * z_stride + at)).to(tl.float32)
            dy *= silu(z)
        values = x * dt
        y = skip[None, :] * x
        d_values = tl.zeros([T, BLOCK_D], tl.float32)
        d_dt = tl.zeros([T, BLOCK_D], tl.float32)
        d_maps = tl.zeros([2 * T, BLOCK_N], tl.float32)
        tl.debug_barrier()  # what other threads have stored in the round before
        for n in tl.range(0, N, num_stages=STAGES):
            place = (segment * N + n) * channels + d
            a = tl.load(a_ptr + n * channels + d, here, 0.0)
            h = tl.load(borders_ptr + (chunk * N + n) * channels + d, here, 0.0)
            after = tl.load(d_h_ptr + place, here, 0.0)
            d_a = tl.load(d_a_ptr + place, here, 0.0)
            own = maps_ptr + (chunk * N + n) * 2 * T + t
            b, c = tl.load(own), tl.load(own + T)
            decay = tl.exp2(dt * (a * LOG2E)[None, :])
            u = values * b[:, None]
            states, _ = _run(decay, u, h, t, T)
            y += states * c[:, None]
            g, after = _run_back(decay, dy * c[:, None], after, t, T)
            tl.store(d_h_ptr + place, after, here)
            d_values += g * b[:, None]
            of_b, of_c = g * values, states * dy
            q = g * (states - u)
            d_dt += q * a[None, :]
            tl.store(d_a_ptr + place, d_a + tl.sum(q * dt, 0), here)
            both = tl.permute(tl.join(of_b, of_c), (2, 0, 1)).reshape(2 * T, BLOCK_D)
            if DOT:  # by tensor cores, with a matrix of ones
                sums = tl.dot(both.to(tl.bfloat16), ones)
            else:
                sums = tl.sum(both, 1)[:, None]
            d_maps = tl.where((columns == n)[None, :], sums, d_maps)
        to = (tl.program_id(1) * count + chunk) * 2 * T + tl.arange(0, 2 * T)
        tl.store(d_maps_ptr + to[:, None] * BLOCK_N + columns[None, :], d_maps)
        x = tl.load(x_ptr + first * x_stride + (row * x_stride + at)).to(tl.float32)
        d_skip += tl.sum(tl.where(real, dy * x, 0.0), 0)
        tl.store(
            dx_ptr + first * channels + (row * channels + at),
            d_values * dt + dy * skip[None, :],
            real,
        )
        d_dt += d_values * x
        if SOFTPLUS:
            stored = tl.load(dt_ptr + first * dt_stride + (row * dt_stride + at)).to(tl.float32)
            d_dt /= 1.0 + tl.exp2(-stored * LOG2E)
        tl.store(d_dt_ptr + first * channels + (row * channels + at), d_dt, real)
        if GATE:
            dy = tl.load(dy_ptr + first * channels + (row * channels + at)).to(tl.float32)
            z = tl.load(z_ptr + first * z_stride + (row * z_stride + at)).to(tl.float32)
            open = 1.0 / (1.0 + tl.exp2(-z * LOG2E))
            dz = dy * y * open * (1.0 + z * (1.0 - open))
            tl.store(dz_ptr + first * channels + (row * channels + at), dz, real)
    tl.store(d_d_ptr + segment * channels + d, d_skip, here)
    if HAS_START:  # noqa: SIM102 (known at compile time)
        if opens != 0:
            tl.debug_barrier()
            for n in range(N):
                g = tl.load(d_h_ptr + (segment * N + n) * channels + d, here, 0.0)
                tl.store(d_start_ptr + (sequence * N + n) * channels + d, g, here)


@triton.jit
def map_gradients_kernel(
    d_maps_ptr, table_ptr, d_b_ptr, d_c_ptr, blocks, count,
    N: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of b (program 0 of the second axis) or c over all blocks of channels."""
    chunk, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, n = tl.arange(0, T), tl.arange(0, BLOCK_N)
    place = d_maps_ptr + ((chunk * 2 + which) * T + t)[:, None] * BLOCK_N + n[None, :]
    total = tl.zeros([T, BLOCK_N], tl.float32)
    for _ in range(blocks):
        total += tl.load(place)
        place += tl.cast(count, tl.int64) * 2 * T * BLOCK_N
    row = tl.load(table_ptr + chunk * 6) + t
    real = (row < tl.load(table_ptr + chunk * 6 + 1))[:, None] & (n < N)[None, :]
    to = row[:, None] * N + n[None, :]
    if which == 0:
        tl.store(d_b_ptr + to, total, real)
    else:
        tl.store(d_c_ptr + to, total, real)
