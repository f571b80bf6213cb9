"""Kernels of `mamba3.ops.gate.gate_and_mix`: y is read once and the gated, mixed output written.

A program takes tiles of tokens of one head, all of its R streams at once:

    u_r = y_r / sqrt(mean(y_r^2) + eps) * norm,  g_r = z * mimo_z_r
    out = sum_r u_r * silu(g_r) * mimo_o_r

    d mimo_o_r = sum_t d_out u_r silu(g_r),      d u_r = d_out mimo_o_r silu(g_r)
    d g_r = d_out mimo_o_r u_r silu'(g_r),       d z = sum_r d g_r mimo_z_r

Source: arXiv 2603.15569, output of the layer; the last two steps are `mamba3.ops.reference`'s.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher, facts, on_device, stride_unit, token_stride

# Elements (tokens x P) of a tile and its warps; the kernel that sums over tokens takes the second
# pair, as its sums then stay within a warp.
TILE = 2048, 4
SUMMING_TILE = 256, 1
# Rows of partial sums of the weights' gradients, and so the programs that walk over all tiles.
PARTIAL_ROWS = 2112


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), its exponent clamped where exp would overflow."""
    return 1 / (1 + tl.exp(tl.minimum(-x, 80.0)))


@triton.jit
def _offsets(tile, head, heads, tokens, z_stride, R: tl.constexpr, P: tl.constexpr,
             Z_UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """Offsets (BLOCK_T, BLOCK_P) of a tile's y_0, z and out, and their mask."""
    t = (tile * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64))[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    row = t * heads + head
    z = t * z_stride * Z_UNIT + head * P + p
    return row * (R * P) + p, z, row * P + p, (t < tokens) & (p < P)


@triton.jit
def _weight(pointer, row, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """A row (1, BLOCK_P) of weights (..., P)."""
    p = tl.arange(0, BLOCK_P)[None, :]
    return tl.load(pointer + row * P + p, p < P, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    y_ptr, z_ptr, mimo_z_ptr, mimo_o_ptr, norm_ptr, out_ptr,
    tokens, heads, z_stride, norm_eps,
    R: tl.constexpr, P: tl.constexpr, Z_UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    GATE: tl.constexpr, GATE_STREAMS: tl.constexpr, MIX: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs take neighbouring heads, which lie side by side in memory.
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    y_at, z_at, out_at, here = _offsets(
        tile, head, heads, tokens, z_stride, R, P, Z_UNIT, BLOCK_T, BLOCK_P
    )
    if GATE:
        z = tl.load(z_ptr + z_at, here, 0.0).to(tl.float32)
    out = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    for r in tl.static_range(R):
        y = tl.load(y_ptr + y_at + r * P, here, 0.0).to(tl.float32)
        if NORM:
            y *= tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / P + norm_eps)
            y *= _weight(norm_ptr, head, P, BLOCK_P)
        if GATE:
            gate = z
            if GATE_STREAMS:
                gate = z * _weight(mimo_z_ptr, head * R + r, P, BLOCK_P)
            y *= gate * sigmoid(gate)
        if MIX:
            y *= _weight(mimo_o_ptr, head * R + r, P, BLOCK_P)
        out += y
    tl.store(out_ptr + out_at, out, here)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad_ptr, y_ptr, z_ptr, mimo_z_ptr, mimo_o_ptr, norm_ptr, grad_y_ptr, grad_z_ptr, partial_ptr,
    tokens, heads, z_stride, norm_eps,
    R: tl.constexpr, P: tl.constexpr, Z_UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    GATE: tl.constexpr, GATE_STREAMS: tl.constexpr, MIX: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    parts = tl.num_programs(0) // heads
    streams = tl.arange(0, BLOCK_R)[:, None]
    if GATE_STREAMS:
        grad_mimo_z = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
    if MIX:
        grad_mimo_o = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
    if NORM:
        norm = _weight(norm_ptr, head, P, BLOCK_P)
        grad_norm = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)

    for tile in range(part, tl.cdiv(tokens, BLOCK_T), parts):
        y_at, z_at, out_at, here = _offsets(
            tile, head, heads, tokens, z_stride, R, P, Z_UNIT, BLOCK_T, BLOCK_P
        )
        grad = tl.load(grad_ptr + out_at, here, 0.0).to(tl.float32)
        if GATE:
            z = tl.load(z_ptr + z_at, here, 0.0).to(tl.float32)
            grad_z = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
        for r in tl.static_range(R):
            y = tl.load(y_ptr + y_at + r * P, here, 0.0).to(tl.float32)
            if NORM:
                rstd = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / P + norm_eps)
                normed = y * rstd
                y = normed * norm
            grad_y = grad
            if MIX:
                grad_y *= _weight(mimo_o_ptr, head * R + r, P, BLOCK_P)
            if GATE:
                gate = z
                if GATE_STREAMS:
                    mimo_z = _weight(mimo_z_ptr, head * R + r, P, BLOCK_P)
                    gate *= mimo_z
                share = sigmoid(gate)
                silu = gate * share
                grad_gate = grad_y * y * (share + silu * (1 - share))
                grad_y *= silu
                y *= silu
                if GATE_STREAMS:
                    row = tl.sum(grad_gate * z, 0, keep_dims=True)
                    grad_mimo_z += tl.where(streams == r, row, 0.0)
                    grad_gate *= mimo_z
                grad_z += grad_gate
            if MIX:
                row = tl.sum(grad * y, 0, keep_dims=True)
                grad_mimo_o += tl.where(streams == r, row, 0.0)
            if NORM:
                grad_norm += grad_y * normed
                grad_y *= norm
                along = tl.sum(grad_y * normed, 1, keep_dims=True) / P
                grad_y = (grad_y - normed * along) * rstd
            tl.store(grad_y_ptr + y_at + r * P, grad_y, here)
        if GATE:
            tl.store(grad_z_ptr + out_at, grad_z, here)

    p = tl.arange(0, BLOCK_P)[None, :]
    row = partial_ptr + tl.program_id(0).to(tl.int64) * (R * P) + streams * P + p
    step = tl.num_programs(0).to(tl.int64) * (R * P)
    here = (streams < R) & (p < P)
    if MIX:
        tl.store(row, grad_mimo_o, here)
        row += step
    if GATE_STREAMS:
        tl.store(row, grad_mimo_z, here)
        row += step
    if NORM:
        tl.store(row, tl.where(streams == 0, tl.sum(grad_norm, 0, keep_dims=True), 0.0), here)


