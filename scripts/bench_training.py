"""Training steps of the 187M models on GPUs: what each remedy gives in time and memory.

    python scripts/bench_training.py [--form siso|mimo] [--batch 8] [--length 2048] [--json FILE]
    torchrun --standalone --nproc-per-node=2 scripts/bench_training.py [--form siso]

The official 187M architectures, vocabulary 128256, random tokens. The losses of eager and recorded
steps are compared to the last bit. Under torchrun, every rank first takes the steps of one GPU
alone, all at the same time; then all together take those of a batch that is as many times larger,
whose losses are compared with those of one GPU that computes it in as many parts.

first     seconds of the first step; what it compiles may be there from an earlier row or run
step      milliseconds of a step, one behind the other, as in training
host      median milliseconds that the host takes of a step until it may go on, the GPU being idle
backward  of these, what it takes in the backward pass
peak      GB allocated at most: by the first steps for recorded ones, which hold it from then on
requests  tensors a step that the allocator was asked for
mallocs   calls of cudaMalloc: in the first steps, and a step of those that are timed
busy      share of the time in which the GPU runs a kernel
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data.loader import AsyncBatches
from mamba3.data.problems import Batch
from mamba3.data.text import TokenStream
from mamba3.train import memory
from mamba3.train.config import OptimRecipe, StepRecipe, load_recipe
from mamba3.train.loop import make_step
from mamba3.train.parallel import Ranks
from mamba3.train.parts import RankParts
from mamba3.train.profile import busy_share
from mamba3.train.step_cache import CachedStep
from mamba3.train.tasks import task_of

COMMON = {"vocab_size": 128256, "d_model": 768, "n_layer": 12, "headdim": 64, "d_state": 128}
FORMS = {
    "siso": {"d_intermediate": 1536},
    "mimo": {"d_intermediate": 1280, "is_mimo": True, "mimo_rank": 4},
}
EAGER = {"precision": "bf16", "cache_steps": False}
ROWS = {
    "float32": ("adamw", {"precision": "float32", "cache_steps": False}),
    "bf16": ("adamw", EAGER),
    "bf16, compiled": ("adamw", EAGER | {"compile": True}),
    "bf16, recorded": ("adamw", {"precision": "bf16"}),
    "bf16, recorded, hybrid": ("hybrid", {"precision": "bf16"}),
    "bf16 weights, recorded": ("adamw", {"precision": "bf16-weights"}),
    "bf16, recorded, 2 parts": ("adamw", {"precision": "bf16", "accumulate": 2}),
    "bf16, recorded, selective": ("adamw", {"precision": "bf16", "recompute": "selective"}),
    "bf16, recorded, full": ("adamw", {"precision": "bf16", "recompute": "full"}),
}
TOGETHER = {
    "ddp, eager": ("adamw", EAGER),
    "ddp, recorded": ("adamw", {"precision": "bf16"}),
    "ddp, recorded, hybrid": ("hybrid", {"precision": "bf16"}),
    "ddp, recorded, bf16 weights": ("adamw", {"precision": "bf16-weights"}),
    "allreduce": ("adamw", {"precision": "bf16", "parallel": "allreduce"}),
    "allreduce in bf16": (
        "adamw",
        {"precision": "bf16", "parallel": "allreduce", "exchange": "bf16"},
    ),
    "allreduce in bf16, hybrid": (
        "hybrid",
        {"precision": "bf16", "parallel": "allreduce", "exchange": "bf16"},
    ),
    "allreduce, bf16 weights": (
        "adamw",
        {"precision": "bf16-weights", "parallel": "allreduce"},
    ),
    "sharded, hybrid": ("hybrid", {"precision": "bf16", "parallel": "sharded"}),
    "fsdp": ("adamw", {"precision": "bf16", "parallel": "fsdp"}),
}
TIMED = 20
WAITS = 100
RECIPES = Path(__file__).parents[1] / "configs" / "curriculum"


class Row(NamedTuple):
    form: str
    name: str
    first_s: float
    step_ms: float
    host_ms: float
    backward_ms: float
    tokens_per_s: float
    peak_gb: float
    requests: float
    first_mallocs: int
    mallocs: float
    busy: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--form", choices=FORMS, nargs="+", default=list(FORMS), help="which models"
    )
    parser.add_argument("--rows", nargs="+", help="which rows of the table, or data (all)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a GPU (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="of a sequence (%(default)s)")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_training.py needs a CUDA or ROCm GPU, and found none")
    memory.configure("cuda")
    ranks = Ranks()
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
    about = [time.strftime("%Y-%m-%d"), torch.cuda.get_device_name(), torch.__version__]
    show(ranks, f"{', '.join(about)}, {ranks.world} GPU(s)")
    head = "first s  step ms  host ms  backward   tokens/s  peak GB  requests      mallocs  busy"
    show(ranks, f"{'':32}  {head}   last loss")
    rows: list[Row] = []
    for form in args.form:
        if ranks.world > 1:
            rows += together(form, args, ranks)
        else:
            rows += alone(form, args)
    if ranks.world == 1 and (not args.rows or "data" in args.rows):
        data_waits(args)
    if args.json and ranks.first:
        rows_ = [row._asdict() for row in rows]
        Path(args.json).write_text(json.dumps({"about": about, "rows": rows_}, indent=1))
    if ranks.world > 1:
        dist.destroy_process_group()


def show(ranks: Ranks, text: str) -> None:
    if ranks.first:
        print(text, flush=True)


def alone(form: str, args) -> list[Row]:
    """One GPU: the remedies one after the other."""
    rows, losses = [], {}
    for name, (optimizer, how) in ROWS.items():
        if args.rows and name not in args.rows:
            continue
        row, losses[name] = measure(form, name, optimizer, how, args.batch, args.length)
        rows.append(row)
        print_row(row)
    if {"bf16", "bf16, recorded"} <= losses.keys():
        if not torch.equal(losses["bf16"], losses["bf16, recorded"]):
            raise SystemExit(f"{form}: recorded steps have other losses than eager ones")
        print(f"{form}: recorded steps have the losses of eager ones, bit for bit")
    return rows


def together(form: str, args, ranks: Ranks) -> list[Row]:
    """Several GPUs against one."""
    name, (optimizer, how) = "one GPU, recorded", ROWS["bf16, recorded"]
    one, _ = measure(form, name, optimizer, how, args.batch, args.length)
    show_row(ranks, one)
    slowest = torch.tensor(one.step_ms, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    show(ranks, f"{'':34}the slowest GPU alone: {slowest.item():.1f} ms")
    batch = args.batch * ranks.world
    wanted: dict[tuple[str, str], torch.Tensor] = {}
    rows = [one]
    for name, (optimizer, how) in TOGETHER.items():
        if args.rows and name not in args.rows:
            continue
        kind = optimizer, how["precision"]
        if kind not in wanted:
            parts = {"precision": kind[1], "accumulate": ranks.world}
            wanted[kind] = measure(form, "", optimizer, parts, batch, args.length, timed=4)[1]
        row, losses = measure(form, name, optimizer, how, batch, args.length, ranks)
        count = min(len(losses), len(wanted[kind]))
        apart = (losses[:count] / wanted[kind][:count] - 1).abs().max().item()
        show_row(ranks, row)
        ratio = row.tokens_per_s / one.tokens_per_s
        show(ranks, f"{'':34}{ratio:.3f} x one GPU; losses within {apart:.1e} over {count} steps")
        rows.append(row)
    return rows


def measure(
    form: str, name: str, optimizer: str, how: dict, rows: int, length: int,
    ranks: Ranks | None = None, timed: int = TIMED,
) -> tuple[Row, torch.Tensor]:  # fmt: skip
    """A row of the table, and all losses."""
    torch.cuda.empty_cache()
    recipe = StepRecipe(**how)
    torch.manual_seed(0)
    model = Mamba3LM(Mamba3Config(**COMMON, **FORMS[form]), device="cuda")
    step = make_step(model, OptimRecipe(lr=1e-4, name=optimizer), recipe, ranks)
    make = CachedStep(step, records=recipe.cache_steps)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(COMMON["vocab_size"], (rows, length), generator=generator) for _ in "1234"]
    parts = [step.parts(Batch(own, own, own.numel())) for own in ids]
    losses, hosts, backwards = [], [], []

    def one(index: int) -> float:
        with backward_time() as backward:
            torch.cuda.synchronize()
            began = time.perf_counter()
            output = make.make(parts[index % 4])
            hosts.append(time.perf_counter() - began)
            torch.cuda.synchronize()
        backwards.append(sum(backward))
        losses.append(output.loss.clone())
        return time.perf_counter() - began

    torch.cuda.reset_peak_memory_stats()
    before = memory.requests_and_mallocs()
    warm = make.warm_up + 2
    first_s = one(0)
    for index in range(1, warm):
        one(index)
    first = memory.requests_and_mallocs()
    for index in range(warm, warm + timed):
        one(index)
    last = memory.requests_and_mallocs()
    step.ranks.wait()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for index in range(timed):
        make.make(parts[index % 4])
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / timed
    return Row(
        form=form,
        name=name,
        first_s=first_s,
        step_ms=1e3 * step_s,
        host_ms=1e3 * statistics.median(hosts[warm:]),
        backward_ms=1e3 * statistics.median(backwards[warm:]),
        tokens_per_s=rows * length / step_s,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9,
        requests=(last[0] - first[0]) / timed,
        first_mallocs=first[1] - before[1],
        mallocs=(last[1] - first[1]) / timed,
        busy=busy(lambda index: make.make(parts[index % 4])),
        loss=losses[-1].item(),
    ), torch.stack(losses).cpu()


@contextlib.contextmanager
def backward_time() -> Iterator[list[float]]:
    """Seconds of the host in every backward pass inside."""
    spent, original = [], torch.Tensor.backward

    def timed(self, *args, **options):
        began = time.perf_counter()
        original(self, *args, **options)
        spent.append(time.perf_counter() - began)

    torch.Tensor.backward = timed
    try:
        yield spent
    finally:
        torch.Tensor.backward = original


def busy(make) -> float:
    """Share of a few steps, one behind the other, in which a kernel runs."""
    return busy_share(trace_events(lambda: [make(index) for index in range(3)]))


def trace_events(work: Callable) -> list[dict]:
    """The events of a trace of what the GPU does."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        return json.loads(Path(file.name).read_text())["traceEvents"]


