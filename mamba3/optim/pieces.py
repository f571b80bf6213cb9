"""What all steps are told: pieces of parameters, options that stay, numbers that change.

Nothing here knows parameter groups: a step is given the numbers of the moment (`Numbers`), and
finds gradients by a function, so that whoever owns a piece decides where they come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .orthogonalize import check_preset, lr_factor
from .param_groups import Piece
from .rules import Rails, Scalar


class Numbers(NamedTuple):
    """What changes from step to step, as numbers, or as the elements of one tensor on a device.

    `skip` is 1 in a step that is to change nothing, and 0 in any other, which the host then need
    not know. What has a true property `skips` heeds it.
    """

    lr: Scalar
    weight_decay: Scalar
    momentum: Scalar
    fast_beta: Scalar
    share: Scalar
    skip: Scalar = 0.0

    def packed(self, device: torch.device) -> Tensor:
        """All in one float32 tensor: that which they are elements of, or a new one."""
        if isinstance(self.lr, Tensor):
            return self.lr.as_strided((len(self),), (1,))
        return torch.tensor(self, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Options:
    """How an optimizer steps, the same for all of its pieces; see `HybridOptimizer`."""

    preset: str
    lr_rule: str
    nesterov: bool
    rails: Rails | None
    equalize: float | None
    row_equalize: bool
    trace_norm: bool
    cautious: bool
    decay_adjusted: bool
    extra_bits: bool
    adam_every: int
    dtype: torch.dtype | None

    def __post_init__(self):
        check_preset(self.preset)
        lr_factor(self.lr_rule, 1, 1)
        if self.equalize is not None and not 0 <= self.equalize < 1:
            raise ValueError(f"equalize is a beta in [0, 1) or None, got {self.equalize}")
        if self.adam_every < 1:
            raise ValueError(f"adam_every must be at least 1, got {self.adam_every}")


class Member(NamedTuple):
    """A piece and the parameter it belongs to."""

    piece: Piece
    parameter: Tensor

    @property
    def weight(self) -> Tensor:
        """The rows that are on this process, as a view."""
        return self.rows(self.parameter.detach())

    @property
    def kind(self) -> tuple:
        """What the members of a bank share."""
        p = self.parameter
        layout = (p.device_mesh, p.placements) if is_dtensor(p) else None
        return self.piece.shape, p.dtype, p.device, layout

    def rows(self, t: Tensor) -> Tensor:
        """The rows that are on this process, of the parameter or of its gradient, as a view."""
        if not is_dtensor(t):
            return self.piece.of(t)
        from .dtensor import local_rows

        return local_rows(self.piece, t, self.parameter.placements)


def is_dtensor(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, told without the seconds that it takes to import them."""
    return hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """What of a tensor is on this process."""
    return t.to_local() if is_dtensor(t) else t


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Tensors that operations on several can take together."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return found


def norms(tensors: Iterable[Tensor]) -> Tensor:
    """Of one tensor or more, each its own, at least in float32; those of a dtype together."""
    of_dtype = by_dtype(tensors)
    dtype = functools.reduce(torch.promote_types, of_dtype, torch.float32)
    return torch.stack([n for own in of_dtype.values() for n in torch._foreach_norm(own, 2, dtype)])


# The gradient of a member's rows; None where there is none.
Gradients = Callable[[Member], Tensor | None]


def own_gradient(member: Member) -> Tensor | None:
    """The rows of the parameter's own gradient."""
    grad = member.parameter.grad
    return None if grad is None else member.rows(grad)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the state of weights in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def numbers_of(members: Sequence[Member]) -> tuple[Tensor, Tensor, Tensor]:
    """lr_mul, follows and own_decay of every piece, (K,).

    The decay of piece k is lr lr_mul[k] (weight_decay follows[k] + own_decay[k]).
    """
    pieces = [member.piece for member in members]
    rows = (
        [piece.lr_mul for piece in pieces],
        [piece.weight_decay is None for piece in pieces],
        [piece.weight_decay or 0.0 for piece in pieces],
    )
    return torch.tensor(rows, dtype=torch.float64).unbind()
