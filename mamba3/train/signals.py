"""Asking a run to stop: the first SIGTERM or SIGINT ends it after a step, with its state saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A run was asked to stop, and did, with its state saved.

    Attributes:
        signum: the signal.
        step: steps made.
    """

    def __init__(self, signum: int, step: int, where: str):
        super().__init__(
            f"stopped by {signal.Signals(signum).name} after step {step}; the state is saved in "
            f"{where}, and the run goes on with resume (--resume)"
        )
        self.signum, self.step = signum, step


class StopSignals:
    """Takes note of the signals inside a `with` block; a second one interrupts at once.

    In a thread other than the main one, where Python has no signals, nothing is noted.
    """

    def __init__(self):
        self.received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signum