def data_waits(args) -> None:
    """How long steps wait for their batches, made between them or by workers ahead of them."""
    recipe = load_recipe(RECIPES / "digits.yaml")
    task = task_of(recipe)
    model = recipe.architecture(task.vocab_size), recipe.optim, recipe.step
    wait("digits, 256 problems a step", *model, task.stream())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus"
        ids = np.random.default_rng(0).integers(COMMON["vocab_size"], size=20_000_000, dtype="u4")
        ids.tofile(f"{path}.bin")
        np.array([0, len(ids)], "i8").tofile(f"{path}.idx")
        facts = {"dtype": "uint32", "vocab_size": COMMON["vocab_size"], "n_tokens": len(ids)}
        facts |= {"n_documents": 1, "tokenizer": "none"}
        Path(f"{path}.json").write_text(json.dumps(facts))
        text = TokenStream(path, length=args.length, batch_size=args.batch, seed=0)
        config, how = Mamba3Config(**COMMON, **FORMS["siso"]), StepRecipe(precision="bf16")
        wait("187M siso, token file", config, OptimRecipe(lr=1e-4), how, text)


def wait(name: str, config: Mamba3Config, optim: OptimRecipe, how: StepRecipe, stream) -> None:
    torch.cuda.empty_cache()
    make = CachedStep(make_step(Mamba3LM(config, device="cuda"), optim, how))
    for workers in (0, 4):
        with AsyncBatches(RankParts(stream), workers=workers, device="cuda") as data:
            for _ in range(30):
                make.make(next(data).parts)
            torch.cuda.synchronize()
            data.waited_s()
            began, tokens = time.perf_counter(), 0
            for _ in range(WAITS):
                parts, n_tokens = next(data)
                make.make(parts)
                tokens += n_tokens
            torch.cuda.synchronize()
            spent = time.perf_counter() - began
            waited = data.waited_s() / spent
            print(
                f"{name:34}  {workers} workers  {1e3 * spent / WAITS:8.2f} ms a step  "
                f"{tokens / spent:11,.0f} tokens/s  {waited:6.1%} waiting for data",
                flush=True,
            )


def print_row(row: Row) -> None:
    print(
        f"{row.form} {row.name:27}  {row.first_s:7.1f}  {row.step_ms:7.1f}  {row.host_ms:7.2f}"
        f"  {row.backward_ms:8.2f}  {row.tokens_per_s:9,.0f}  {row.peak_gb:7.1f}"
        f"  {row.requests:8.0f}  {row.first_mallocs:6} {row.mallocs:4.1f}  {row.busy:5.1%}"
        f"  {row.loss:10.6f}",
        flush=True,
    )


def show_row(ranks: Ranks, row: Row) -> None:
    if ranks.first:
        print_row(row)


if __name__ == "__main__":
    main()
