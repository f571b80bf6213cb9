"""What every launcher of this package needs around its kernels."""

from __future__ import annotations

import contextlib
import math
from typing import ClassVar

import torch
from torch import Tensor


def on_device(t: Tensor):
    """Context in which kernels run on the tensor's own device."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def stride_unit(*strides: int) -> int:
    """The largest power of two up to 16 that divides every stride.

    Triton specialises integers on divisibility by 16 alone, and reads element by element where it
    knows nothing: a kernel takes stride / unit, and multiplies by the constexpr unit.
    """
    return math.gcd(16, *strides)


class Launcher:
    """Launches kernels for calls that agree in everything a compiled kernel depends on.

    Triton finds a kernel's compiled form anew at every launch, from all of its arguments, which
    takes longer than most kernels here do. The caller says instead what they depend on.

    Args:
        key: dtypes, alignments, strides and sizes that the arguments of all launches follow from.
    """

    _compiled: ClassVar[dict] = {}

    def __init__(self, key: tuple):
        self.key = key

    def __call__(self, kernel, grid: tuple[int, ...], *args, **constants) -> None:
        """Launch `kernel` with its arguments in order, constants by name (as `kernel[grid]`)."""
        key = (kernel, self.key, *constants.items())
        known = self._compiled.get(key)
        if known is not None:
            compiled, trailing = known
            compiled[(*grid, 1, 1)[:3]](*args, *trailing)
            return
        compiled = kernel[grid](*args, **constants)
        if compiled is not None:  # else it was interpreted
            trailing = [constants[name] for name in kernel.arg_names[len(args) :]]
            self._compiled[key] = compiled, trailing
