"""What every launcher of this package needs around its kernels."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# For every launch. Multiplications and additions are fused, whatever a version's default is.
OPTIONS = {"enable_fp_fusion": True}


def on_device(t: Tensor):
    """Context in which kernels run on the tensor's own device."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def launch(kernel, grid: tuple[int, ...], *args, **constants) -> None:
    """Launch a kernel on tensors of the current device."""
    kernel[grid](*args, **constants, **OPTIONS)


def stride_unit(*strides: int) -> int:
    """The largest power of two up to 16 that divides every stride.

    Triton specialises integers on divisibility by 16 alone, and reads element by element where it
    knows nothing: a kernel takes stride / unit, and multiplies by the constexpr unit.
    """
    return math.gcd(16, *strides)


def one_stride(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Size and stride of dimensions taken as one; None if they have no one stride."""
    size, stride = 1, 0
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if size > 1 and step != stride * size:
            return None
        size, stride = size * n, stride if size > 1 else step
    return size, stride


def token_rows(t: Tensor, inner: int) -> Tensor:
    """t (..., inner dimensions) itself if its tokens are equally far apart and dense, or a copy.

    A slice of a wider projection is, and kernels read it where it lies.
    """
    shape, strides = t.shape, t.stride()
    own = one_stride(shape[-inner:], strides[-inner:])
    dense = own is not None and (own[0] == 1 or own[1] == 1)
    if dense and one_stride(shape[:-inner], strides[:-inner]) is not None:
        return t
    return t.contiguous()


def token_stride(shape: Sequence[int], strides: Sequence[int], inner: int) -> int:
    """Distance of one token to the next, of (..., inner dimensions) as `token_rows` gives it."""
    size, stride = one_stride(shape[:-inner], strides[:-inner])
    if size == 1:
        return strides[-inner - 1] if len(strides) > inner else 0
    return stride


def facts(*tensors: Tensor | None) -> tuple:
    """All of some tensors that a kernel compiled for them depends on, and their sizes."""
    return tuple(
        None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16, t.device)
        for t in tensors
    )


def compile_all(launches: list[tuple], device: torch.device) -> None:
    """Compile kernels for their launches, (kernel, arguments, constants), in parallel threads.

    What fails here is left to fail, with its own message, where it is launched.
    """

    def build(launch):
        kernel, args, constants = launch
        with torch.cuda.device(device):
            # Reading `run` builds what launches the kernel, too.
            return kernel.warmup(*args, grid=(1,), **constants, **OPTIONS).run

    first_of_each = {(kernel, *constants.items()): (kernel, args, constants)
                     for kernel, args, constants in reversed(launches)}  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(build, launch) for launch in first_of_each.values()]
    for future in futures:
        if future.exception() is not None:
            logger.warning("compiling a kernel ahead failed: %s", future.exception())


class Launcher:
    """Launches kernels for calls that agree in everything that a compiled kernel depends on.

    Triton finds a kernel's compiled form anew at every launch, from all of its arguments, which
    takes longer than most kernels here do. What differs between the calls of one launcher must be
    values alone: never dtypes, alignments, or integers that a kernel is specialised on.
    """

    def __init__(self):
        self._compiled = {}

    def __call__(self, kernel, grid: tuple[int, ...], *args, variant=None, **constants) -> None:
        """Launch `kernel` with its arguments in order, constants by name, as `kernel[grid]` would.

        Args:
            variant: tells launches of a kernel with other constants apart.
        """
        known = self._compiled.get((kernel, variant))
        if known is not None:
            compiled, trailing = known
            compiled[(*grid, 1, 1)[:3]](*args, *trailing)
            return
        compiled = kernel[grid](*args, **constants, **OPTIONS)
        if compiled is not None:  # else it was interpreted
            trailing = [constants[name] for name in kernel.arg_names[len(args) :]]
            self._compiled[kernel, variant] = compiled, trailing
