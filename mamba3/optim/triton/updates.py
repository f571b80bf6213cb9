"""Kernels around a bank's orthogonalisation: momentum, scale, lanes and weights, a launch each.

    V0 += (1 - b0)(g - V0),   V1 += (1 - b1)(g - V1),   u = g + mu (s V0 + (1 - s) V1 - g)
    W  <- W (1 - decay) - step f u      the decay everywhere, or where W and u or V1 agree in sign

State is one tensor (K, m, n), as is u. Gradients and weights are K tensors anywhere in memory. f is
1, or a number of every lane, an index of the longer side. All is read once and written once, in
float32 in between; sums are in a fixed order.

Source: the rules of `mamba3.optim.rules`, of which these are the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import DTYPES, launch, lerp, load_weights, store_weights, table, tensor_at, weight_type

if TYPE_CHECKING:
    from ..banks import MuonBank
    from ..pieces import Numbers

# Elements that a program takes of a matrix, in a row or as a tile (rows, columns).
ROW = 1, 2048
# Of updates by column, of updates by row with lanes, and of lanes and what they are summed over.
TILE, TILE_BY_ROW, TILE_OF_LANES = (64, 32), (16, 128), (64, 64)


@triton.jit(do_not_specialize=["first", "tiles"])
def _momentum_kernel(
    table_ptr, fast_ptr, slow_ptr, u_ptr, square_ptr, numbers_ptr,
    first, size, tiles, slow_weight,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, RAILS: tl.constexpr, NESTEROV: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both rails, u, and the sum of its squares; the bank's matrix `first` is the table's first."""
    k = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    g = tl.load(tensor_at(table_ptr, k, DTYPE, ALIGNED) + at, here, 0.0).to(tl.float32)
    fast_at = fast_ptr + (first + k) * size + at
    fast = tl.load(fast_at, here, 0.0)
    mu = tl.load(numbers_ptr + 2)
    fast_beta = tl.load(numbers_ptr + 3)
    # What is read does not wait for this.
    moves = at < tl.where(tl.load(numbers_ptr + 5) == 0, size, 0)

    fast = lerp(fast, g, 1 - fast_beta)
    tl.store(fast_at, fast, moves)
    blend = fast
    if RAILS:
        slow_at = slow_ptr + (first + k) * size + at
        slow = lerp(tl.load(slow_at, here, 0.0), g, slow_weight)
        tl.store(slow_at, slow, moves)
        blend = lerp(slow, fast, tl.load(numbers_ptr + 4))
    u = lerp(g, blend, mu) if NESTEROV else blend
    u = tl.where(moves, u, 0.0)
    tl.store(u_ptr + k * size + at, u, here)
    if NORM:
        tl.store(square_ptr + tl.program_id(0), tl.sum(u * u, 0))


@triton.jit(do_not_specialize=["tiles"])
def _scale_kernel(x_ptr, out_ptr, factor_ptr, tiles, size, BLOCK: tl.constexpr):
    """Matrices times a factor each."""
    k = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    x = tl.load(x_ptr + k * size + at, here, 0.0).to(tl.float32)
    tl.store(out_ptr + k * size + at, x * tl.load(factor_ptr + k), here)


