"""The hybrid optimizer's step on several GPUs: time, and how much of the exchange is hidden.

    torchrun --standalone --nproc-per-node=2 scripts/bench_ranks.py [--quick] [--trace FILE]

The matrices are those of `bench_optimizer.py`. First, one step of every mode is compared with that
of one process whose gradients are the mean of the ranks'. Then whole steps are timed, and one is
traced: "hidden" is the share of NCCL's time in which other kernels run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench_optimizer import LAYERS, model_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mamba3.optim import HybridOptimizer, Replicated, Sharded

MODES = {"one rank": None, "Sharded": Sharded, "Replicated": Replicated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two layers in place of 24")
    parser.add_argument("--trace", help="write Sharded's step to this file, for chrome://tracing")
    args = parser.parse_args()
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        raise SystemExit("bench_ranks.py needs GPUs and torchrun, as in its first lines")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    show(f"{torch.cuda.get_device_name()} x {dist.get_world_size()}, torch {torch.__version__}")
    check()
    show("mode         step ms   NCCL ms   hidden")
    for name, mode in MODES.items():
        measure(name, mode, 2 if args.quick else LAYERS, args.trace if mode is Sharded else None)
    dist.destroy_process_group()


def show(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def optimizer_of(model: nn.Module, mode) -> HybridOptimizer:
    distributed = None if mode is None else mode()
    return HybridOptimizer(model, overrides={"*": "muon"}, distributed=distributed)


def seeded(layers: int) -> nn.ParameterList:
    """The same matrices on every rank, with gradients of its own."""
    torch.manual_seed(0)
    model = model_of(layers)
    torch.manual_seed(1 + dist.get_rank())
    for parameter in model:
        parameter.grad.normal_()
    return model


def check() -> None:
    """Exits if a mode's step is not that of one process."""
    weights = {}
    for name, mode in MODES.items():
        model = seeded(1)
        if mode is not Sharded:
            for parameter in model:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        before = [parameter.detach().clone() for parameter in model]
        optimizer_of(model, mode).step()
        weights[name] = [p.detach() - old for p, old in zip(model, before, strict=True)]
    for name, changes in weights.items():
        pairs = zip(changes, weights["one rank"], strict=True)
        off = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        # The ranks' batches are smaller, and products of other sizes round otherwise.
        if not off < 0.01:
            raise SystemExit(f"{name}: a step is off by {off:.1e}; not timing it")
        show(f"{name}: off by {off:.1e}")


def measure(name: str, mode, layers: int, trace: str | None) -> None:
    """Print a row."""
    optimizer = optimizer_of(seeded(layers), mode)
    times = []
    for _ in range(8):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    text = f"{name:10}  {statistics.median(times[3:]):8.1f}"
    if mode is None:
        show(text)
        return
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        optimizer.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace if trace and dist.get_rank() == 0 else f"{folder}/trace.json"
        traced.export_chrome_trace(path)
        nccl, hidden = overlap(json.loads(Path(path).read_text())["traceEvents"])
    show(f"{text}  {nccl:8.1f}  {hidden:7.0%}")


def overlap(events: list[dict]) -> tuple[float, float]:
    """Milliseconds in which NCCL's kernels run, and the share of them in which others do, too."""
    spans: dict[bool, list] = {True: [], False: []}
    for event in events:
        if event.get("cat") == "kernel":
            span = event["ts"], event["ts"] + event["dur"]
            spans["nccl" in event["name"].lower()].append(span)
    nccl, others = (merged(spans[kind]) for kind in (True, False))
    total = sum(stop - start for start, stop in nccl)
    shared = sum(
        max(0.0, min(a_stop, b_stop) - max(a_start, b_start))
        for a_start, a_stop in nccl
        for b_start, b_stop in others
    )
    return total / 1e3, shared / max(total, 1e-9)


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that do not overlap, and cover the same time."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


if __name__ == "__main__":
    main()
