"""Kernel of `mamba3.optim.symmetric`: products known to be symmetric, at half the work.

    C_k = alpha P_k Q_k^T + beta D_k + gamma I

    code        meaning                                                   shape
    P, Q        factors, of which either dimension may be the dense one   (K, M, L)
    D           symmetric term, of which one triangle counts              (K, M, M)
    C           result                                                    (K, M, M)
    tile        what a program computes, BLOCK x BLOCK of C on the diagonal or above it; what is
                above it is stored twice: mirrored, too

Source: the products X X^T, b A + c A^2 and Z A of Newton-Schulz iterations (Muon).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.triton.launch import Launcher, facts, on_device, stride_unit
from ..symmetric import capability

# Columns of tiles that are walked through together, row by row: programs that run at the same time
# read few rows of P and Q, and share them in the cache.
GROUP = 8


class Config(NamedTuple):
    """Side of a tile, length of a step along L, and what runs it."""

    block: int
    step: int
    warps: int
    stages: int


# Two programs fit on a multiprocessor: one multiplies while the other stores.
HOPPER = Config(block=128, step=64, warps=4, stages=3)
# Without warpgroup products, factors pass through registers, which 4 warps have too few of.
SMALLER = Config(block=128, step=32, warps=8, stages=4)
FLOAT32 = Config(block=64, step=32, warps=4, stages=2)


@triton.jit
def _triangle(t):
    """Column of element t of an upper triangle that is counted column by column."""
    # 8 t + 1 is a square where a column starts, and 8 off before: halfway, at up to 1000 columns no
    # rounding of an approximate root matters.
    return ((tl.sqrt(8.0 * t + 5.0) - 1.0) * 0.5).to(tl.int32)


@triton.jit
def _place(t, columns, GROUP: tl.constexpr):
    """Row and column of tile t, those of a group of columns counted row by row.

    A group is a rectangle, as high as there are columns before it, counted by row, above a
    triangle, counted by column.
    """
    first = _triangle(t) // GROUP * GROUP
    width = tl.minimum(GROUP, columns - first)
    rest = t - first * (first + 1) // 2
    below = rest - first * width
    j = _triangle(tl.maximum(below, 0))
    i = below - j * (j + 1) // 2
    inside = below < 0  # the rectangle
    row = tl.where(inside, rest // width, first + i)
    column = first + tl.where(inside, rest % width, j)
    return row.to(tl.int64), column.to(tl.int64)


@triton.jit
def _offsets(lanes, k, stride, LANES_DENSE: tl.constexpr):
    """Offsets of elements (lanes, k) of a factor."""
    return lanes + k * stride if LANES_DENSE else lanes * stride + k


@triton.jit
def _store(c_ptr, sums, row, column, size, diagonal, BLOCK: tl.constexpr):
    """Store a tile and its mirror image; of one on the diagonal, the upper triangle mirrored."""
    lane = tl.arange(0, BLOCK)
    down, along = lane[:, None], lane[None, :]
    sums += tl.where((row == column) & (down == along), diagonal, 0.0)
    tile = sums.to(c_ptr.dtype.element_ty)
    mirrored = tl.trans(tile)
    if row == column:
        tile = tl.where(down <= along, tile, mirrored)
    i, j = row * BLOCK + down, column * BLOCK + along
    tl.store(c_ptr + i * size + j, tile, (i < size) & (j < size))
    if row < column:
        i, j = column * BLOCK + down, row * BLOCK + along
        tl.store(c_ptr + i * size + j, mirrored, i < size)


@triton.jit(
    do_not_specialize=["tiles", "size", "length", "p_batch", "p_stride", "q_batch", "q_stride",
                       "d_batch", "d_stride"]
)  # fmt: skip
def _kernel(
    p_ptr, q_ptr, d_ptr, c_ptr,
    tiles, size, length, p_batch, p_stride, q_batch, q_stride, d_batch, d_stride,
    alpha, beta_by_alpha, gamma,
    P_ROWS_DENSE: tl.constexpr, Q_ROWS_DENSE: tl.constexpr, ADD: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C = alpha (P Q^T + beta / alpha D) + gamma I, a tile a program; sizes are in UNITs."""
    size, length = size.to(tl.int64) * UNIT, length * UNIT
    p_stride, q_stride = p_stride.to(tl.int64) * UNIT, q_stride.to(tl.int64) * UNIT
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.cdiv(size, BLOCK).to(tl.int32)
    row, column = _place(tl.program_id(0) % tiles, columns, GROUP)

    i = (row * BLOCK + tl.arange(0, BLOCK))[:, None]
    j = (column * BLOCK + tl.arange(0, BLOCK))[None, :]
    k = tl.arange(0, STEP)
    p_at = p_ptr + matrix * p_batch * UNIT + _offsets(i, k[None, :], p_stride, P_ROWS_DENSE)
    q_at = q_ptr + matrix * q_batch * UNIT + _offsets(j, k[:, None], q_stride, Q_ROWS_DENSE)
    products = tl.zeros([BLOCK, BLOCK], tl.float32)
    if ADD:  # here, not at the end, where it would need registers that the products are in
        d_at = d_ptr + matrix * d_batch * UNIT + i * (d_stride.to(tl.int64) * UNIT) + j
        products += beta_by_alpha * tl.load(d_at, (i < size) & (j < size), 0.0).to(tl.float32)
    for start in range(0, length, STEP):
        left = length - start
        p = tl.load(p_at, (i < size) & (k[None, :] < left), 0.0)
        q = tl.load(q_at, (j < size) & (k[:, None] < left), 0.0)
        products = tl.dot(p, q, products, input_precision="ieee")
        p_at += _offsets(0, STEP, p_stride, P_ROWS_DENSE)
        q_at += _offsets(0, STEP, q_stride, Q_ROWS_DENSE)

    c_ptr += matrix * size * size
    _store(c_ptr, alpha * products, row, column, size, gamma, BLOCK)


