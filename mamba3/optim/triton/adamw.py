"""Kernels of `AdamWList`: the numbers of every piece's step, then all pieces in one launch.

    m <- m + (1 - b1)(g - m),    v <- v + (1 - b2)(g^2 - v)
    w <- w (1 - decay) - step m / (sqrt(v) + eps')

    step = lr sqrt(1 - b2^t) / (1 - b1^t),    eps' = eps sqrt(1 - b2^t)

The decay is everywhere, or where w and m agree in sign. t, the number of a piece's steps, is on the
device alone, which so leaves steps out that the host knows nothing of. Everything is read once and
written once, in float32 in between.

    code        meaning                                                     shape
    layout      of every piece what does not change: addresses of its       (6, P)
                state (m, v, low, kept), its size, and its first program
    owners      the piece of every program                                  (programs,)
    sizes       the elements of a piece to be moved: all or none            (P,)
    scalars     step, 1 - decay, eps'                                       (3, P)

Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2; `mamba3.optim.rules.adamw_`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import DTYPES, launch, lerp, load_weights, store_weights, table, tensor_at, weight_type

if TYPE_CHECKING:
    from ..adamw import AdamWList, AdamWPiece
    from ..pieces import Numbers

# Elements of a program, and pieces of one that works out their numbers.
BLOCK, PIECES = 1024, 128


@triton.jit(do_not_specialize=["pieces"])
def _numbers_kernel(
    layout_ptr, grads_ptr, counts_ptr, sizes_ptr, scalars_ptr, numbers_ptr,
    lr_mul_ptr, follows_ptr, own_decay_ptr,
    pieces, log_beta1, log_beta2, eps,
    KEEPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count steps, and work out sizes and scalars."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = p < pieces
    moves = tl.load(grads_ptr + p, here, 0) != 0
    if KEEPS and STEPS:  # a gradient of an earlier step is one, too
        moves = here
    moves &= p < tl.where(tl.load(numbers_ptr + 5) == 0, pieces, 0)
    size = tl.load(layout_ptr + 4 * pieces + p, here, 0)
    tl.store(sizes_ptr + p, tl.where(moves, size, 0), here)
    if STEPS:
        t = tl.load(counts_ptr + p, here, 0.0) + moves.to(tl.float32)
        tl.store(counts_ptr + p, t, here)
        t = tl.maximum(t, 1.0)
        # In float32 one less a number near one would have few digits.
        first = (1 - tl.exp((t * log_beta1).to(tl.float64))).to(tl.float32)
        root = tl.sqrt((1 - tl.exp((t * log_beta2).to(tl.float64))).to(tl.float32))
        lr = tl.load(numbers_ptr) * tl.load(lr_mul_ptr + p, here, 0.0)
        decay = tl.load(numbers_ptr + 1) * tl.load(follows_ptr + p, here, 0.0)
        decay += tl.load(own_decay_ptr + p, here, 0.0)
        tl.store(scalars_ptr + p, lr * root / first, here)
        tl.store(scalars_ptr + pieces + p, 1 - lr * decay, here)
        tl.store(scalars_ptr + 2 * pieces + p, eps * root, here)


@triton.jit
def _update(
    w_at, g_at, m_at, v_at, low_at, kept_at, here, g_here,
    step, keep, eps, weight1, weight2,
    CAUTIOUS: tl.constexpr, LOW: tl.constexpr, KEEPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A program's elements."""
    if KEEPS:
        g = tl.load(g_at, g_here, 0.0).to(tl.float32) + tl.load(kept_at, here, 0.0)
    else:
        g = tl.load(g_at, here, 0.0).to(tl.float32)
    if STEPS:
        m = lerp(tl.load(m_at, here, 0.0), g, weight1)
        v = lerp(tl.load(v_at, here, 0.0), g * g, weight2)
        w = load_weights(w_at, low_at, here, LOW)
        tl.store(m_at, m, here)
        tl.store(v_at, v, here)
        if CAUTIOUS:
            keep = tl.where(m * w >= 0, keep, 1.0)
        store_weights(w_at, low_at, tl.fma(w, keep, -step * (m / (tl.sqrt(v) + eps))), here, LOW)
    if KEEPS:
        tl.store(kept_at, tl.zeros_like(g) if STEPS else g, here)


