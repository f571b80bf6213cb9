"""Kernel of `mamba3.ops.mamba3_step`: one token for every head, read once and written once.

A program keeps the state of one head of one sequence in registers:

    k_r = rotate(B_r + B_bias_r),  q_r = rotate(C_r + C_bias_r),  v_r = x * mimo_x_r
    h   = alpha h + sum_r (beta v_prev_r k_prev_r^T + gamma v_r k_r^T)
    out = sum_r norm(h q_r + D v_r) * silu(z * mimo_z_r) * mimo_o_r

Source: arXiv 2603.15569; symbols as in `mamba3.ops.reference`. Decoding is bound by reading and
writing h; everything else together is a few percent of its bytes. Loads can only overlap where no
branch or store stands between them, so there are no branches, and stores come last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..autograd import written
from ..state import Mamba3State
from .chunk import wrap
from .launch import OPTIONS, on_device, token_rows

# Elements of h that a warp keeps in registers.
WARP_ELEMENTS = 4096
# Neighbouring threads hold a span of a row of h, and the same threads its other spans: a sum over N
# is then mostly additions within a thread, not shuffles.
SPAN_BYTES = 128


@triton.jit
def _cos_sin(x):
    """cos and sin in [-pi, pi], to 6e-7; the library's have a branch, for large arguments."""
    u = x * x
    cos = -9.72224543e-12 * u + 2.06035148e-09
    cos = cos * u - 2.75347936e-07
    cos = cos * u + 2.48005532e-05
    cos = cos * u - 0.00138888630
    cos = cos * u + 0.0416666635
    cos = cos * u - 0.5
    sin = 1.36126469e-10 * u - 2.47286890e-08
    sin = sin * u + 2.75358376e-06
    sin = sin * u - 0.000198405335
    sin = sin * u + 0.00833332128
    sin = sin * u - 0.166666659
    return cos * u + 1.0, (sin * u + 1.0) * x


@triton.jit
def _rotated(maps, bias, lane, partner, here, cos, sin):
    """One stream's map plus bias, rotated; `sin` carries each lane's sign."""
    own = tl.load(maps + lane, here, 0.0).to(tl.float32) + tl.load(bias + lane, here, 0.0)
    other = tl.load(maps + partner, here, 0.0).to(tl.float32)
    other += tl.load(bias + partner, here, 0.0)
    return own * cos + other * sin


