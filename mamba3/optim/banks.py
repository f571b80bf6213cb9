"""MuonBank: matrices of one shape, which are orthogonalised together, with their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import dispatch
from . import rules
from .orthogonalize import lr_factor, orthogonalize, product_dtype
from .pieces import Gradients, Member, Numbers, Options, is_dtensor, numbers_of, wide
from .rules import Scalar

# Elements of the matrices that are worked on at a time: bounds the float32 copies of a step.
PART_ELEMENTS = 1 << 28


class MuonBank:
    """Matrices of one shape, dtype and device, orthogonalised in one batch.

    Args:
        members: the matrices.
        options: of the optimizer.
    """

    def __init__(self, members: Sequence[Member], options: Options):
        self.members, self.options = list(members), options
        first = members[0].weight
        self.shape = (len(members), *first.shape)
        like = {"device": first.device, "dtype": wide(first.dtype)}
        self.fast = torch.zeros(self.shape, **like)
        self.slow = None if options.rails is None else torch.zeros(self.shape, **like)
        lanes = (len(members), max(first.shape))
        self.lanes = None if options.equalize is None else torch.zeros(lanes, **like)
        bits = {"device": first.device, "dtype": torch.int16}
        self.low = torch.zeros(self.shape, **bits) if options.extra_bits else None
        self.lr_mul, self.decay_mul, self.follows, self.own_decay = self.factors(like)

    def factors(self, like: Mapping[str, Any]) -> list[Tensor]:
        """lr_mul, decay_mul, follows and own_decay of every matrix, (K, 1, 1)."""
        factor = lr_factor(self.options.lr_rule, *self.members[0].piece.shape)
        lr_mul, follows, own = numbers_of(self.members)
        decay_mul = lr_mul * factor if self.options.decay_adjusted else lr_mul
        every = (lr_mul * factor, decay_mul, follows, own)
        return [t.to(**like)[:, None, None] for t in every]

    @property
    def device(self) -> torch.device:
        """Where the matrices are."""
        return self.fast.device

    @property
    def on_kernels(self) -> bool:
        """Whether momentum and weights are Triton's to change, which takes weights row by row."""
        return dispatch.on_kernels(self.fast) and all(
            member.parameter.is_contiguous() for member in self.members
        )

    @property
    def skips(self) -> bool:
        """Whether steps heed `Numbers.skip`; a class with steps of its own says so itself."""
        return self.on_kernels and type(self).step is MuonBank.step

    @property
    def limit(self) -> int:
        """How many matrices are worked on at a time."""
        return max(1, PART_ELEMENTS // (self.shape[1] * self.shape[2]))

    def states(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """Every member with its state by name, as views."""
        named = {"momentum": self.fast, "slow": self.slow, "lanes": self.lanes, "low": self.low}
        for i, member in enumerate(self.members):
            yield member, {name: t[i] for name, t in named.items() if t is not None}

    def step(self, gradients: Gradients, numbers: Numbers) -> None:
        """Update the matrices that have a gradient."""
        for part, grads in self.parts(gradients):
            u = self.orthogonal(*self.momentum_and_norm(part, grads, numbers))
            self.finish(part, u, numbers)

    def parts(self, gradients: Gradients) -> Iterator[tuple[slice, list[Tensor]]]:
        """Runs of consecutive matrices that have a gradient, none too large, with these."""
        grads = [gradients(member) for member in self.members]
        for part in _runs([grad is not None for grad in grads], self.limit):
            yield part, grads[part]

    def momentum_and_norm(
        self, part: slice, grads: Sequence[Tensor], numbers: Numbers
    ) -> tuple[Tensor, Tensor | None]:
        """What is to be orthogonalised, (k, m, n), and its norms (k, 1, 1).

        The norms are there where they come with it and are of use.
        """
        if not self.on_kernels:
            return self.average(part, torch.stack(list(grads)), numbers), None
        from .triton.updates import momentum

        dtype = product_dtype(self.fast, self.options.dtype)
        # float16 holds orthogonal matrices, not gradients; rows are brought to one norm exactly.
        if dtype == torch.float16 or self.options.row_equalize:
            dtype = torch.float32
        norm = not (self.options.trace_norm or self.options.row_equalize)
        return momentum(self, part, grads, numbers, dtype, norm)

    def average(self, place: slice, g: Tensor, numbers: Numbers) -> Tensor:
        """Take gradients up into the momentum at a place; returns what is to be orthogonalised."""
        options, fast = self.options, self.fast[place]
        g = g.to(fast.dtype)
        mu, nesterov = numbers.momentum, options.nesterov
        if self.slow is None:
            return rules.momentum_(g, fast, numbers.fast_beta, mu, nesterov)
        slow, beta = self.slow[place], options.rails.slow
        return rules.rails_(g, fast, slow, numbers.fast_beta, beta, numbers.share, mu, nesterov)

    def orthogonal(self, u: Tensor, norm: Tensor | None = None) -> Tensor:
        """The orthogonal updates of u, (k, m, n), of known norms or not: any matrices, no state."""
        options = self.options
        if options.row_equalize:
            u = rules.equalize_rows(u)
        return orthogonalize(
            u, options.preset, dtype=options.dtype, trace_norm=options.trace_norm, norm=norm
        )

    def equalized(self, part: slice, u: Tensor, skip: Scalar = 0.0) -> Tensor:
        """Orthogonal updates (k, m, n) with their lanes brought to one size, if that is asked."""
        if self.lanes is None:
            return u
        return rules.equalize_lanes_(u, self.lanes[part], self._lane_beta(skip))

    def _lane_beta(self, skip: Scalar) -> Scalar:
        # u is zero in a step that is left out, and 1 is the beta that keeps what there is.
        return 1 - (1 - self.options.equalize) * (1 - skip)

    def finish(self, part: slice, u: Tensor, numbers: Numbers) -> None:
        """Both of `equalized` and `apply`."""
        if self.lanes is None or not self.on_kernels:
            self.apply(part, self.equalized(part, u, numbers.skip), numbers)
            return
        from .triton.updates import apply, lane_squares

        beta = self._lane_beta(numbers.skip)
        factors = rules.lane_factors_(lane_squares(u), self.lanes[part], beta)
        apply(self, part, u, numbers, factors)

    def apply(self, part: slice, u: Tensor, numbers: Numbers) -> None:
        """Take updates (k, m, n) from the weights, and decay these."""
        if self.on_kernels:
            from .triton.updates import apply

            apply(self, part, u, numbers)
            return
        weights = [member.weight for member in self.members[part]]
        w = self.changed(part, torch.stack(weights), u, numbers)
        torch._foreach_copy_(weights, list(w.unbind()))

    def changed(self, place: slice, w: Tensor, u: Tensor, numbers: Numbers) -> Tensor:
        """The weights w at a place, decayed and less their updates."""
        w = w.to(self.fast.dtype) if self.low is None else rules.join_bits(w, self.low[place])
        decay = self.follows[place] * numbers.weight_decay + self.own_decay[place]
        aligned = None
        if self.options.cautious:
            aligned = u if self.slow is None else self.slow[place]
        rules.decay_(w, decay * self.decay_mul[place] * numbers.lr, aligned)
        w.sub_(u * (self.lr_mul[place] * numbers.lr))
        if self.low is not None:
            w, self.low[place] = rules.split_bits(w)
        return w


def make_bank(members: Sequence[Member], options: Options) -> MuonBank:
    """The bank for matrices of one kind, by how their parameters are stored."""
    if is_dtensor(members[0].parameter):
        from .dtensor import ShardedBank

        return ShardedBank(members, options)
    return MuonBank(members, options)


def _runs(present: list[bool], limit: int) -> Iterator[slice]:
    """Runs of consecutive true places, none longer than `limit`."""
    start = None
    for i, here in enumerate([*present, False]):
        if start is not None and (not here or i - start == limit):
            yield slice(start, i)
            start = None
        if here and start is None:
            start = i
