"""TrainStep: one optimizer step, from a batch to changed weights, which the host waits for nowhere.

loss of part i      mean over its scored tokens, times its share of all scored tokens
gradient            the sum over parts: that of the whole batch's mean
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from mamba3.data.problems import Batch
from mamba3.models.lm import IGNORE
from mamba3.optim import HybridOptimizer
from mamba3.train.parallel import Ranks
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


class Part(NamedTuple):
    """Rows of a batch on the device, and their share of the scored tokens, of no dimension.

    seq_idx tells documents that are packed in a row apart, where there are any.
    """

    input_ids: Tensor
    labels: Tensor
    share: Tensor
    seq_idx: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [t for t in self if t is not None]


class TrainStep:
    """Forward, backward, clipping and optimizer, for batches in one or more parts.

    Args:
        model: a `Mamba3LM`, or what calls one.
        optimizer: of its parameters. It leaves out steps whose gradients are not finite.
        precision: of `precision.PRECISIONS`.
        grad_clip: largest norm of the gradient; larger ones are scaled down to it.
        accumulate: parts that a rank's rows are computed in, one after the other.
        ranks: of this run, each of which computes its rows of every batch; None is one.

    Raises:
        ValueError: in a step: a batch of fewer rows than there are ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        *,
        precision: str = "float32",
        grad_clip: float = 1.0,
        accumulate: int = 1,
        ranks: Ranks | None = None,
    ):
        self.model, self.optimizer, self.ranks = model, optimizer, ranks or Ranks()
        self._forward = model
        if self.ranks.world > 1:
            # Buckets are the gradients, which are then not copied.
            self._forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.precision, self.grad_clip, self.accumulate = precision, grad_clip, accumulate
        self.device = next(model.parameters()).device
        self.scaler = LossScaler(self.device) if precision == "fp16" else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def parts(self, batch: Batch) -> list[Part]:
        """This rank's rows, in `accumulate` parts of as equal sizes as can be, on the device.

        A batch that is on the host is taken over without a wait.
        """
        rank, world = self.ranks
        if len(batch.input_ids) < world:
            raise ValueError(
                f"a batch of {len(batch.input_ids)} rows cannot be shared by {world} ranks: raise "
                "data.batch_size, or start fewer"
            )
        ids, labels, documents = (
            [None] * self.accumulate
            if t is None
            else list(t.tensor_split(world)[rank].tensor_split(self.accumulate))
            for t in (batch.input_ids, batch.labels, batch.seq_idx)
        )
        counts = torch.stack([_scored(*part) for part in zip(labels, documents, strict=True)])
        # A batch in which nothing is scored has a loss of nan, as its mean.
        shares = (counts / _scored(batch.labels, batch.seq_idx)).to(torch.float32)
        # Parts without a scored token, whose mean is nan, are left out. Where that would be all,
        # another rank may have some: this one takes part with any loss, of which its share is 0.
        present = [i for i, count in enumerate(counts) if count]
        if not present:
            present, labels[0] = [0], ids[0]
        every = (ids, labels, shares, documents)
        return [Part(*(self._moved(those[i]) for those in every)) for i in present]

    def __call__(self, batch: Batch) -> StepOutput:
        """Make a step."""
        self.optimizer.advance()
        return self.run(self.parts(batch))

    def run(self, parts: list[Part]) -> StepOutput:
        """The device's work of a step, after `optimizer.advance()`."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in parts:
            last = part is parts[-1]
            with (
                self._without_exchange(last),
                autocast(self.precision, self.device),
                record_function("forward"),
            ):
                loss = self._forward(
                    part.input_ids, labels=part.labels, seq_idx=part.seq_idx, return_logits=False
                ).loss
                loss = loss * part.share
                losses.append(loss.detach())
                # Ranks average their gradients, and the batch's is their sum.
                loss = loss * self.ranks.world
            with self._without_exchange(last), record_function("backward"):
                (loss if self.scaler is None else self.scaler.scaled(loss)).backward()
        with record_function("clipping"):
            norm = self._clip()
        with record_function("optimizer"):
            self.optimizer.update()
        return StepOutput(self.ranks.sum(torch.stack(losses).sum()), norm)

    def _clip(self) -> Tensor:
        """The gradients' norm; they are scaled down to the largest that is allowed."""
        if self.scaler is not None:
            self.scaler.unscale([p.grad for p in self._parameters if p.grad is not None])
        norm = nn.utils.clip_grad_norm_(self._parameters, self.grad_clip)
        if self.scaler is not None:
            self.scaler.update(torch.isfinite(norm))
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

    def _without_exchange(self, last: bool) -> AbstractContextManager:
        """Where gradients stay on their rank: in all parts but the last."""
        no_sync = getattr(self._forward, "no_sync", None)
        return contextlib.nullcontext() if last or no_sync is None else no_sync()

    def _moved(self, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        # Only from pinned memory does a copy not wait.
        t = t.pin_memory() if self.device.type == "cuda" and not t.is_cuda else t
        return t.to(self.device, non_blocking=True)


def _scored(labels: Tensor, documents: Tensor | None) -> Tensor:
    """How many tokens of (B, L) labels are scored: the first of a row or a document is not."""
    scored = labels[:, 1:] != IGNORE
    if documents is not None:
        scored &= documents[:, 1:] == documents[:, :-1]
    return scored.sum()