@triton.jit(do_not_specialize=["slots"])
def _step_kernel(
    x_ptr, z_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, lam_ptr, rate_ptr, b_bias_ptr, c_bias_ptr, d_ptr,
    mimo_x_ptr, mimo_z_ptr, mimo_o_ptr, norm_ptr, slot_ptr, h_ptr, phase_ptr, k_ptr, x_prev_ptr,
    y_ptr, h_out_ptr, phase_out_ptr, k_out_ptr, x_out_ptr,
    x_stride, z_stride, b_stride, c_stride, dt_stride, a_stride, lam_stride, rate_stride,
    slots, heads, per_group, norm_eps,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, MIMO: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    group = head // per_group
    p = tl.arange(0, BLOCK_P)
    in_p = p < P
    slot = row
    if SLOTS:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        if (slot < 0) | (slot >= slots):
            tl.store(y_ptr + program * P + p, tl.zeros([BLOCK_P], tl.float32), in_p)
            return
    place = slot * heads + head  # of this head in the state

    # h is (spans, P, SPAN). Loaded as a matrix with the spans on end, it is laid out as SPAN_BYTES
    # says by every compiler.
    SPANS: tl.constexpr = BLOCK_N // SPAN
    lane = tl.arange(0, SPANS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    in_n = lane < N
    line = tl.arange(0, SPANS * BLOCK_P)[:, None]
    n = line // BLOCK_P * SPAN + tl.arange(0, SPAN)[None, :]
    tile = place * P * N + line % BLOCK_P * N + n
    in_tile = (line % BLOCK_P < P) & (n < N)
    # Nothing of h is read twice: it must not push out of the cache what all programs share.
    h = tl.load(h_ptr + tile, in_tile, 0.0, eviction_policy="evict_first")
    h = tl.reshape(h, [SPANS, BLOCK_P, SPAN])

    dt = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32)
    lam = tl.load(lam_ptr + row * lam_stride + head).to(tl.float32)
    alpha = tl.exp(dt * tl.load(a_ptr + row * a_stride + head).to(tl.float32))
    gamma = lam * dt
    beta = (dt - gamma) * alpha
    d = tl.load(d_ptr + head)
    x = tl.load(x_ptr + row * x_stride + head * P + p, in_p, 0.0).to(tl.float32)
    x_prev = tl.load(x_prev_ptr + place * P + p, in_p, 0.0).to(tl.float32)
    if GATE:
        z = tl.load(z_ptr + row * z_stride + head * P + p, in_p, 0.0).to(tl.float32)

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
    phase = tl.load(phase_ptr + place * S + pair, turns, 0.0)
    rate = tl.load(rate_ptr + row * rate_stride + pair, turns, 0.0).to(tl.float32)
    phase = wrap(phase + rate * dt)
    cos, sin = _cos_sin(phase)
    sin = tl.where(first, -sin, sin)

    h = alpha * h.to(tl.float32)
    for r in tl.static_range(R):
        maps, bias = b_ptr + row * b_stride + (r * G + group) * N, b_bias_ptr + (head * R + r) * N
        k = _rotated(maps, bias, lane, partner, in_n, cos, sin)
        k_prev = tl.load(k_ptr + ((slot * R + r) * heads + head) * N + lane, in_n, 0.0)
        v, v_prev = gamma * x, beta * x_prev
        if MIMO:
            weight = tl.load(mimo_x_ptr + (head * R + r) * P + p, in_p, 0.0)
            v, v_prev = v * weight, v_prev * weight
        h += v[None, :, None] * k[:, None, :]
        h += v_prev[None, :, None] * k_prev.to(tl.float32)[:, None, :]

    out = tl.zeros([BLOCK_P], tl.float32)
    for r in tl.static_range(R):
        maps, bias = c_ptr + row * c_stride + (r * G + group) * N, c_bias_ptr + (head * R + r) * N
        q = _rotated(maps, bias, lane, partner, in_n, cos, sin)
        stream = (head * R + r) * P + p
        skip = d * x
        if MIMO:
            skip *= tl.load(mimo_x_ptr + stream, in_p, 0.0)
        y = tl.sum(tl.sum(h * q[:, None, :], 0), 1) + skip
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

    # The state may be written where it was read, and a thread also reads what others write.
    tl.debug_barrier()
    h = tl.reshape(h, [SPANS * BLOCK_P, SPAN])
    tl.store(h_out_ptr + tile, h, in_tile, eviction_policy="evict_first")
    tl.store(phase_out_ptr + place * S + pair, phase, turns & first)
    tl.store(x_out_ptr + place * P + p, x, in_p)
    for r in tl.static_range(R):
        maps, bias = b_ptr + row * b_stride + (r * G + group) * N, b_bias_ptr + (head * R + r) * N
        k = _rotated(maps, bias, lane, partner, in_n, cos, sin)
        tl.store(k_out_ptr + ((slot * R + r) * heads + head) * N + lane, k, in_n)
    tl.store(y_ptr + program * P + p, out, in_p)


def step(
    x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight, norm_eps, state, inplace,
    state_indices,
) -> tuple[Tensor, Mamba3State]:  # fmt: skip
    """Launch the kernel; arguments as in `mamba3.ops.mamba3_step`, gradients are not recorded."""
    batch, heads, headdim = x.shape
    rank, groups, d_state = b.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    before = Mamba3State(*(t.contiguous() for t in state))
    after = before if inplace else Mamba3State(*(torch.empty_like(t) for t in before))
    # What varies by row may be a view of a wider projection; the rest of a row is dense.
    tensors = (x, x if z is None else z, b, c, dt, a, lam, rate)
    rows = [token_rows(t, t.dim() - 1) for t in tensors]
    weights = [t.contiguous().float() for t in (b_bias, c_bias, d)]
    streams = [t.contiguous().float() for t in mimo] if mimo else [d] * 3
    block_p, block_n = (triton.next_power_of_2(n) for n in (headdim, d_state))
    with on_device(x):
        _step_kernel[(batch * heads,)](
            *rows,
            *weights,
            *streams,
            d if norm_weight is None else norm_weight.contiguous().float(),
            d if state_indices is None else state_indices.contiguous(),
            *before,
            y,
            *after,
            *(t.stride(0) for t in rows),
            len(before.h),
            heads,
            heads // groups,
            norm_eps,
            R=rank,
            G=groups,
            P=headdim,
            N=d_state,
            S=rate.shape[-1],
            BLOCK_P=block_p,
            BLOCK_N=block_n,
            SPAN=min(block_n, SPAN_BYTES // before.h.element_size()),
            MIMO=mimo is not None,
            GATE=z is not None,
            NORM=norm_weight is not None,
            SLOTS=state_indices is not None,
            num_warps=min(16, max(1, block_p * block_n // WARP_ELEMENTS)),
            **OPTIONS,
        )
    if not inplace:
        return y, after
    for own, dense in zip(state, after, strict=True):
        written(own, dense)
    return y, state
