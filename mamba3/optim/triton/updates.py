"""Kernels of `MuonBank`: momentum before the orthogonalisation, weights after it, a launch each.

    V0 += (1 - b0)(g - V0),   V1 += (1 - b1)(g - V1),   u = g + mu (s V0 + (1 - s) V1 - g)
    W  <- W (1 - decay) - step u        the decay everywhere, or where W and u or V1 agree in sign

State is one tensor (K, m, n). Gradients and weights are K tensors anywhere in memory, found by a
table of their addresses. Everything is read once and written once, in float32 in between.

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

from ...ops.triton.launch import Launcher, facts, on_device

if TYPE_CHECKING:
    from ..banks import MuonBank, Numbers

# Elements that a program takes of a matrix, in a row or as a tile (rows, columns), and its warps.
ROW = 1, 2048
TILE = 64, 32
WARPS = 4
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _matrix(table_ptr, k, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to matrix k."""
    pointer = tl.load(table_ptr + k).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _lerp(a, b, weight):
    """a + weight (b - a), which is b at a weight of 1."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


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
    g = tl.load(_matrix(table_ptr, k, DTYPE, ALIGNED) + at, here, 0.0).to(tl.float32)
    fast_at = fast_ptr + (first + k) * size + at
    fast = tl.load(fast_at, here, 0.0)
    mu = tl.load(numbers_ptr + 2)
    fast_beta = tl.load(numbers_ptr + 3)
    # What is read does not wait for this.
    moves = at < tl.where(tl.load(numbers_ptr + 5) == 0, size, 0)

    fast = _lerp(fast, g, 1 - fast_beta)
    tl.store(fast_at, fast, moves)
    blend = fast
    if RAILS:
        slow_at = slow_ptr + (first + k) * size + at
        slow = _lerp(tl.load(slow_at, here, 0.0), g, slow_weight)
        tl.store(slow_at, slow, moves)
        blend = _lerp(slow, fast, tl.load(numbers_ptr + 4))
    u = _lerp(g, blend, mu) if NESTEROV else blend
    u = tl.where(moves, u, 0.0)
    tl.store(u_ptr + k * size + at, u, here)
    if NORM:
        tl.store(square_ptr + tl.program_id(0), tl.sum(u * u, 0))


@triton.jit(do_not_specialize=["first", "tiles"])
def _apply_kernel(
    table_ptr, u_ptr, slow_ptr, low_ptr, numbers_ptr,
    lr_mul_ptr, decay_mul_ptr, follows_ptr, own_decay_ptr,
    first, size, rows, columns, tiles,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CAUTIOUS: tl.constexpr, RAILS: tl.constexpr,
    LOW: tl.constexpr, COLUMNS_DENSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decay and update of a tile of weights; u may be stored by column."""
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
    w_at = _matrix(table_ptr, k, DTYPE, ALIGNED) + at
    w = tl.load(w_at, here, 0.0)
    if LOW:
        bits = (w.to(tl.int32) << 16) + tl.load(low_ptr + own, here, 0).to(tl.int32)
        w = bits.to(tl.float32, bitcast=True)
    else:
        w = w.to(tl.float32)

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
    if LOW:
        bits = w.to(tl.int32, bitcast=True)
        tl.store(w_at, ((bits + 0x8000) >> 16).to(tl.int16), here)
        tl.store(low_ptr + own, bits.to(tl.int16), here)
    else:
        tl.store(w_at, w.to(DTYPE), here)