def gate_forward(y, z, mimo_z, mimo_o, norm_weight, norm_eps, dtype) -> Tensor:
    """The output (..., H, P) in `dtype`.

    Args:
        y, z, mimo_z, mimo_o, norm_weight, norm_eps: as in `gate_and_mix`, all dense but for z's
            tokens, which may be any distance apart.
    """
    *leading, heads, _, headdim = y.shape
    out = torch.empty(*leading, heads, headdim, dtype=dtype, device=y.device)
    plan = _plan(facts(y, z, mimo_z, mimo_o, norm_weight, out), TILE)
    inputs = [y if t is None else t for t in (z, mimo_z, mimo_o, norm_weight)]
    with on_device(y):
        plan.launch(
            _forward_kernel, (plan.tiles * heads,),
            y, *inputs, out, plan.tokens, heads, plan.z_stride, norm_eps, **plan.constants,
        )  # fmt: skip
    return out


def gate_backward(grad, y, z, mimo_z, mimo_o, norm_weight, norm_eps):
    """Gradients of y, z, mimo_z, mimo_o and norm_weight, None for those that are absent."""
    heads, rank, headdim = y.shape[-3:]
    sums = mimo_o is not None or mimo_z is not None or norm_weight is not None
    known = facts(y, z, mimo_z, mimo_o, norm_weight, grad)
    plan = _plan(known, SUMMING_TILE if sums else TILE)
    parts = min(plan.tiles, max(1, PARTIAL_ROWS // heads)) if sums else plan.tiles
    kinds = [plan.constants[name] for name in ("MIX", "GATE_STREAMS", "NORM")]
    grad_y, grad_z, partial = torch.empty_like(y), None, grad
    if z is not None:
        grad_z = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if sums:
        shape = sum(kinds), parts, heads, rank, headdim
        partial = torch.empty(shape, dtype=torch.float32, device=y.device)
    inputs = [y if t is None else t for t in (z, mimo_z, mimo_o, norm_weight)]
    outputs = grad_y, y if z is None else grad_z, partial
    with on_device(y):
        plan.launch(
            _backward_kernel, (parts * heads,),
            grad, y, *inputs, *outputs, plan.tokens, heads, plan.z_stride, norm_eps,
            **plan.constants,
        )  # fmt: skip

    rows = iter(partial.sum(1) if sums else ())
    grad_mimo_o, grad_mimo_z, grad_norm = (next(rows) if kind else None for kind in kinds)
    if grad_norm is not None:
        grad_norm = grad_norm[:, 0].to(norm_weight.dtype)
    return grad_y, grad_z, grad_mimo_z, grad_mimo_o, grad_norm


class _Plan(NamedTuple):
    """What launches of calls of the same sizes share."""

    tokens: int
    tiles: int
    z_stride: int
    constants: dict
    launch: Launcher


@functools.lru_cache(maxsize=128)
def _plan(known: tuple, tile: tuple[int, int]) -> _Plan:
    """The plan for facts of y, z, mimo_z, mimo_o, norm_weight, and the output or its gradient."""
    y, z, mimo_z, mimo_o, norm_weight, _ = known
    *leading, _, rank, headdim = y[1]
    z_stride = 0 if z is None else token_stride(*z[1:3], 2)
    unit = stride_unit(z_stride) if z_stride else 1
    elements, warps = tile
    block_p = triton.next_power_of_2(headdim)
    block_t = max(1, elements // block_p)
    constants = {
        "R": rank,
        "P": headdim,
        "Z_UNIT": unit,
        "BLOCK_T": block_t,
        "BLOCK_R": triton.next_power_of_2(rank),
        "BLOCK_P": block_p,
        "GATE": z is not None,
        "GATE_STREAMS": z is not None and mimo_z is not None,
        "MIX": mimo_o is not None,
        "NORM": norm_weight is not None,
        "num_warps": warps,
        "num_stages": 1,
    }
    tokens = math.prod(leading)
    return _Plan(tokens, triton.cdiv(tokens, block_t), z_stride // unit, constants, Launcher())
