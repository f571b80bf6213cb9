"""Kernels of `mamba3.ops.steering.steering`, whose formulas they compute in float32.

A program takes tiles of tokens, and of every tile the four parts of its rows. Derivatives are of
what the outputs are made from: softplus' = sigmoid, tanh' = 1 - tanh^2, f' = 1 or f^2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gate import sigmoid
from .launch import OPTIONS, on_device, stride_unit, token_stride

# Tokens of a tile, and programs of the backward pass, each with a row of partial sums.
TOKENS = 16
PROGRAMS = 528
PI = tl.constexpr(math.pi)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact as float32 is where it is small."""
    small = tl.exp(tl.minimum(x, -x))
    above = 1 + small
    rounded = above - 1
    # The logarithm of a rounded sum, corrected by what was rounded off.
    log = tl.where(rounded == 0, small, tl.log(above) * small / tl.where(rounded == 0, 1, rounded))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _decay(raw, HEAVY: tl.constexpr):
    """f(raw) and its derivative."""
    if HEAVY:
        f = tl.where(raw > 0, 1 + raw, 1 / (1 - tl.minimum(raw, 0.0)))
        return f, tl.where(raw > 0, 1.0, f * f)
    return softplus(raw), sigmoid(raw)


@triton.jit
def _tanh(x):
    return 2 * sigmoid(2 * x) - 1


@triton.jit
def _columns(tile, tokens, H: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr,
             BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """A tile's tokens (BLOCK_T, 1), heads and angles, and which of both exist."""
    token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    head, angle = tl.arange(0, BLOCK_H)[None, :], tl.arange(0, BLOCK_S)[None, :]
    real = token < tokens
    return token, head, angle, real & (head < H), real & (angle < S)


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    raw_ptr, bias_ptr, dt_ptr, a_ptr, lam_ptr, rate_ptr, tokens, stride, floor,
    H: tl.constexpr, S: tl.constexpr, UNIT: tl.constexpr, HEAVY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    token, head, angle, own, turns = _columns(
        tl.program_id(0), tokens, H, S, BLOCK_T, BLOCK_H, BLOCK_S
    )
    at = raw_ptr + token * stride * UNIT
    dd_dt = tl.load(at + head, own, 0.0).to(tl.float32)
    dd_a = tl.load(at + H + head, own, 0.0).to(tl.float32)
    trap = tl.load(at + 2 * H + head, own, 0.0).to(tl.float32)
    rate = tl.load(at + 3 * H + angle, turns, 0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head, head < H, 0.0)
    decay, _ = _decay(dd_a, HEAVY)
    out = token * H + head
    tl.store(dt_ptr + out, softplus(dd_dt + bias), own)
    tl.store(a_ptr + out, -tl.maximum(decay, floor), own)
    tl.store(lam_ptr + out, sigmoid(trap), own)
    tl.store(rate_ptr + token * S + angle, _tanh(rate) * PI, turns)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    raw_ptr, bias_ptr, d_dt_ptr, d_a_ptr, d_lam_ptr, d_rate_ptr, d_raw_ptr, partial_ptr,
    tokens, stride, floor,
    H: tl.constexpr, S: tl.constexpr, UNIT: tl.constexpr, HEAVY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    d_bias = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for tile in range(program, tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        token, head, angle, own, turns = _columns(tile, tokens, H, S, BLOCK_T, BLOCK_H, BLOCK_S)
        at, d_at = raw_ptr + token * stride * UNIT, d_raw_ptr + token * (3 * H + S)
        out = token * H + head

        dd_dt = tl.load(at + head, own, 0.0).to(tl.float32)
        bias = tl.load(bias_ptr + head, head < H, 0.0)
        d_dt = tl.load(d_dt_ptr + out, own, 0.0) * sigmoid(dd_dt + bias)
        tl.store(d_at + head, d_dt, own)
        d_bias += d_dt

        decay, slope = _decay(tl.load(at + H + head, own, 0.0).to(tl.float32), HEAVY)
        d_a = tl.load(d_a_ptr + out, own, 0.0)
        tl.store(d_at + H + head, tl.where(decay >= floor, -d_a * slope, 0.0), own)

        lam = sigmoid(tl.load(at + 2 * H + head, own, 0.0).to(tl.float32))
        d_lam = tl.load(d_lam_ptr + out, own, 0.0)
        tl.store(d_at + 2 * H + head, d_lam * lam * (1 - lam), own)

        turn = _tanh(tl.load(at + 3 * H + angle, turns, 0.0).to(tl.float32))
        d_rate = tl.load(d_rate_ptr + token * S + angle, turns, 0.0)
        tl.store(d_at + 3 * H + angle, d_rate * PI * (1 - turn * turn), turns)
    head = tl.arange(0, BLOCK_H)
    tl.store(partial_ptr + program * H + head, tl.sum(d_bias, 0), head < H)


def steering_forward(raw, dt_bias, heavy: bool, floor: float) -> tuple[Tensor, ...]:
    """dt, a, lam and rate; raw (..., 3 H + S) as `token_rows` has it."""
    heads, leading = len(dt_bias), raw.shape[:-1]
    widths = (heads,) * 3 + (raw.shape[-1] - 3 * heads,)
    outputs = [torch.empty(*leading, n, dtype=torch.float32, device=raw.device) for n in widths]
    tokens, stride, constants = _sizes(raw, dt_bias, heavy)
    with on_device(raw):
        _forward_kernel[(triton.cdiv(tokens, TOKENS),)](
            raw, dt_bias, *outputs, tokens, stride, floor, **constants
        )
    return tuple(outputs)


def steering_backward(grads, raw, dt_bias, heavy: bool, floor: float) -> tuple[Tensor, Tensor]:
    """Gradients of raw and dt_bias, from those of dt, a, lam and rate, contiguous."""
    tokens, stride, constants = _sizes(raw, dt_bias, heavy)
    programs = min(triton.cdiv(tokens, TOKENS), PROGRAMS)
    d_raw = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    partial = torch.empty(programs, len(dt_bias), dtype=torch.float32, device=raw.device)
    with on_device(raw):
        _backward_kernel[(programs,)](
            raw, dt_bias, *grads, d_raw, partial, tokens, stride, floor, **constants
        )
    return d_raw, partial.sum(0).to(dt_bias.dtype)


def _sizes(raw: Tensor, dt_bias: Tensor, heavy: bool) -> tuple[int, int, dict]:
    """Tokens, their distance in units, and the kernels' compile-time arguments."""
    heads = len(dt_bias)
    angles = raw.shape[-1] - 3 * heads
    stride = token_stride(raw.shape, raw.stride(), 1)
    unit = stride_unit(stride)
    return raw.numel() // raw.shape[-1], stride // unit, {
        "H": heads, "S": angles, "UNIT": unit, "HEAVY": heavy, "BLOCK_T": TOKENS,
        "BLOCK_H": triton.next_power_of_2(heads),
        "BLOCK_S": triton.next_power_of_2(max(1, angles)),
        "num_warps": 4, **OPTIONS,
    }  # fmt: skip
