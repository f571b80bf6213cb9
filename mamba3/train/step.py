"""TrainStep: one optimizer step, from a batch to changed weights, without a wait of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from mamba3.data.problems import Batch
from mamba3.optim import HybridOptimizer
from mamba3.optim.pieces import by_dtype, is_dtensor, local, norms
from mamba3.train.parallel import GradientSum, Ranks, on_stream, whole
from mamba3.train.parts import Part, split
from mamba3.train.precision import LossScaler, autocast

# What a step marks for profilers.
RANGES = ("forward", "backward", "clipping", "optimizer")


class StepOutput(NamedTuple):
    """What a step came to, on the device.

    Fields:
        loss: mean cross-entropy over the batch's scored tokens, before the step.
        grad_norm: of all gradients together, before they were clipped.
    """

    loss: Tensor
    grad_norm: Tensor


class TrainStep:
    """Forward, backward, clipping and optimizer, for batches in one or more parts.

    Args:
        model: a `Mamba3LM`, or what calls one.
        optimizer: of its parameters. It leaves out steps whose gradients are not finite.
        precision: of `precision.PRECISIONS`.
        grad_clip: largest norm of the gradient; larger ones are scaled down to it. None clips
            nothing.
        accumulate: parts that a rank's rows are computed in, one after the other.
        ranks: of this run, each of which computes its rows of every batch; None is one.
        forward: what computes the loss, where that is a wrapper of the model.
        stream: of a GPU to run on; None is the current one.
        optimizer_clips: the optimizer averages the gradients, and clips what comes of them.
        exchange: adds up the ranks' gradients after the backward pass; None where they are averaged
            in it, or by the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        *,
        precision: str = "float32",
        grad_clip: float | None = 1.0,
        accumulate: int = 1,
        ranks: Ranks | None = None,
        forward: nn.Module | None = None,
        stream: torch.cuda.Stream | None = None,
        optimizer_clips: bool = False,
        exchange: GradientSum | None = None,
    ):
        self.model, self.optimizer, self.ranks = model, optimizer, ranks or Ranks()
        self.forward = model if forward is None else forward
        self.stream, self.optimizer_clips, self.exchange = stream, optimizer_clips, exchange
        self.precision, self.grad_clip, self.accumulate = precision, grad_clip, accumulate
        self.device = next(model.parameters()).device
        self.scaler = LossScaler(self.device) if precision == "fp16" else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    @property
    def recordable(self) -> bool:
        """Whether the host need not know what ranks exchange, as `fully_shard` has it do."""
        spread = hasattr(self.forward, "set_requires_gradient_sync")
        return self.optimizer.recordable and not spread

    def parts(self, batch: Batch) -> tuple[Part, ...]:
        """This rank's parts of a batch, on the device; one on the host is copied without a wait."""
        rank, world = self.ranks
        parts = split(batch, rank, world, self.accumulate).parts
        return tuple(Part(*map(self._moved, part)) for part in parts)

    def __call__(self, batch: Batch) -> StepOutput:
        """Make a step on a batch."""
        return self.make(self.parts(batch))

    def make(self, parts: Sequence[Part]) -> StepOutput:
        """Make a step on parts that are on the device."""
        self.optimizer.advance()
        return self.run(parts)

    def run(self, parts: Sequence[Part]) -> StepOutput:
        """The device's work of a step, after `optimizer.advance()`."""
        with on_stream(self.stream):
            return self._run(parts)

    def _run(self, parts: Sequence[Part]) -> StepOutput:
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in parts:
            last = part is parts[-1]
            with (
                self._exchange(last),
                autocast(self.precision, self.device),
                record_function("forward"),
            ):
                loss = self.forward(**part.inputs, return_logits=False).loss
                loss = loss * part.share
                losses.append(loss.detach())
                if self.exchange is None:
                    # Ranks average their gradients, and the batch's is their sum.
                    loss = loss * self.ranks.world
            with self._exchange(last), record_function("backward"):
                (loss if self.scaler is None else self.scaler.scaled(loss)).backward()
                if last and self.exchange is not None:
                    self.exchange()
        norm = finite = None
        if not self.optimizer_clips:
            with record_function("clipping"):
                norm = self._clip()
                finite = torch.isfinite(norm)
        with record_function("optimizer"):
            self.optimizer.update(finite)
        if self.optimizer_clips:
            norm = self.optimizer.grad_norm
        return StepOutput(self.ranks.sum(torch.stack(losses).sum()), norm)

    @torch.no_grad()
    def _clip(self) -> Tensor:
        """The gradients' norm; they are scaled down to the largest that is allowed."""
        if self.exchange is None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
        else:
            gradients = self.exchange.sums
        norm, factor = _norm(gradients), None
        if self.scaler is not None:
            factor = 1 / self.scaler.scale
            norm = norm * factor
            self.scaler.update(torch.isfinite(norm))
        if self.grad_clip is not None:
            # As `clip_grad_norm_` has it.
            clip = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        if self.exchange is not None:
            self.exchange.finish(factor)
        elif factor is not None:
            for dtype, those in by_dtype(map(local, gradients)).items():
                torch._foreach_mul_(those, factor.to(dtype))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and, in float16, the loss scale."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; what else it holds is left alone."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _exchange(self, last: bool) -> AbstractContextManager:
        """Ranks exchange gradients in the backward pass of the last part alone."""
        if hasattr(self.forward, "set_requires_gradient_sync"):  # fully_shard's
            self.forward.set_requires_gradient_sync(last)
        no_sync = getattr(self.forward, "no_sync", None)  # DistributedDataParallel's
        return contextlib.nullcontext() if last or no_sync is None else no_sync()

    def _moved(self, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        # Only from pinned memory does a copy not wait.
        t = t.pin_memory() if self.device.type == "cuda" and not t.is_cuda else t
        return t.to(self.device, non_blocking=True)


def _norm(gradients: list[Tensor]) -> Tensor:
    """Of all together, at least in float32."""
    if any(map(is_dtensor, gradients)):
        return whole(nn.utils.get_total_norm(gradients))
    return torch.linalg.vector_norm(norms(gradients))
