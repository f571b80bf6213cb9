"""AdamWList: the pieces that AdamW trains, stepped in one launch where that can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..ops import dispatch
from . import rules
from .pieces import Gradients, Member, Numbers, Options, numbers_of, wide
from .rules import Scalar

if TYPE_CHECKING:
    from .triton.adamw import Layout


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
            t.to(weight.device, wide(weight.dtype)) for t in numbers_of(members)
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
