"""Kernels of `mamba3.ops.rms_norm` and `add_rms_norm`: every row is read once.

    s = x + residual,  u = s / sqrt(mean(s^2) + eps),  out = u * weight * silu(gate)

    g = d_out * silu(gate) * weight,  d_s = (g - u mean(g u)) / sqrt(mean(s^2) + eps)
    d_weight = sum_rows d_out silu(gate) u,  d_gate = d_out u weight silu'(gate)

Rows are (T, W, J): row w of the weight serves rows (:, w, :), and x, which may be a part of every
row of a wider projection, has one stride for each of the three. All else is contiguous.

Source: Zhang and Sennrich, arXiv 1910.07467, equation 4, and its derivative.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gate import sigmoid
from .launch import OPTIONS, on_device, one_stride, stride_unit

# Elements of a tile and of one warp's share, and programs that walk over all tiles for the
# weight's gradient, each with a row of partial sums.
TILE_ELEMENTS = 2048
WARP_ELEMENTS = 512
PROGRAMS = 528


@triton.jit
def _places(tile, w, weights, count, inner, t_stride, w_stride, j_stride, N: tl.constexpr,
            UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """A tile's rows and whether they exist; its offsets in x and elsewhere, its mask."""
    k = tile * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)[None, :]
    t, j = k // inner, k % inner
    row = ((t * weights + w) * inner + j).to(tl.int64)
    start = t.to(tl.int64) * t_stride + w.to(tl.int64) * w_stride + j.to(tl.int64) * j_stride
    exists = k < count
    here = exists[:, None] & (n < N)
    return row, exists, (start * UNIT)[:, None] + n, (row * N)[:, None] + n, here


@triton.jit(do_not_specialize=["count", "t_stride", "w_stride", "j_stride"])
def _forward_kernel(
    x_ptr, weight_ptr, gate_ptr, residual_ptr, out_ptr, summed_ptr, rstd_ptr,
    weights, count, inner, t_stride, w_stride, j_stride, eps,
    N: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    tile, w = tl.program_id(0) // weights, tl.program_id(0) % weights
    row, exists, x_at, at, here = _places(
        tile, w, weights, count, inner, t_stride, w_stride, j_stride, N, UNIT, ROWS, BLOCK_N
    )
    x = tl.load(x_ptr + x_at, here, 0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + at, here, 0.0).to(tl.float32)
        summed = x.to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + at, summed, here)
        x = summed.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    tl.store(rstd_ptr + row, rstd, exists)
    n = tl.arange(0, BLOCK_N)[None, :]
    weight = tl.load(weight_ptr + w.to(tl.int64) * N + n, n < N, 0.0).to(tl.float32)
    out = x * rstd[:, None] * weight
    if GATE:
        gate = tl.load(gate_ptr + at, here, 0.0).to(tl.float32)
        out *= gate * sigmoid(gate)
    tl.store(out_ptr + at, out, here)


