"""Pieces that are stepped together, with their state: banks of same-shape matrices, AdamW's lists.

Nothing here knows parameter groups: a step is given the numbers of the moment (`Numbers`), and
finds gradients by a function, so that whoever owns the bank decides where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..ops import dispatch
from . import rules
from .orthogonalize import check_preset, lr_factor, orthogonalize, product_dtype
from .param_groups import Piece
from .rules import Rails, Scalar

if TYPE_CHECKING:
    from .triton.adamw import Layout

# Elements of the matrices that are worked on at a time: bounds the float32 copies of a step.
PART_ELEMENTS = 1 << 28


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


# The gradient of a member's rows; None where there is none.
Gradients = Callable[[Member], Tensor | None]


def own_gradient(member: Member) -> Tensor | None:
    """The rows of the parameter's own gradient."""
    grad = member.parameter.grad
    return None if grad is None else member.rows(grad)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the state of weights in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


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
        lr_mul, follows, own = _numbers_of(self.members)
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

    def momentum(self, part: slice, grads: Sequence[Tensor], numbers: Numbers) -> Tensor:
        """What is to be orthogonalised, (k, m, n)."""
        return self.momentum_and_norm(part, grads, numbers)[0]

    def momentum_and_norm(
        self, part: slice, grads: Sequence[Tensor], numbers: Numbers
    ) -> tuple[Tensor, Tensor | None]:
        """The same, and its norms (k, 1, 1) where they come with it and are of use."""
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


