"""What the optimizer's kernels share: tensors found by tables, weights in two halves, launches.

A table has the addresses of K tensors anywhere in memory, so that one launch reaches all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.recording import capturing
from ...ops.triton.launch import Launcher, facts, on_device

WARPS = 4
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def tensor_at(table_ptr, k, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to tensor k of a table."""
    pointer = tl.load(table_ptr + k).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def lerp(a, b, weight):
    """a + weight (b - a), which is b at a weight of 1."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@triton.jit
def load_weights(w_at, low_at, here, LOW: tl.constexpr):
    """Weights in float32: as they are, or put together as `rules.join_bits` does."""
    w = tl.load(w_at, here, 0.0)
    if LOW:
        bits = (w.to(tl.int32) << 16) + tl.load(low_at, here, 0).to(tl.int32)
        w = bits.to(tl.float32, bitcast=True)
    return w.to(tl.float32)


@triton.jit
def store_weights(w_at, low_at, w, here, LOW: tl.constexpr):
    """The reverse of `load_weights`."""
    if LOW:
        bits = w.to(tl.int32, bitcast=True)
        tl.store(w_at, ((bits + 0x8000) >> 16).to(tl.int16), here)
        tl.store(low_at, bits.to(tl.int16), here)
    else:
        tl.store(w_at, w.to(w_at.dtype.element_ty), here)


def weight_type(dtype: torch.dtype, low: bool):
    """How kernels read weights: halves of float32 numbers are put together as integers."""
    return tl.int16 if low else DTYPES[dtype]


def launch(kernel, programs: int, tensors: list[Tensor | None], sizes: tuple, constants: dict):
    """Launch a kernel; its first tensor stands in for those that it does not use.

    Args:
        sizes: numbers after the tensors; on the first one, and on floats, it is not specialised.
    """
    special = tuple(n for n in sizes[1:] if not isinstance(n, float))
    launcher = _launcher(kernel, facts(*tensors), special, *constants.values())
    tensors = [tensors[0] if t is None else t for t in tensors]
    with on_device(tensors[0]):
        launcher(kernel, (programs,), *tensors, *sizes, **constants, num_warps=WARPS, num_stages=1)


@functools.lru_cache(maxsize=512)
def _launcher(*known) -> Launcher:
    return Launcher()


def table(tensors: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, bool]:
    """Addresses of contiguous tensors, on their device, and whether 16 divides them all.

    None has the address 0.
    """
    assert all(t is None or t.is_contiguous() for t in tensors)
    # An empty tensor has no address, but is one.
    addresses = tuple(0 if t is None else t.data_ptr() or 16 for t in tensors)
    aligned = all(address % 16 == 0 for address in addresses)
    if device.type != "cuda":
        return _written(addresses, device, None), aligned
    # A table made while a CUDA graph is captured is filled when the graph runs, no earlier.
    write = _written.__wrapped__ if capturing(device) else _written
    return write(addresses, device, torch.cuda.current_stream(device)), aligned


@functools.lru_cache(maxsize=1024)
def _written(addresses: tuple[int, ...], device: torch.device, stream) -> Tensor:
    """A table of numbers, for use on a stream.

    They travel as arguments of a launch: a copy from the host would have to wait for it, or keep
    memory that no one else may write to until it is done.
    """
    made = torch.zeros(len(addresses), dtype=torch.int64, device=device)
    torch._foreach_add_(list(made.unbind()), list(addresses))
    return made