@triton.jit(do_not_specialize=["count", "t_stride", "w_stride", "j_stride"])
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, gate_ptr, grad_summed_ptr, rstd_ptr,
    grad_x_ptr, grad_residual_ptr, grad_gate_ptr, partial_ptr,
    weights, count, inner, t_stride, w_stride, j_stride,
    N: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, TWO_DTYPES: tl.constexpr,
):  # fmt: skip
    part, w = tl.program_id(0) // weights, tl.program_id(0) % weights
    parts = tl.num_programs(0) // weights
    n = tl.arange(0, BLOCK_N)[None, :]
    weight = tl.load(weight_ptr + w.to(tl.int64) * N + n, n < N, 0.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in range(part, tl.cdiv(count, ROWS), parts):
        row, exists, x_at, at, here = _places(
            tile, w, weights, count, inner, t_stride, w_stride, j_stride, N, UNIT, ROWS, BLOCK_N
        )
        grad = tl.load(grad_ptr + at, here, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, exists, 0.0)[:, None]
        normed = tl.load(x_ptr + x_at, here, 0.0).to(tl.float32) * rstd
        if GATE:
            gate = tl.load(gate_ptr + at, here, 0.0).to(tl.float32)
            share = sigmoid(gate)
            silu = gate * share
            grad_gate = grad * normed * weight * (share + silu * (1 - share))
            tl.store(grad_gate_ptr + at, grad_gate, here)
            grad *= silu
        grad_weight += grad * normed
        grad *= weight
        along = tl.sum(grad * normed, 1, keep_dims=True) / N
        grad = (grad - normed * along) * rstd
        if ADD:
            grad += tl.load(grad_summed_ptr + at, here, 0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad, here)
        if TWO_DTYPES:
            tl.store(grad_residual_ptr + at, grad, here)
    place = tl.program_id(0).to(tl.int64) * N + n
    tl.store(partial_ptr + place, tl.sum(grad_weight, 0, keep_dims=True), n < N)


class Rows(NamedTuple):
    """Sizes and strides of the rows (T, W, J) of a tensor (..., N)."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, x: Tensor, first: int, stop: int) -> Rows | None:
        """With W the dimensions [first, stop) of x; None if one of the three has no one stride."""
        parts = (0, first), (first, stop), (stop, x.dim() - 1)
        found = [one_stride(x.shape[slice(*part)], x.stride()[slice(*part)]) for part in parts]
        if None in found or (x.stride(-1) != 1 and x.shape[-1] != 1):
            return None
        return cls(*zip(*found, strict=True))


def find_rows(x: Tensor, axes: tuple[int, int] | None) -> tuple[Tensor, Rows]:
    """x, copied if it must be, and its rows; `axes` as in `Rows.of`, None if the weight is one."""
    last = x.dim() - 1
    for cut in [axes] if axes else [(i, i) for i in range(last, -1, -1)]:
        if rows := Rows.of(x, *cut):
            return x, rows
    x = x.contiguous()
    return x, Rows.of(x, *(axes or (last, last)))


def norm_forward(
    x, rows, weight, gate, residual, eps, dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The normed x, x + residual, and 1 / RMS.

    Args:
        x, rows: as `find_rows` returns them.
        weight: (..., N), contiguous, W rows in all.
        gate, residual: of x's shape, contiguous, or None.
        dtype: of the normed x; None is the weight's.
    """
    out = torch.empty(x.shape, dtype=dtype or weight.dtype, device=x.device)
    summed = None if residual is None else torch.empty_like(residual)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    constants = _constants(x, rows, GATE=gate is not None, ADD=residual is not None)
    gate, residual, total = (x if t is None else t for t in (gate, residual, summed))
    tensors = x, weight, gate, residual, out, total, rstd
    with on_device(x):
        grid = (_tiles(rows, constants) * rows.sizes[1],)
        _forward_kernel[grid](*tensors, *_where(rows, constants), eps, **constants)
    return out, summed, rstd


def norm_backward(grad, grad_summed, x, rows, weight, gate, rstd, dtype):
    """Gradients of x, weight, gate and residual, None for those that are absent.

    Args:
        grad, grad_summed: of the two outputs; the second is None without a residual.
        x: what was normed, the sum where there is a residual.
        dtype: of the gradient of x; that of the residual has the sum's.
    """
    add = grad_summed is not None
    both = add and dtype != x.dtype
    grad_x = torch.empty(x.shape, dtype=dtype, device=x.device)
    grad_residual = torch.empty_like(x) if both else grad_x if add else None
    grad_gate = None if gate is None else torch.empty_like(gate)
    constants = _constants(x, rows, GATE=gate is not None, ADD=add, TWO_DTYPES=both)
    weights = rows.sizes[1]
    programs = min(_tiles(rows, constants), max(1, PROGRAMS // weights))
    partial = torch.empty(programs, *weight.shape, dtype=torch.float32, device=x.device)
    given = [x if t is None else t for t in (gate, grad_summed)]
    outputs = [grad_x if t is None else t for t in (grad_x, grad_residual, grad_gate)]
    tensors = grad, x, weight, *given, rstd, *outputs, partial
    with on_device(x):
        where = _where(rows, constants)
        _backward_kernel[(programs * weights,)](*tensors, *where, **constants)
    return grad_x, partial.sum(0).to(weight.dtype), grad_gate, grad_residual


def _constants(x: Tensor, rows: Rows, **flags: bool) -> dict:
    """The kernels' compile-time arguments."""
    width = x.shape[-1]
    block_n = triton.next_power_of_2(width)
    elements = max(TILE_ELEMENTS, block_n)
    return flags | {
        "N": width,
        "UNIT": stride_unit(*rows.strides),
        "ROWS": elements // block_n,
        "BLOCK_N": block_n,
        "num_warps": min(16, elements // WARP_ELEMENTS),
        "num_stages": 1,
        **OPTIONS,
    }


def _tiles(rows: Rows, constants: dict) -> int:
    return triton.cdiv(rows.sizes[0] * rows.sizes[2], constants["ROWS"])


def _where(rows: Rows, constants: dict) -> tuple[int, ...]:
    """The kernels' arguments weights, count, inner and the strides."""
    strides = (stride // constants["UNIT"] for stride in rows.strides)
    outer, weights, inner = rows.sizes
    return weights, outer * inner, inner, *strides