class AdamWPiece:
    """A piece that AdamW trains, and its state."""

    def __init__(self, member: Member, options: Options, count: Tensor):
        self.member, self.options, self.count = member, options, count
        weight = member.weight
        like = {"device": weight.device, "dtype": wide(weight.dtype)}
        self.average = torch.zeros(weight.shape, **like)
        self.square = torch.zeros(weight.shape, **like)
        every = options.adam_every
        self.kept = torch.zeros(weight.shape, **like) if every > 1 else None
        bits = options.extra_bits and weight.dtype == torch.bfloat16
        self.low = torch.zeros_like(weight, dtype=torch.int16) if bits else None

    def state(self) -> dict[str, Tensor]:
        """The state by name."""
        named = {
            "exp_avg": self.average,
            "exp_avg_sq": self.square,
            "step": self.count,
            "kept": self.kept,
            "low": self.low,
        }
        return {name: t for name, t in named.items() if t is not None}

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel does all that is asked for."""
        weight = self.member.weight
        same = weight.dtype == self.average.dtype and weight.device.type in ("cpu", "cuda")
        # It takes all tensors as they lie in memory, and the state lies row by row.
        same = same and weight.is_contiguous()
        return same and self.low is None and not self.options.cautious

    def step(self, grad: Tensor, lr: Scalar, decay: Scalar, betas, eps: float) -> None:
        """One step in plain operations."""
        weight = self.member.weight
        dtype = self.average.dtype
        w = weight.to(dtype) if self.low is None else rules.join_bits(weight, self.low)
        rules.adamw_(
            w, grad.to(dtype), self.average, self.square, self.count, lr, decay, betas, eps,
            self.options.cautious,
        )  # fmt: skip
        if self.low is not None:
            w, low = rules.split_bits(w)
            self.low.copy_(low)
        if w is not weight:
            weight.copy_(w)


class AdamWList:
    """AdamW's pieces on one device, of one dtype."""

    def __init__(self, members: Sequence[Member], options: Options):
        weight = members[0].weight
        self.members, self.options, self.device = list(members), options, weight.device
        self.counts = torch.zeros(len(members), device=weight.device, dtype=torch.float32)
        self.pieces = [
            AdamWPiece(member, options, count)
            for member, count in zip(members, self.counts.unbind(), strict=True)
        ]
        self.lr_mul, self.follows, self.own_decay = (
            t.to(weight.device, wide(weight.dtype)) for t in _numbers_of(members)
        )
        if self.on_kernels:
            _ = self.layout  # which a step could not make while it is captured

    @property
    def on_kernels(self) -> bool:
        """Whether Triton makes the steps, which takes weights row by row."""
        return dispatch.on_kernels(self.pieces[0].average) and all(
            member.parameter.is_contiguous() for member in self.members
        )

    @property
    def skips(self) -> bool:
        """Whether steps heed `Numbers.skip`."""
        return self.on_kernels

    @cached_property
    def layout(self) -> Layout:
        """What the kernels know of the pieces."""
        from .triton.adamw import Layout

        return Layout.of(self.pieces, self.device)

    def states(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """Every member with its state by name."""
        for piece in self.pieces:
            yield piece.member, piece.state()

    def step(
        self, gradients: Gradients, numbers: Numbers, betas: tuple[float, float], eps: float,
        active: bool = True,
    ) -> None:  # fmt: skip
        """Update the pieces that have a gradient, or keep it for the next active step."""
        grads = [gradients(member) for member in self.members]
        if self.on_kernels:
            from .triton.adamw import step

            step(self, grads, numbers, betas, eps, active)
        elif active:
            self._step(grads, numbers, betas, eps)
        else:
            for piece, grad in zip(self.pieces, grads, strict=True):
                if grad is not None:
                    piece.kept.add_(grad)

    def _step(
        self, grads: Sequence[Tensor | None], numbers: Numbers, betas: tuple[float, float],
        eps: float,
    ) -> None:  # fmt: skip
        """An active step without Triton."""
        together: dict[tuple, list[tuple[AdamWPiece, Tensor]]] = {}
        for piece, grad in zip(self.pieces, grads, strict=True):
            if piece.kept is not None:
                # A gradient of an earlier step is one, too.
                grad = piece.kept if grad is None else piece.kept + grad
            if grad is None:
                continue
            facts = piece.member.piece
            key = (piece.fused, facts.lr_mul, facts.weight_decay)
            together.setdefault(key, []).append((piece, grad))
        for (fused, lr_mul, own_decay), those in together.items():
            lr = numbers.lr * lr_mul
            decay = numbers.weight_decay if own_decay is None else own_decay
            # A number 0 says that there is nothing to do; 0 in a device scalar would not.
            decay = lr * decay if isinstance(decay, Tensor) or decay else 0.0
            if fused:
                pieces, found = zip(*those, strict=True)
                _fused(pieces, found, lr, decay, betas, eps)
                continue
            for piece, grad in those:
                piece.step(grad, lr, decay, betas, eps)
        for piece in self.pieces:
            if piece.kept is not None:
                piece.kept.zero_()


def make_bank(members: Sequence[Member], options: Options) -> MuonBank:
    """The bank for matrices of one kind, by how their parameters are stored."""
    if is_dtensor(members[0].parameter):
        from .dtensor import ShardedBank

        return ShardedBank(members, options)
    return MuonBank(members, options)


def _numbers_of(members: Sequence[Member]) -> tuple[Tensor, Tensor, Tensor]:
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


def _fused(
    pieces: Sequence[AdamWPiece],
    grads: Sequence[Tensor],
    lr: Scalar,
    decay: Scalar,
    betas: tuple[float, float],
    eps: float,
) -> None:
    weights = [piece.member.weight for piece in pieces]
    # By itself, since the kernel takes the decay as a number, which a CUDA graph would freeze.
    if isinstance(decay, Tensor) or decay:
        torch._foreach_mul_(weights, 1 - decay)
    dtype = pieces[0].average.dtype
    adamw(
        weights,
        [grad.to(dtype).contiguous() for grad in grads],
        [piece.average for piece in pieces],
        [piece.square for piece in pieces],
        [],
        [piece.count for piece in pieces],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )


def _runs(present: list[bool], limit: int) -> Iterator[slice]:
    """Runs of consecutive true places, none longer than `limit`."""
    start = None
    for i, here in enumerate([*present, False]):
        if start is not None and (not here or i - start == limit):
            yield slice(start, i)
            start = None
        if here and start is None:
            start = i
