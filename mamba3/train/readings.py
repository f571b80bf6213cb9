"""Readings: losses and norms on their way from the device to the log, which no step waits for."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from mamba3.train.config import StepRecipe
from mamba3.train.log import MetricsLog
from mamba3.train.spikes import SpikeDetector
from mamba3.train.step import StepOutput

# Steps that the host may be ahead of the device.
AHEAD = 2
# Share of the time that is spent waiting for data from which it is shown.
WORTH_SAYING = 0.02


# Times that a loss scale can be halved until it is 1.
HALVINGS = 24
# What is said of a batch that gives finite numbers when it is gone through once more: later steps
# may have changed the weights.
NOT_AGAIN = "it did not happen again when the batch was tried once more"


class NotFinite(RuntimeError):
    """A loss or gradient is NaN or infinite; its step changed no weight.

    Attributes:
        batch: number of the batch.
    """

    def __init__(self, what: str, step: int, batch: int, where: str = ""):
        super().__init__(
            f"the {what} at step {step} (batch {batch}){where}; training stopped, that step "
            "changed no weight, and the last checkpoint stays. Try a smaller optim.lr or "
            "optim.grad_clip, or step.nonfinite=skip"
        )
        self.what, self.step, self.batch = what, step, batch

    def at(self, where: str | None) -> NotFinite:
        """The same, with what was found out about the first bad tensor."""
        return NotFinite(self.what, self.step, self.batch, f": {where or NOT_AGAIN}")


class Spike(Exception):
    """The loss has jumped.

    Attributes:
        step: the last one whose loss is known.
    """

    def __init__(self, first: int, step: int, loss: float):
        super().__init__(f"the loss jumped at step {first}, and is {loss:.4g} at step {step}")
        self.step = step


class _Pending(NamedTuple):
    step: int
    lr: float
    tokens: int
    data_wait_s: float
    more: tuple[str, ...]
    values: Tensor  # loss, norm and more, on the host once the event has come
    event: torch.cuda.Event | None


class Readings:
    """Writes a line for every step, in order, as soon as its numbers are there.

    Args:
        log: gets loss, lr, grad_norm, tokens_per_s, and data_wait_s, the seconds that the step
            waited for its batch.
        bar: shows them.
        how: what is not finite, and what jumps, raises: a `NotFinite` unless such steps are to be
            skipped, whom the optimizer has left out in any case; a `Spike` if it is looked for.
        skipped: number of step n's batch is n - 1 + skipped.
        spikes: the losses before.
        mfu: share of the GPUs' arithmetic that a token a second makes use of; None shows none.
    """

    def __init__(
        self,
        log: MetricsLog,
        bar: tqdm,
        how: StepRecipe,
        *,
        skipped: int = 0,
        spikes: SpikeDetector | None = None,
        mfu: float | None = None,
    ):
        self.log, self.bar, self.how, self.skipped = log, bar, how, skipped
        self.spikes, self.mfu = spikes, mfu
        self.loss: float | None = None
        self.left_out = self._in_a_row = 0
        self._pending: deque[_Pending] = deque()
        self._last = self._began = time.perf_counter()
        self._waited = 0.0

    def add(
        self,
        step: int,
        output: StepOutput,
        *,
        lr: float,
        tokens: int,
        data_wait_s: float,
        more: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Take a step's output up; write what has arrived, and wait for what is too far behind.

        `more` are numbers on the device, which go into the log as well.
        """
        values, event = torch.stack([*output, *more.values()]), None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            event = torch.cuda.current_stream().record_event()
        self._pending.append(_Pending(step, lr, tokens, data_wait_s, tuple(more), values, event))
        self._write(keep=AHEAD)

    def finish(self) -> float | None:
        """Write all of them; returns the last loss."""
        self._write(keep=0)
        return self.loss

    def _write(self, keep: int) -> None:
        while self._pending:
            pending = self._pending[0]
            if pending.event is not None and not pending.event.query():
                if len(self._pending) <= keep:
                    return
                pending.event.synchronize()
            self._pending.popleft()
            self._write_one(pending)

    def _write_one(self, pending: _Pending) -> None:
        loss, norm, *more = pending.values.tolist()
        finite = self._check(pending.step, loss, norm)
        now = time.perf_counter()
        speed = pending.tokens / (now - self._last)
        self._last, self.loss = now, loss
        self._waited += pending.data_wait_s
        self.log.write(
            pending.step,
            loss=loss,
            lr=pending.lr,
            grad_norm=norm,
            tokens_per_s=speed,
            data_wait_s=pending.data_wait_s,
            **dict(zip(pending.more, more, strict=True)),
        )
        self.bar.set_postfix_str(self._text(pending, speed), refresh=False)
        self.bar.update()
        if finite and self.spikes is not None:
            first = self.spikes.update(pending.step, loss)
            if first is not None:
                raise Spike(first, pending.step, loss)

    def _text(self, pending: _Pending, speed: float) -> str:
        parts = [f"loss {self.loss:.4f}", f"lr {pending.lr:.1e}", f"{speed:,.0f} tokens/s"]
        if self.mfu is not None:
            parts.append(f"{self.mfu * speed:.0%} MFU")
        if pending.values.is_pinned():
            parts.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        share = self._waited / (self._last - self._began)
        if share > WORTH_SAYING:
            parts.append(f"{share:.0%} waiting for data")
        if self.left_out:
            parts.append(f"{self.left_out} skipped")
        return ", ".join(parts)

    def _check(self, step: int, loss: float, norm: float) -> bool:
        """Whether loss and norm are finite."""
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if math.isfinite(value):
                continue
            self._in_a_row += 1
            # Scaled gradients of float16 overflow now and then; the scale is halved, and the step
            # left out. No scale is too large after so many times.
            overflow = self.how.precision == "fp16" and math.isfinite(loss)
            if self.how.nonfinite == "skip" or (overflow and self._in_a_row <= HALVINGS):
                self.left_out += 1
                return False
            raise NotFinite(f"{name} is {value}", step, step - 1 + self.skipped)
        self._in_a_row = 0
        return True