@triton.jit(do_not_specialize=["pieces"])
def _adamw_kernel(
    layout_ptr, owners_ptr, weights_ptr, grads_ptr, sizes_ptr, scalars_ptr,
    pieces, weight1, weight2,
    DTYPE: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, CAUTIOUS: tl.constexpr,
    LOW: tl.constexpr, KEEPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of a piece, or keep its gradient."""
    p = tl.load(owners_ptr + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(layout_ptr + 5 * pieces + p)) * BLOCK
    left = tl.load(sizes_ptr + p) - start
    at = tl.arange(0, BLOCK)
    m_at = tensor_at(layout_ptr, p, tl.float32, True) + start + at
    v_at = tensor_at(layout_ptr + pieces, p, tl.float32, True) + start + at
    low_at = tensor_at(layout_ptr + 2 * pieces, p, tl.int16, True) + start + at
    kept_at = tensor_at(layout_ptr + 3 * pieces, p, tl.float32, True) + start + at
    w_at = tensor_at(weights_ptr, p, DTYPE, ALIGNED) + start + at
    g_at = tensor_at(grads_ptr, p, GRAD, ALIGNED) + start + at
    g_here = at < tl.where(tl.load(grads_ptr + p) != 0, left, 0)
    step = tl.load(scalars_ptr + p)
    keep = tl.load(scalars_ptr + pieces + p)
    eps = tl.load(scalars_ptr + 2 * pieces + p)
    # A mask of any number of elements would have them read one by one.
    if left >= BLOCK:
        _update(
            w_at, g_at, m_at, v_at, low_at, kept_at, at < BLOCK, g_here,
            step, keep, eps, weight1, weight2, CAUTIOUS, LOW, KEEPS, STEPS,
        )  # fmt: skip
    else:
        _update(
            w_at, g_at, m_at, v_at, low_at, kept_at, at < left, g_here,
            step, keep, eps, weight1, weight2, CAUTIOUS, LOW, KEEPS, STEPS,
        )  # fmt: skip


class Layout(NamedTuple):
    """What does not change from step to step, on the device."""

    layout: Tensor
    owners: Tensor

    @classmethod
    def of(cls, pieces: Sequence[AdamWPiece], device: torch.device) -> Layout:
        """The layout of pieces whose state stays where it is."""
        names = "average", "square", "low", "kept"
        states = [getattr(piece, name) for name in names for piece in pieces]
        addresses = [0 if t is None else t.data_ptr() for t in states]
        assert all(address % 16 == 0 for address in addresses)
        sizes = [piece.average.numel() for piece in pieces]
        programs = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
        first = programs.cumsum(0) - programs
        layout = torch.tensor([*addresses, *sizes, *first.tolist()])
        owners = torch.arange(len(pieces), dtype=torch.int32).repeat_interleave(programs)
        return cls(layout.to(device), owners.to(device))


def step(
    those: AdamWList,
    grads: Sequence[Tensor | None],
    numbers: Numbers,
    betas: tuple[float, float],
    eps: float,
    active: bool,
) -> None:
    """What `AdamWList.step` does; nothing in a step that `numbers` says to skip."""
    weights, (layout, owners) = [member.weight for member in those.members], those.layout
    kinds = {g.dtype for g in grads if g is not None} or {weights[0].dtype}
    kind = functools.reduce(torch.promote_types, kinds)
    grads = [None if g is None else g.to(kind).contiguous() for g in grads]
    (grads_at, aligned), (weights_at, also_aligned) = (
        table(tensors, those.device) for tensors in (grads, weights)
    )
    form = {"KEEPS": those.options.adam_every > 1, "STEPS": active}
    sizes, scalars = _sizes_and_scalars(those, grads_at, numbers, betas, eps, form)
    if not len(owners):
        return
    low = those.pieces[0].low is not None
    constants = {
        "DTYPE": weight_type(weights[0].dtype, low),
        "GRAD": DTYPES[kind],
        "ALIGNED": aligned and also_aligned,
        "CAUTIOUS": those.options.cautious,
        "LOW": low,
        **form,
        "BLOCK": BLOCK,
    }
    tensors = [layout, owners, weights_at, grads_at, sizes, scalars]
    arguments = len(weights), *(float(1 - beta) for beta in betas)
    launch(_adamw_kernel, len(owners), tensors, arguments, constants)


def _sizes_and_scalars(
    those: AdamWList,
    grads_at: Tensor,
    numbers: Numbers,
    betas: tuple[float, float],
    eps: float,
    form: dict[str, bool],
) -> tuple[Tensor, Tensor]:
    count, device = len(grads_at), grads_at.device
    sizes = torch.empty(count, dtype=torch.int64, device=device)
    scalars = torch.empty(3, count, dtype=torch.float32, device=device)
    tensors = [
        those.layout.layout, grads_at, those.counts, sizes, scalars, numbers.packed(device),
        those.lr_mul, those.follows, those.own_decay,
    ]  # fmt: skip
    logs = (math.log(beta) if beta else -math.inf for beta in betas)
    launch(
        _numbers_kernel, triton.cdiv(count, PIECES), tensors,
        (count, *logs, float(eps)), form | {"BLOCK": PIECES},
    )  # fmt: skip
    return sizes, scalars