@triton.jit(do_not_specialize=["tiles"])
def _lanes_kernel(
    u_ptr, square_ptr, tiles, lanes, steps,
    LANES_DENSE: tl.constexpr, BLOCK_LANES: tl.constexpr, BLOCK_STEPS: tl.constexpr,
):  # fmt: skip
    """Mean squares of some lanes of a matrix, each of `steps` elements."""
    k = (tl.program_id(0) // tiles).to(tl.int64)
    lane = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_LANES + tl.arange(0, BLOCK_LANES)
    u_ptr += k * lanes * steps
    i = lane[:, None]
    sums = tl.zeros([BLOCK_LANES, BLOCK_STEPS], tl.float32)
    for start in range(0, steps, BLOCK_STEPS):
        j = start + tl.arange(0, BLOCK_STEPS).to(tl.int64)[None, :]
        at = i + j * lanes if LANES_DENSE else i * steps + j
        u = tl.load(u_ptr + at, (i < lanes) & (j < steps), 0.0).to(tl.float32)
        sums += u * u
    tl.store(square_ptr + k * lanes + lane, tl.sum(sums, 1) / steps, lane < lanes)


@triton.jit(do_not_specialize=["first", "tiles"])
def _apply_kernel(
    table_ptr, u_ptr, slow_ptr, low_ptr, numbers_ptr, lanes_ptr,
    lr_mul_ptr, decay_mul_ptr, follows_ptr, own_decay_ptr,
    first, size, rows, columns, tiles,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CAUTIOUS: tl.constexpr, RAILS: tl.constexpr,
    LOW: tl.constexpr, LANES: tl.constexpr, LANES_ARE_ROWS: tl.constexpr,
    COLUMNS_DENSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decay and update of a tile of weights; u may be stored by column, and have factors."""
    k = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    across = tl.cdiv(columns, BLOCK_N)
    i = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = (tile % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    here = (i < rows) & (j < columns)
    at = i * columns + j
    own = (first + k) * size + at
    u_at = i + j * rows if COLUMNS_DENSE else at
    u = tl.load(u_ptr + k * size + u_at, here, 0.0).to(tl.float32)
    if LANES:
        if LANES_ARE_ROWS:
            u *= tl.load(lanes_ptr + k * rows + i, i < rows, 0.0)
        else:
            u *= tl.load(lanes_ptr + k * columns + j, j < columns, 0.0)
    w_at = tensor_at(table_ptr, k, DTYPE, ALIGNED) + at
    w = load_weights(w_at, low_ptr + own, here, LOW)

    lr = tl.load(numbers_ptr)
    decay = tl.load(numbers_ptr + 1) * tl.load(follows_ptr + first + k)
    decay += tl.load(own_decay_ptr + first + k)
    keep = 1 - lr * tl.load(decay_mul_ptr + first + k) * decay
    if CAUTIOUS:
        aligned = tl.load(slow_ptr + own, here, 0.0) if RAILS else u
        keep = tl.where(aligned * w >= 0, keep, 1.0)
    # Written out, since compilers may fuse the one product or the other.
    w = tl.fma(w, keep, -u * (lr * tl.load(lr_mul_ptr + first + k)))

    here &= i < tl.where(tl.load(numbers_ptr + 5) == 0, rows, 0)
    store_weights(w_at, low_ptr + own, w, here, LOW)


def momentum(
    bank: MuonBank,
    part: slice,
    grads: Sequence[Tensor],
    numbers: Numbers,
    dtype: torch.dtype,
    norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """What `MuonBank.momentum_and_norm` returns, in `dtype`, and its norms (k, 1, 1) if asked for.

    A step that `numbers` says to skip leaves the rails, and returns zeros.
    """
    fast, options = bank.fast, bank.options
    kind = functools.reduce(torch.promote_types, {g.dtype for g in grads})
    grads = [g.to(kind).contiguous() for g in grads]
    size = bank.shape[1] * bank.shape[2]
    tiles = triton.cdiv(size, ROW[1])
    u = torch.empty(len(grads), *bank.shape[1:], dtype=dtype, device=fast.device)
    squares = fast.new_empty(len(grads), tiles) if norm else None
    addresses, aligned = table(grads, fast.device)
    tensors = [addresses, fast, bank.slow, u, squares, numbers.packed(fast.device)]
    constants = {
        "DTYPE": DTYPES[kind],
        "ALIGNED": aligned,
        "RAILS": bank.slow is not None,
        "NESTEROV": options.nesterov,
        "NORM": norm,
        "BLOCK": ROW[1],
    }
    slow_weight = 0.0 if options.rails is None else 1 - options.rails.slow
    launch(
        _momentum_kernel, len(grads) * tiles, tensors,
        (part.start, size, tiles, slow_weight), constants,
    )  # fmt: skip
    return u, squares.sum(1).sqrt()[:, None, None] if norm else None


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """x (K, m, n) times factors (K, 1, 1), to `out`, which is dense and stored as x is."""
    size = x.shape[1] * x.shape[2]
    tiles = triton.cdiv(size, ROW[1])
    launch(_scale_kernel, len(x) * tiles, [x, out, factor], (tiles, size), {"BLOCK": ROW[1]})
    return out


def lane_squares(u: Tensor) -> Tensor:
    """Mean squares of the lanes of u (K, m, n): its rows, or its columns where these are more."""
    u, by_column = _dense(u)
    rows, columns = u.shape[1:]
    lanes, steps = max(rows, columns), min(rows, columns)
    square = torch.empty(len(u), lanes, dtype=torch.float32, device=u.device)
    constants = {
        "LANES_DENSE": (rows >= columns) == by_column,
        "BLOCK_LANES": TILE_OF_LANES[0],
        "BLOCK_STEPS": TILE_OF_LANES[1],
    }
    tiles = triton.cdiv(lanes, TILE_OF_LANES[0])
    launch(_lanes_kernel, len(u) * tiles, [u, square], (tiles, lanes, steps), constants)
    return square


def apply(
    bank: MuonBank, part: slice, u: Tensor, numbers: Numbers, lane_factors: Tensor | None = None
) -> None:
    """What `MuonBank.apply` does, with u's lanes times factors (k, max(m, n)).

    Nothing in a step that `numbers` says to skip.
    """
    weights = [member.weight for member in bank.members[part]]
    low = bank.low is not None
    u, by_column = _dense(u)
    (rows, columns), block = bank.shape[1:], TILE if by_column else TILE_BY_ROW
    size, lanes_are_rows = rows * columns, rows >= columns
    if lane_factors is None and not by_column:
        rows, columns, block = 1, size, ROW
    tiles = triton.cdiv(rows, block[0]) * triton.cdiv(columns, block[1])
    addresses, aligned = table(weights, u.device)
    tensors = [
        addresses, u, bank.slow, bank.low, numbers.packed(u.device), lane_factors,
        bank.lr_mul, bank.decay_mul, bank.follows, bank.own_decay,
    ]  # fmt: skip
    constants = {
        "DTYPE": weight_type(weights[0].dtype, low),
        "ALIGNED": aligned,
        "CAUTIOUS": bank.options.cautious,
        "RAILS": bank.slow is not None,
        "LOW": low,
        "LANES": lane_factors is not None,
        "LANES_ARE_ROWS": lanes_are_rows,
        "COLUMNS_DENSE": by_column,
        "BLOCK_M": block[0],
        "BLOCK_N": block[1],
    }
    sizes = part.start, size, rows, columns, tiles
    launch(_apply_kernel, len(weights) * tiles, tensors, sizes, constants)


def _dense(u: Tensor) -> tuple[Tensor, bool]:
    """u, or a copy of it, with rows or columns one after the other, and whether it is columns."""
    if u.is_contiguous():
        return u, False
    return (u, True) if u.mT.is_contiguous() else (u.contiguous(), False)
