"""Kernels of `mamba3.ops.glu.silu_gated`: everything is read once and written once.

    out = v g s,  s = sigmoid(g);      d_v = d_out g s,  d_g = d_out v (s + g s (1 - s))

Source: Shazeer, arXiv 2002.05202, and its derivative.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gate import sigmoid
from .launch import OPTIONS, on_device

# Elements of a tile, columns of it at most, and its warps: 16 bytes a load in half precision.
TILE_ELEMENTS, TILE_COLUMNS, WARPS = 2048, 512, 4


@triton.jit
def _places(rows, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a tile's values in x and its outputs, and their mask."""
    tiles: tl.constexpr = (W + COLUMNS - 1) // COLUMNS
    tile, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = (tile.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (part * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row * (2 * W) + column, row * W + column, (row < rows) & (column < W)


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, out_ptr, rows, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    x_at, out_at, here = _places(rows, W, ROWS, COLUMNS)
    value = tl.load(x_ptr + x_at, here, 0.0).to(tl.float32)
    gate = tl.load(x_ptr + x_at + W, here, 0.0).to(tl.float32)
    tl.store(out_ptr + out_at, value * gate * sigmoid(gate), here)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_ptr, x_ptr, grad_x_ptr, rows, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    x_at, out_at, here = _places(rows, W, ROWS, COLUMNS)
    grad = tl.load(grad_ptr + out_at, here, 0.0).to(tl.float32)
    value = tl.load(x_ptr + x_at, here, 0.0).to(tl.float32)
    gate = tl.load(x_ptr + x_at + W, here, 0.0).to(tl.float32)
    share = sigmoid(gate)
    silu = gate * share
    tl.store(grad_x_ptr + x_at, grad * silu, here)
    tl.store(grad_x_ptr + x_at + W, grad * value * (share + silu * (1 - share)), here)


def glu_forward(x: Tensor) -> Tensor:
    """The outputs (..., W) of x (..., 2 W), contiguous."""
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    _launch(_forward_kernel, x, out, width=out.shape[-1])
    return out


def glu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, from that of the outputs; both contiguous."""
    grad_x = torch.empty_like(x)
    _launch(_backward_kernel, grad, x, grad_x, width=grad.shape[-1])
    return grad_x


def _launch(kernel, *tensors: Tensor, width: int) -> None:
    x = tensors[-1]
    columns = min(TILE_COLUMNS, triton.next_power_of_2(width))
    tile = TILE_ELEMENTS // columns
    rows = tensors[0].numel() // tensors[0].shape[-1]
    grid = (triton.cdiv(rows, tile) * triton.cdiv(width, columns),)
    with on_device(x):
        kernel[grid](
            *tensors, rows, W=width, ROWS=tile, COLUMNS=columns, num_warps=WARPS, **OPTIONS
        )
