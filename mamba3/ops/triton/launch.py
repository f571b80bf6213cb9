"""What every launcher of this package needs around its kernels."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# For every launch. Multiplications and additions are fused, whatever a version's default is.
OPTIONS = {"enable_fp_fusion": True}


def on_device(t: Tensor):
    """Context in which kernels run on the tensor's own device."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def stride_unit(*strides: int) -> int:
    """The largest power of two up to 16 that divides every stride.

    Triton specialises integers on divisibility by 16 alone, and reads element by element where it
    knows nothing: a kernel takes stride / unit, and multiplies by the constexpr unit.
    """
    return math.gcd(16, *strides)


def token_stride(t: Tensor, inner: int) -> int:
    """Distance of one token to the next, of t (..., inner dimensions) as `token_rows` gives it."""
    leading = list(zip(t.shape[:-inner], t.stride()[:-inner], strict=True))
    return next((stride for size, stride in reversed(leading) if size != 1), leading[-1][1])


def token_rows(t: Tensor, inner: int) -> Tensor:
    """t (..., inner dimensions) itself if its tokens are equally far apart and dense, or a copy.

    A slice of a wider projection is, and kernels read it where it lies.
    """
    dimensions = list(zip(reversed(t.shape), reversed(t.stride()), strict=True))
    expected = 1
    for size, stride in dimensions[:inner]:
        if size != 1 and stride != expected:
            return t.contiguous()
        expected *= size
    expected = None
    for size, stride in dimensions[inner:]:
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return t.contiguous()
        expected = stride * size
    return t


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
