"""Readings: losses and norms on their way from the device to the log, which no step waits for."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from mamba3.train.log import MetricsLog
from mamba3.train.step import StepOutput

# Steps that the host may be ahead of the device.
AHEAD = 2
# Share of the time that is spent waiting for data from which it is shown.
WORTH_SAYING = 0.02


class _Pending(NamedTuple):
    step: int
    lr: float
    tokens: int
    data_wait_s: float
    values: Tensor  # loss and norm, on the host once the event has come
    event: torch.cuda.Event | None


class Readings:
    """Writes a line for every step, in order, as soon as its numbers are there.

    Args:
        log: gets loss, lr, grad_norm, tokens_per_s, and data_wait_s, the seconds that the step
            waited for its batch.
        bar: shows them.
        nonfinite: "stop" raises a RuntimeError at a loss or gradient that is not finite, whose step
            the optimizer has left out; "skip" goes on.
    """

    def __init__(self, log: MetricsLog, bar: tqdm, nonfinite: str = "stop"):
        self.log, self.bar, self.nonfinite = log, bar, nonfinite
        self.loss: float | None = None
        self.skipped = 0
        self._pending: deque[_Pending] = deque()
        self._last = self._began = time.perf_counter()
        self._waited = 0.0

    def add(
        self, step: int, output: StepOutput, *, lr: float, tokens: int, data_wait_s: float
    ) -> None:
        """Take a step's output up; write what has arrived, and wait for what is too far behind."""
        values, event = torch.stack(output), None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            event = torch.cuda.current_stream().record_event()
        self._pending.append(_Pending(step, lr, tokens, data_wait_s, values, event))
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
        loss, norm = pending.values.tolist()
        self._check(pending.step, loss, norm)
        now = time.perf_counter()
        speed = pending.tokens / (now - self._last)
        self._last, self.loss = now, loss
        self.log.write(
            pending.step,
            loss=loss,
            lr=pending.lr,
            grad_norm=norm,
            tokens_per_s=speed,
            data_wait_s=pending.data_wait_s,
        )
        self._waited += pending.data_wait_s
        text = f"loss {loss:.4f}, lr {pending.lr:.1e}, {speed:,.0f} tokens/s"
        share = self._waited / (now - self._began)
        if share > WORTH_SAYING:
            text += f", {share:.0%} waiting for data"
        self.bar.set_postfix_str(
            f"{text}, {self.skipped} skipped" if self.skipped else text, refresh=False
        )
        self.bar.update()

    def _check(self, step: int, loss: float, norm: float) -> None:
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if math.isfinite(value):
                continue
            if self.nonfinite == "skip":
                self.skipped += 1
                return
            raise RuntimeError(
                f"the {what} is {value} at step {step} (batch {step - 1}); training stopped, that "
                "step changed no weight, and the last checkpoint stays. Try a smaller optim.lr or "
                "optim.grad_clip, or step.nonfinite=skip"
            )
