"""What every launcher of this package needs around its kernels."""

from __future__ import annotations

import contextlib
import math

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