def symmetric_product(
    p: Tensor, q: Tensor, *, alpha: float, add: Tensor | None, beta: float, diagonal: float,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments as in `mamba3.optim.symmetric.symmetric_product`, checked."""
    return launch(p, q, alpha, add, beta, diagonal, out, config(p.device, p.dtype))


def launch(p, q, alpha, add, beta, diagonal, out, config: Config) -> Tensor:
    """`symmetric_product` with tiles of one's own choice."""
    p, q = _with_dense_dimension(p), _with_dense_dimension(q)
    if out is None:
        out = p.new_empty(len(p), p.shape[1], p.shape[1])
    if add is not None:
        add = _with_dense_dimension(add)
    plan = _plan(facts(p, q, add, out), config)
    with on_device(p):
        plan.launch(
            _kernel, (len(p) * plan.tiles,),
            p, q, out if add is None else add, out,
            plan.tiles, *plan.sizes, float(alpha), beta / alpha, float(diagonal), **plan.constants,
        )  # fmt: skip
    return out


@functools.cache
def config(device: torch.device, dtype: torch.dtype) -> Config:
    """The configuration for a device; one stage on Blackwell, where more gave wrong numbers."""
    if dtype == torch.float32:
        best = FLOAT32
    else:
        best = HOPPER if capability(device) == 9 else SMALLER
    return best._replace(stages=1) if capability(device) >= 10 else best


def _with_dense_dimension(t: Tensor) -> Tensor:
    return t if 1 in t.stride()[1:] else t.contiguous()


def _tiles(size: int, block: int) -> int:
    """Number of tiles on the diagonal and above it."""
    columns = triton.cdiv(size, block)
    return columns * (columns + 1) // 2


class _Plan(NamedTuple):
    """What launches of calls of the same sizes share."""

    tiles: int
    sizes: list[int]
    constants: dict
    launch: Launcher


@functools.lru_cache(maxsize=256)
def _plan(known: tuple, config: Config) -> _Plan:
    """The plan for facts of P, Q, D and C."""
    (_, (_, size, length), *_), _, d, _ = known
    strides, rows_dense = [], []
    for factor in known[:3]:
        batch, row, column = (0, 0, 1) if factor is None else factor[2]
        strides += [batch, row if column == 1 else column]
        rows_dense.append(column != 1)
    unit = stride_unit(size, length, *strides)
    constants = {
        "P_ROWS_DENSE": rows_dense[0],
        "Q_ROWS_DENSE": rows_dense[1],
        "ADD": d is not None,
        "UNIT": unit,
        "BLOCK": config.block,
        "STEP": config.step,
        "GROUP": GROUP,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    sizes = [n // unit for n in (size, length, *strides)]
    return _Plan(_tiles(size, config.block), sizes, constants, Launcher())
