"""Kernel of `mamba3.ops.linear_cross_entropy`: from logits to losses and gradients, in place.

    loss = log sum_n exp(x_n - max x) - (x_label - max x),  d_x = softmax(x) - onehot(label)

A program reads its row for the maximum and the sum, which it corrects as the maximum grows, and
once more for the gradient: from the end backwards, as the cache holds what was read last.

Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..loss import ALIGNMENT
from .launch import OPTIONS, on_device

# Logits that a program holds at a time, and a warp's share of them.
BLOCK = 4096
WARP_ELEMENTS = 512


@triton.jit
def _logits(row_ptr, n, size, width):
    """Logits of the columns n, -inf where there are none."""
    x = tl.load(row_ptr + n, n < width, 0.0).to(tl.float32)
    return tl.where(n < size, x, float("-inf"))


@triton.jit(do_not_specialize=["size", "units", "ignore_index"])
def cross_entropy_kernel(
    logits_ptr, label_ptr, loss_ptr, size, units, ignore_index,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    width = units * UNIT
    row_ptr = logits_ptr + row * width
    column = tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, size, BLOCK):
                n = start + column
                tl.store(row_ptr + n, tl.zeros([BLOCK], tl.float32), n < width)
        return

    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, size, BLOCK):
        x = _logits(row_ptr, start + column, size, width)
        above = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - above) + tl.sum(tl.exp(x - above), 0)
        top = above
    # Nothing else looks at the labels on a GPU: the loss of one out of range is nan.
    target = tl.load(row_ptr + label, (label >= 0) & (label < size), float("nan")).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(total) - (target - top))

    if GRADIENT:
        # Every thread has read the label's logit before one overwrites it.
        tl.debug_barrier()
        label, share = label.to(tl.int32), 1 / total
        last = (size - 1) // BLOCK
        for i in range(last + 1):
            n = (last - i) * BLOCK + column
            softmax = tl.exp(_logits(row_ptr, n, size, width) - top) * share
            tl.store(row_ptr + n, softmax - (n == label).to(tl.float32), n < width)


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Losses of rows, and their gradients, which take the place of the logits.

    Args:
        logits: (T, V), rows a multiple of `ALIGNMENT` apart; what is between them may be written.
        labels: (T,) int, each in [0, V) or `ignore_index`.
        differentiate: False leaves the logits as they are, and returns them.

    Returns:
        Losses (T,) in float32, zero where a row is not scored and nan where its label is out of
        range; gradients (T, V).
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    args, constants = launch_of(logits, labels, losses, ignore_index, differentiate)
    with on_device(logits):
        cross_entropy_kernel[(len(logits),)](*args, **constants, **OPTIONS)
    return losses, logits


def launch_of(logits, labels, losses, ignore_index, differentiate) -> tuple[tuple, dict]:
    """The kernel's arguments, and those at compile time."""
    width = logits.stride(0)
    assert logits.stride(1) == 1
    assert width % ALIGNMENT == 0
    block = min(BLOCK, triton.next_power_of_2(width))
    args = logits, labels.contiguous(), losses, logits.shape[1], width // ALIGNMENT, ignore_index
    warps = max(1, block // WARP_ELEMENTS)
    return args, {
        "UNIT": ALIGNMENT, "BLOCK": block, "GRADIENT": differentiate, "num_warps": warps
    }  # fmt: skip