def momentum(
    bank: MuonBank,
    part: slice,
    grads: Sequence[Tensor],
    numbers: Numbers,
    dtype: torch.dtype,
    norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """What `MuonBank.momentum` returns, in `dtype`, and its norms (k, 1, 1) if asked for.

    A step that `numbers` says to skip leaves the rails, and returns zeros.
    """
    fast, options = bank.fast, bank.options
    kind = functools.reduce(torch.promote_types, {g.dtype for g in grads})
    grads = [g.to(kind).contiguous() for g in grads]
    size = bank.shape[1] * bank.shape[2]
    tiles = triton.cdiv(size, ROW[1])
    u = torch.empty(len(grads), *bank.shape[1:], dtype=dtype, device=fast.device)
    squares = fast.new_empty(len(grads), tiles) if norm else None
    table, aligned = _table(grads)
    tensors = [table, fast, bank.slow, u, squares, numbers.packed(fast.device)]
    constants = {
        "DTYPE": DTYPES[kind],
        "ALIGNED": aligned,
        "RAILS": bank.slow is not None,
        "NESTEROV": options.nesterov,
        "NORM": norm,
        "BLOCK": ROW[1],
    }
    slow_weight = 0.0 if options.rails is None else 1 - options.rails.slow
    _launch(
        _momentum_kernel, len(grads) * tiles, tensors,
        (part.start, size, tiles, slow_weight), constants,
    )  # fmt: skip
    return u, squares.sum(1).sqrt()[:, None, None] if norm else None


def apply(bank: MuonBank, part: slice, u: Tensor, numbers: Numbers) -> None:
    """What `MuonBank.apply` does; nothing in a step that `numbers` says to skip."""
    weights = [member.weight for member in bank.members[part]]
    low = bank.low is not None
    by_column = not u.is_contiguous()
    if by_column and not u.mT.is_contiguous():
        u, by_column = u.contiguous(), False
    (rows, columns), block = bank.shape[1:], TILE
    size = rows * columns
    if not by_column:
        rows, columns, block = 1, size, ROW
    tiles = triton.cdiv(rows, block[0]) * triton.cdiv(columns, block[1])
    table, aligned = _table(weights)
    tensors = [
        table, u, bank.slow, bank.low, numbers.packed(u.device),
        bank.lr_mul, bank.decay_mul, bank.follows, bank.own_decay,
    ]  # fmt: skip
    constants = {
        # Halves of float32 numbers are put together as integers.
        "DTYPE": tl.int16 if low else DTYPES[weights[0].dtype],
        "ALIGNED": aligned,
        "CAUTIOUS": bank.options.cautious,
        "RAILS": bank.slow is not None,
        "LOW": low,
        "COLUMNS_DENSE": by_column,
        "BLOCK_M": block[0],
        "BLOCK_N": block[1],
    }
    sizes = part.start, size, rows, columns, tiles
    _launch(_apply_kernel, len(weights) * tiles, tensors, sizes, constants)


def _launch(kernel, programs: int, tensors: list[Tensor | None], sizes: tuple, constants: dict):
    """Launch a kernel; the table stands in for tensors that it does not use."""
    launcher = _launcher(kernel, facts(*tensors), sizes[1:], *constants.values())
    tensors = [tensors[0] if t is None else t for t in tensors]
    with on_device(tensors[0]):
        launcher(kernel, (programs,), *tensors, *sizes, **constants, num_warps=WARPS, num_stages=1)


@functools.lru_cache(maxsize=512)
def _launcher(*known) -> Launcher:
    return Launcher()


def _table(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Addresses of contiguous tensors, on their device, and whether 16 divides them all."""
    assert all(t.is_contiguous() for t in tensors)
    addresses = tuple(t.data_ptr() for t in tensors)
    device = tensors[0].device
    aligned = all(address % 16 == 0 for address in addresses)
    if not tensors[0].is_cuda:
        return _written(addresses, device, None), aligned
    # A table made while a CUDA graph is captured is filled when the graph runs, no earlier.
    capturing = torch.cuda.is_current_stream_capturing()
    write = _written.__wrapped__ if capturing else _written
    return write(addresses, device, torch.cuda.current_stream(device)), aligned


@functools.lru_cache(maxsize=1024)
def _written(addresses: tuple[int, ...], device: torch.device, stream) -> Tensor:
    """A table of numbers, for use on a stream.

    They travel as arguments of a launch: a copy from the host would have to wait for it, or keep
    memory that no one else may write to until it is done.
    """
    table = torch.zeros(len(addresses), dtype=torch.int64, device=device)
    torch._foreach_add_(list(table.unbind()), list(addresses))
    return table
