"""Kernel of `mamba3.ops.mamba3_step`: one token for every head, read once and written once.

A program keeps the state of one head of one sequence, or of some of its P channels, in registers:

    k_r = rotate(B_r + B_bias_r),  q_r = rotate(C_r + C_bias_r),  v_r = x * mimo_x_r
    h   = alpha h + sum_r (beta v_prev_r k_prev_r^T + gamma v_r k_r^T)
    out = sum_r norm(h q_r + D v_r) * silu(z * mimo_z_r) * mimo_o_r

Source: arXiv 2603.15569; symbols as in `mamba3.ops.reference`. Decoding is bound by reading and
writing h; everything else together is a few percent of its bytes.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import TAU_HIGH, TAU_LOW
from ..state import Mamba3State

# Elements of h that a program, and a warp of it, keep in registers.
PROGRAM_ELEMENTS = 4096
WARP_ELEMENTS = 4096

_TAU_HIGH = tl.constexpr(TAU_HIGH)
_TAU_LOW = tl.constexpr(TAU_LOW)
_TURN = tl.constexpr(1 / (TAU_HIGH + TAU_LOW))


@triton.jit
def _advance(phase, rate, dt):
    """phase + rate * dt, reduced to [-pi, pi] without losing precision."""
    phase += rate * dt
    turns = tl.floor(phase * _TURN + 0.5)
    return phase - turns * _TAU_HIGH - turns * _TAU_LOW


@triton.jit
def _rotated(maps, bias, lane, partner, here, cos, sin):
    """One stream's map plus bias, rotated; `sin` carries each lane's sign."""
    own = tl.load(maps + lane, here, 0.0).to(tl.float32) + tl.load(bias + lane, here, 0.0)
    other = tl.load(maps + partner, here, 0.0).to(tl.float32)
    other += tl.load(bias + partner, here, 0.0)
    return own * cos + other * sin


@triton.jit
def _step_kernel(
    x_ptr, z_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, lam_ptr, rate_ptr, b_bias_ptr, c_bias_ptr, d_ptr,
    mimo_x_ptr, mimo_z_ptr, mimo_o_ptr, norm_ptr, h_ptr, phase_ptr, k_ptr, x_prev_ptr,
    y_ptr, h_out_ptr, phase_out_ptr, k_out_ptr, x_out_ptr,
    x_stride, z_stride, b_stride, c_stride, dt_stride, a_stride, lam_stride, rate_stride,
    heads, per_group, norm_eps,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    MIMO: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    program, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = program // heads, program % heads
    group = head // per_group
    p, lane = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, lane < N

    # Asked for first: all that does not need it is computed while it is on its way.
    tile = program * P * N + p[:, None] * N + lane[None, :]
    in_tile = in_p[:, None] & in_n[None, :]
    h = tl.load(h_ptr + tile, in_tile, 0.0)

    dt = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32)
    lam = tl.load(lam_ptr + row * lam_stride + head).to(tl.float32)
    alpha = tl.exp(dt * tl.load(a_ptr + row * a_stride + head).to(tl.float32))
    gamma = lam * dt
    beta = (dt - gamma) * alpha

    # Every lane finds its pair's other channel by address, so no data moves between lanes.
    if MIMO:
        first = lane < N // 2
        pair = tl.where(first, lane, lane - N // 2)
        partner = tl.where(first, lane + N // 2, lane - N // 2)
    else:
        first = lane % 2 == 0
        pair = lane // 2
        partner = tl.where(first, lane + 1, lane - 1)
    turns = in_n & (pair < S)
    phase = tl.load(phase_ptr + program * S + pair, turns, 0.0)
    rate = tl.load(rate_ptr + row * rate_stride + pair, turns, 0.0).to(tl.float32)
    phase = _advance(phase, rate, dt)
    cos = tl.cos(phase)
    sin = tl.where(first, -tl.sin(phase), tl.sin(phase))
    s = tl.arange(0, BLOCK_S)
    rate = tl.load(rate_ptr + row * rate_stride + s, s < S, 0.0).to(tl.float32)
    phase = _advance(tl.load(phase_ptr + program * S + s, s < S, 0.0), rate, dt)
    tl.store(phase_out_ptr + program * S + s, phase, s < tl.where(part == 0, S, 0))

    x = tl.load(x_ptr + row * x_stride + head * P + p, in_p, 0.0).to(tl.float32)
    x_prev = tl.load(x_prev_ptr + program * P + p, in_p, 0.0).to(tl.float32)
    tl.store(x_out_ptr + program * P + p, x, in_p)

    h = alpha * h.to(tl.float32)
    for r in tl.static_range(R):
        maps, bias = b_ptr + row * b_stride + (r * G + group) * N, b_bias_ptr + (head * R + r) * N
        k = _rotated(maps, bias, lane, partner, in_n, cos, sin)
        place = ((row * R + r) * heads + head) * N + lane
        k_prev = tl.load(k_ptr + place, in_n, 0.0).to(tl.float32)
        tl.store(k_out_ptr + place, k, lane < tl.where(part == 0, N, 0))
        v, v_prev = gamma * x, beta * x_prev
        if MIMO:
            weight = tl.load(mimo_x_ptr + (head * R + r) * P + p, in_p, 0.0)
            v, v_prev = v * weight, v_prev * weight
        h += v[:, None] * k[None, :] + v_prev[:, None] * k_prev[None, :]
    tl.store(h_out_ptr + tile, h, in_tile)

    d = tl.load(d_ptr + head)
    if GATE:
        z = tl.load(z_ptr + row * z_stride + head * P + p, in_p, 0.0).to(tl.float32)
    out = tl.zeros([BLOCK_P], tl.float32)
    for r in tl.static_range(R):
        maps, bias = c_ptr + row * c_stride + (r * G + group) * N, c_bias_ptr + (head * R + r) * N
        q = _rotated(maps, bias, lane, partner, in_n, cos, sin)
        stream = (head * R + r) * P + p
        skip = d * x
        if MIMO:
            skip *= tl.load(mimo_x_ptr + stream, in_p, 0.0)
        y = tl.sum(h * q[None, :], 1) + skip
        if NORM:
            y *= tl.rsqrt(tl.sum(y * y, 0) / P + norm_eps)
            y *= tl.load(norm_ptr + head * P + p, in_p, 0.0)
        if GATE:
            gate = z
            if MIMO:
                gate *= tl.load(mimo_z_ptr + stream, in_p, 0.0)
            y *= gate / (1 + tl.exp(-gate))
        if MIMO:
            y *= tl.load(mimo_o_ptr + stream, in_p, 0.0)
        out += y
    tl.store(y_ptr + program * P + p, out, in_p)


def step(
    x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight, norm_eps, state
) -> tuple[Tensor, Mamba3State]:
    """Launch the kernel; arguments as in `mamba3.ops.mamba3_step`, gradients are not recorded."""
    batch, heads, headdim = x.shape
    rank, groups, d_state = b.shape[1:]
    angles = rate.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = Mamba3State(*(t.contiguous() for t in state))
    new = Mamba3State(*(torch.empty_like(t) for t in state))
    # What varies by row may be a view of a wider projection; the rest of a row is dense.
    rows = [_dense_rows(t) for t in (x, x if z is None else z, b, c, dt, a, lam, rate)]
    weights = [t.contiguous().float() for t in (b_bias, c_bias, d)]
    streams = [t.contiguous().float() for t in mimo] if mimo else [d] * 3
    block_p, block_n = (triton.next_power_of_2(n) for n in (headdim, d_state))
    if norm_weight is None:  # the norm needs all of a head's channels in one program
        block_p = min(block_p, max(1, PROGRAM_ELEMENTS // block_n))
    on_device = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
    with on_device:
        _step_kernel[(batch * heads, triton.cdiv(headdim, block_p))](
            *rows,
            *weights,
            *streams,
            d if norm_weight is None else norm_weight.contiguous().float(),
            *state,
            y,
            *new,
            *(t.stride(0) for t in rows),
            heads,
            heads // groups,
            norm_eps,
            R=rank,
            G=groups,
            P=headdim,
            N=d_state,
            S=angles,
            BLOCK_P=block_p,
            BLOCK_N=block_n,
            BLOCK_S=triton.next_power_of_2(max(angles, 1)),
            MIMO=mimo is not None,
            GATE=z is not None,
            NORM=norm_weight is not None,
            num_warps=min(16, max(1, block_p * block_n // WARP_ELEMENTS)),
        )
    return y, new


def _dense_rows(t: Tensor) -> Tensor:
    """The tensor itself if everything behind its first dimension is dense, else a copy."""
    return t if t[0].is_contiguous() else t.contiguous()
