"""TrainStep: one optimizer step, from a batch to changed weights, which the host waits for nowhere.

loss of part i      mean over its scored tokens, times its share of all scored tokens
gradient            the sum over parts: that of the whole batch's mean
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mamba3.data.problems import Batch
from mamba3.models.lm import IGNORE
from mamba3.optim import HybridOptimizer
from mamba3.train.precision import LossScaler, autocast


class StepOutput(NamedTuple):
    """What a step came to, on the device.

    Fields:
        loss: mean cross-entropy over the batch's scored tokens, before the step.
        grad_norm: of all gradients together, before they were clipped.
    """

    loss: Tensor
    grad_norm: Tensor


class Part(NamedTuple):
    """Rows of a batch on the device, and their share of the scored tokens, of no dimension."""

    input_ids: Tensor
    labels: Tensor
    share: Tensor


class TrainStep:
    """Forward, backward, clipping and optimizer, for batches in one or more parts.

    Args:
        model: a `Mamba3LM`, or what calls one.
        optimizer: of its parameters. It leaves out steps whose gradients are not finite.
        precision: of `precision.PRECISIONS`.
        grad_clip: largest norm of the gradient; larger ones are scaled down to it.
        accumulate: parts that a batch is computed in, one after the other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        *,
        precision: str = "float32",
        grad_clip: float = 1.0,
        accumulate: int = 1,
    ):
        self.model, self.optimizer = model, optimizer
        self.precision, self.grad_clip, self.accumulate = precision, grad_clip, accumulate
        self.device = next(model.parameters()).device
        self.scaler = LossScaler(self.device) if precision == "fp16" else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def parts(self, batch: Batch) -> list[Part]:
        """A batch's rows in `accumulate` parts of as equal sizes as can be, on the device."""
        ids = batch.input_ids.chunk(self.accumulate)
        labels = batch.labels.chunk(self.accumulate)
        counts = torch.stack([(part[:, 1:] != IGNORE).sum() for part in labels])
        # A batch in which nothing is scored has a loss of nan, as its mean.
        shares = (counts / counts.sum()).to(torch.float32)
        # Parts without a scored token, whose mean is nan, are left out.
        present = [i for i in range(len(ids)) if len(ids) == 1 or counts[i]]
        moved = self._moved
        return [Part(moved(ids[i]), moved(labels[i]), moved(shares[i])) for i in present]

    def __call__(self, batch: Batch) -> StepOutput:
        """Make a step."""
        self.optimizer.advance()
        return self.run(self.parts(batch))

    def run(self, parts: list[Part]) -> StepOutput:
        """The device's work of a step, after `optimizer.advance()`."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in parts:
            with autocast(self.precision, self.device):
                loss = self.model(part.input_ids, labels=part.labels, return_logits=False).loss
            loss = loss * part.share
            (loss if self.scaler is None else self.scaler.scaled(loss)).backward()
            losses.append(loss.detach())
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.grad_clip)
        if self.scaler is not None:
            self.scaler.update(torch.isfinite(norm))
        self.optimizer.update()
        return StepOutput(torch.stack(losses).sum(), norm)

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

    def _moved(self, t: Tensor) -> Tensor:
        return t.to(self.device, non_blocking=True)
