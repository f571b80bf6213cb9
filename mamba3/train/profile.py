"""Where the time of training steps goes: data, forward, backward, optimizer, kernels, gaps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiler

from mamba3.ops.dispatch import default_device
from mamba3.threads import limited_threads, worthwhile_threads
from mamba3.train.config import Recipe
from mamba3.train.loop import make_step
from mamba3.train.memory import requests_and_mallocs
from mamba3.train.run import build_model, own_rng
from mamba3.train.step import RANGES
from mamba3.train.step_cache import WARM_UP, CachedStep
from mamba3.train.tasks import task_of

TRACE_FILE = "trace.json"
DATA = "data"


class Spent(NamedTuple):
    """Milliseconds a step: of the host, and of the device where there is one."""

    host_ms: float
    device_ms: float | None


class Profile(NamedTuple):
    """Where steps spend their time.

    Fields:
        step_ms: wall time of a step as it is trained, recorded where that can be.
        eager_ms: of one that is not recorded, as `parts` and `kernels` are taken from.
        parts: data, forward, backward and optimizer.
        busy, eager_busy: shares of the time in which a kernel runs, in steps as they are trained
            and in eager ones; the rest are gaps, in which the GPU waits. None without a GPU.
        kernels: name, milliseconds a step and launches a step of those that take longest; on a CPU
            operations.
        requests: tensors that the allocator was asked for in an eager step; None without a GPU.
        mallocs: calls of cudaMalloc in the eager steps.
        trace: the Chrome trace of the eager steps.
    """

    step_ms: float
    eager_ms: float
    parts: dict[str, Spent]
    busy: float | None
    eager_busy: float | None
    kernels: list[tuple[str, float, float]]
    requests: float | None
    mallocs: int
    trace: str


def profile(recipe: Recipe, out: str | Path, *, steps: int = 10, kernels: int = 12) -> Profile:
    """Make a few steps of a recipe, which are not kept, and see what they spend their time on.

    Args:
        recipe: what to do.
        out: folder for the trace; it is made if needed.
        steps: steps to look at, after a few that warm up.
        kernels: how many of them to name.

    Raises:
        ValueError: `steps` is under 1; the recipe's model and data do not fit.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    task = task_of(recipe)
    with own_rng(recipe.train.seed):
        model = build_model(recipe, task)
        step = make_step(
            model.to(recipe.train.device or default_device()), recipe.optim, recipe.step
        )
        stream = task.stream()
        with limited_threads(recipe.train.threads or worthwhile_threads(model)):
            return _Looking(step, stream, Path(out), recipe.step.cache_steps).at(steps, kernels)


class _Looking:
    def __init__(self, step, stream, out: Path, cache: bool):
        self.step, self.stream, self.out, self.cache = step, stream, out, cache
        self.on_gpu = step.device.type == "cuda"

    def at(self, steps: int, kernels: int) -> Profile:
        make = CachedStep(self.step) if self.cache else self.step
        # One batch again and again: others may be of other lengths, which are recorded anew.
        batch = self.stream(0)
        self._timed(lambda: make(batch), WARM_UP + 2)
        step_ms = self._timed(lambda: make(batch), steps)
        self._timed(self._eager_step, 2)
        before = self._memory()
        eager_ms = self._timed(self._eager_step, steps)
        requests, mallocs = (b - a for a, b in zip(before, self._memory(), strict=True))
        self.out.mkdir(parents=True, exist_ok=True)
        trace = self.out / TRACE_FILE
        busy = None
        if self.on_gpu:
            # The trace is written over by that of eager steps, which tells more.
            busy = busy_share(self._traced(lambda: make(batch), steps, trace))
            with emit_nvtx():  # for nsys and ncu, where they look on
                self._timed(self._eager_step, 2)
        events = self._traced(self._eager_step, steps, trace)
        return Profile(
            step_ms=step_ms,
            eager_ms=eager_ms,
            parts=parts_of(events, steps, self.on_gpu),
            busy=busy,
            eager_busy=busy_share(events) if self.on_gpu else None,
            kernels=longest(events, "kernel" if self.on_gpu else "cpu_op", steps)[:kernels],
            requests=requests / steps if self.on_gpu else None,
            mallocs=mallocs,
            trace=str(trace),
        )

    def _eager_step(self) -> None:
        with record_function(DATA):
            batch = self.stream(0)
        self.step(batch)

    def _timed(self, function, times: int) -> float:
        """Milliseconds a call."""
        self._wait()
        began = time.perf_counter()
        for _ in range(times):
            function()
        self._wait()
        return 1e3 * (time.perf_counter() - began) / times

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _traced(self, function, times: int, path: Path) -> list[dict[str, Any]]:
        """What a profiler sees, written to a file, too."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        with profiler(activities=activities, acc_events=True) as seen:  # else torch 2.11 warns
            self._timed(function, times)
        seen.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]

    def _memory(self) -> tuple[int, int]:
        return requests_and_mallocs() if self.on_gpu else (0, 0)


def parts_of(events: Iterable[dict[str, Any]], steps: int, on_gpu: bool) -> dict[str, Spent]:
    """Milliseconds a step in each of the ranges that a step marks."""
    host: dict[str, float] = {}
    device: dict[str, float] = {}
    for event in events:
        into = {"user_annotation": host, "gpu_user_annotation": device}.get(event.get("cat"))
        if into is not None and event["name"] in (DATA, *RANGES):
            into[event["name"]] = into.get(event["name"], 0.0) + event["dur"] / 1e3 / steps
    return {
        name: Spent(host[name], device.get(name, 0.0) if on_gpu else None)
        for name in (DATA, *RANGES)
        if name in host
    }


def busy_share(events: Iterable[dict[str, Any]]) -> float:
    """Share of the time from the first kernel to the end of the last in which one runs."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
    busy, reached = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return busy / (reached - spans[0][0]) if spans else 0.0


def longest(
    events: Iterable[dict[str, Any]], kind: str, steps: int
) -> list[tuple[str, float, float]]:
    """Name, milliseconds and calls a step, what takes longest first."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == kind:
            entry = found.setdefault(event["name"], [0.0, 0])
            entry[0] += event["dur"] / 1e3 / steps
            entry[1] += 1 / steps
    return sorted(((n, ms, calls) for n, (ms, calls) in found.items()), key=lambda e: -e[1])
