"""Speed of the kernels on a GPU: checks the numbers, then times, then prints tables.

    python scripts/bench_gpu.py [--only decode|scan] [--official] [--quick] [--json FILE]

decode  One token for B=128 sequences, H=64 heads, P=64, N=128, bf16 inputs, state in float32 or
        bf16, SISO and MIMO R = 4, as a CUDA graph. The floor is the time this GPU takes to copy as
        many bytes as the state has: it must be read once and written once.
scan    Whole sequences, H=32, P=64, N=128, bf16 inputs with D and z, B and C shared by the heads:
        forward, forward + backward, the memory that takes beyond what was allocated before, and
        the first call of a process that finds nothing compiled.

Peers that can be imported are timed in the same run: `chunk_simple_gla` of flash-linear-attention
(the same recurrence without rotation and trapezoid, q and k per head), and with --official the
SISO kernels of mamba_ssm. They choose among their configurations at B=8, L=2048; all of those are
compiled beforehand by up to 16 processes at once, next to the first calls.

Times are medians of device events around whole calls, launches included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_peers import (
    OFFICIAL,
    PUBLISHED,
    PUBLISHED_FIRST_CALL_S,
    Timed,
    compile_part,
    importable,
    run_once,
    warm_up,
)
from torch import Tensor

from mamba3.ops import Mamba3State, mamba3_scan, mamba3_step, use_backend

BATCH, HEADS, HEADDIM, D_STATE = 128, 64, 64, 128
SCAN_HEADS = 32
RANKS = {"SISO": 1, "MIMO R=4": 4}
SHAPES = {
    "SISO": ((1, 2048), (1, 8192), (1, 32768), (8, 2048), (16, 4096), (64, 512)),
    "MIMO R=4": ((1, 2048), (8, 2048), (16, 4096)),
}
QUICK = ((1, 2048), (8, 2048))
OURS = "mamba3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("decode", "scan"), help="one section")
    parser.add_argument("--official", action="store_true", help="time mamba_ssm's kernels too")
    parser.add_argument("--quick", action="store_true", help="few shapes, no peers, no first calls")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--first-call", choices=RANKS, help=argparse.SUPPRESS)
    parser.add_argument("--compile-peers", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_gpu.py needs a CUDA or ROCm GPU, and found none")
    if args.official and importlib.util.find_spec("mamba_ssm") is None:
        raise SystemExit("--official needs mamba_ssm, which cannot be imported here")
    if args.first_call:
        print(first_call(args.first_call))
        return
    if args.compile_peers:
        compile_part(*args.compile_peers, args.official, scan_tensors(1, 1, 256))
        return
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(", ".join(results.values()))
    if args.only != "scan":
        results["decode"] = decode()
        print_decode(results["decode"])
    if args.only != "decode":
        with tempfile.TemporaryDirectory() as folder:
            results |= scan(Path(folder), args.official, args.quick)
        print_scan(results["scan"], results["scan_errors"])
        print_first_calls(results["first_call_s"])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


# decode


def token(rank: int, mimo: bool, state_dtype: torch.dtype) -> tuple[dict, Mamba3State]:
    """Random arguments of `mamba3_step` and a state."""

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device="cuda").to(dtype)

    per_head = (BATCH, HEADS)
    call = {
        "x": normal(*per_head, HEADDIM),
        "z": normal(*per_head, HEADDIM),
        "b": normal(BATCH, rank, 1, D_STATE),
        "c": normal(BATCH, rank, 1, D_STATE),
        "dt": torch.rand(per_head, device="cuda"),
        "a": -torch.rand(per_head, device="cuda"),
        "lam": torch.rand(per_head, device="cuda"),
        "rate": normal(BATCH, D_STATE // 4, dtype=torch.float32),
        "b_bias": normal(HEADS, rank, D_STATE, dtype=torch.float32),
        "c_bias": normal(HEADS, rank, D_STATE, dtype=torch.float32),
        "d": normal(HEADS, dtype=torch.float32),
    }
    if mimo:
        call["mimo"] = tuple(normal(HEADS, rank, HEADDIM, dtype=torch.float32) for _ in "xzo")
    state = Mamba3State(
        normal(*per_head, HEADDIM, D_STATE, dtype=state_dtype),
        normal(*per_head, D_STATE // 4, dtype=torch.float32),
        normal(BATCH, rank, HEADS, D_STATE, dtype=torch.float32),
        normal(*per_head, HEADDIM, dtype=torch.float32),
    )
    return call, state


def check_step(call: dict, state: Mamba3State) -> float:
    """Relative error of the output against the float64 reference."""

    def widen(t):
        return tuple(map(widen, t)) if isinstance(t, tuple) else t.double()

    y, _ = mamba3_step(**call, state=state)
    with use_backend("reference"):
        expected, _ = mamba3_step(
            **{name: widen(t) for name, t in call.items()}, state=state.to(torch.float64)
        )
    return error(y, expected)


def graph_ms(function, repeats: int = 50) -> float:
    """Median milliseconds of a replay of `function`, captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return median_ms(graph.replay, repeats)


@torch.inference_mode()
def decode() -> list[dict]:
    """One row a form and a state dtype."""
    rows = []
    for form, rank in RANKS.items():
        for dtype in (torch.float32, torch.bfloat16):
            call, state = token(rank, rank > 1, dtype)
            off = check_step(call, state)
            if not off < 5e-3:
                raise SystemExit(f"step {form}, {dtype}: relative error {off:.1e}; not timing it")
            copy = torch.empty_like(state.h)
            floor = graph_ms(lambda to=copy, h=state.h: to.copy_(h))
            step = graph_ms(lambda call=call, state=state: mamba3_step(**call, state=state))
            with use_backend("torch"):
                plain = graph_ms(lambda call=call, state=state: mamba3_step(**call, state=state))
            name = str(dtype).removeprefix("torch.")
            rows.append(
                {"form": form, "state": name, "error": off, "floor_ms": floor, "step_ms": step,
                 "torch_ms": plain, "ratio": step / floor}
            )  # fmt: skip
    return rows


# scan


def scan(folder: Path, official: bool, quick: bool) -> dict:
    """Rows a form, shape and implementation, and the seconds of first calls by form.

    Args:
        folder: empty, for what is compiled.
    """
    first_calls, peers = {}, {}
    if not quick:
        peers = importable(official)
        first_calls = compile_elsewhere(folder, peers, official)
    errors = {form: check_scan(form, rank) for form, rank in RANKS.items()}
    peers = warm_up(peers, tensors := scan_tensors(1, 8, 2048))
    if OFFICIAL in peers:
        with torch.no_grad():
            y, theirs = (make(tensors)[1]() for make in (ours, peers[OFFICIAL]))
        print(f"official output differs from ours by {error(theirs, y):.1e}")
    del tensors
    rows = []
    for form, rank in RANKS.items():
        for batch, length in QUICK if quick else SHAPES[form]:
            for by, function in {OURS: ours, **(peers if form == "SISO" else {})}.items():
                where = {"form": form, "batch": batch, "length": length, "by": by}
                rows.append(where | times(function, scan_tensors(rank, batch, length)))
            if (form, batch, length) in PUBLISHED:
                numbers = PUBLISHED[form, batch, length]
                names = ("forward_ms", "both_ms", "extra_mb")
                row = {"form": form, "batch": batch, "length": length, "by": "official, published"}
                rows.append(row | dict(zip(names, numbers, strict=True)))
    return {"scan": rows, "scan_errors": errors, "first_call_s": first_calls}


def scan_tensors(rank: int, batch: int, length: int) -> dict[str, Tensor]:
    """Random arguments of `mamba3_scan` by name, which all require gradients."""

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device="cuda").to(dtype)

    def uniform():
        return torch.rand(batch, length, SCAN_HEADS, device="cuda")

    values = (batch, length, SCAN_HEADS, HEADDIM)
    tensors = {
        "x": normal(*values),
        "b": normal(batch, length, rank, 1, D_STATE),
        "c": normal(batch, length, rank, 1, D_STATE),
        "dt": 0.1 * uniform(),
        "a": -0.1 - 4 * uniform(),
        "lam": uniform(),
        "rate": torch.pi * torch.tanh(normal(batch, length, D_STATE // 4, dtype=torch.float32)),
        "b_bias": normal(SCAN_HEADS, rank, D_STATE, dtype=torch.float32),
        "c_bias": normal(SCAN_HEADS, rank, D_STATE, dtype=torch.float32),
        "d": normal(SCAN_HEADS, dtype=torch.float32),
        "z": normal(*values),
    }
    if rank > 1:
        for stream in "xzo":
            tensors[f"mimo_{stream}"] = normal(SCAN_HEADS, rank, HEADDIM, dtype=torch.float32)
    return {name: t.requires_grad_() for name, t in tensors.items()}


def ours(tensors: dict[str, Tensor]) -> Timed:
    """mamba3_scan of the tensors."""
    call = {name: t for name, t in tensors.items() if not name.startswith("mimo_")}
    if "mimo_x" in tensors:
        call["mimo"] = tuple(tensors[f"mimo_{stream}"] for stream in "xzo")
    return list(tensors.values()), lambda: mamba3_scan(**call, return_state=False)[0]


def check_scan(form: str, rank: int) -> dict[str, float]:
    """Errors against the torch path in float64; exits where rounding does not explain one."""
    tensors = scan_tensors(rank, 2, 208)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    leaves, function = ours(tensors)
    y = function()
    grad = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, grad)
    with use_backend("torch"):
        leaves, function = ours(wide)
        expected = function()
        expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    errors = {"output": error(y, expected)}
    for name, got, true in zip(tensors, grads, expected_grads, strict=True):
        errors[f"gradient of {name}"] = error(got, true)
    for name, off in errors.items():
        tolerance = 5e-3 if name == "output" else 1e-2
        if not off < tolerance:
            raise SystemExit(
                f"scan {form}: {name} is off by {off:.1e}, more than {tolerance}; not timing it: "
                "see mamba3 doctor"
            )
    return errors


def times(
    make: Callable[[dict[str, Tensor]], Timed], tensors: dict[str, Tensor]
) -> dict[str, float]:
    """Milliseconds and megabytes of an implementation on our tensors."""
    leaves, function = make(tensors)
    with torch.no_grad():
        grad = torch.randn_like(function())
    repeats = 10 if grad.numel() > 1 << 26 else 20

    def both():
        torch.autograd.grad(function(), leaves, grad)

    both_ms = median_ms(both, repeats)
    extra = extra_mb(both)
    with torch.no_grad():
        forward_ms = median_ms(function, repeats)
    return {"forward_ms": forward_ms, "both_ms": both_ms, "extra_mb": extra}


def extra_mb(function) -> float:
    """Megabytes that a call takes at most, beyond what was allocated before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def median_ms(function, repeats: int) -> float:
    """Median milliseconds between device events around a call, the first three apart."""
    measured = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        measured.append(start.elapsed_time(stop))
    return statistics.median(measured[3:])


def error(got: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of what is expected; infinite where that is no number."""
    got, expected = got.detach().double(), expected.detach().double()
    off = ((got - expected).norm() / expected.norm()).item()
    return off if math.isfinite(off) else math.inf


# first calls, in processes of their own


def first_call(form: str) -> float:
    """Seconds of this process's first forward + backward."""
    tensors = scan_tensors(RANKS[form], 1, 2048)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run_once(ours, tensors)
    return time.perf_counter() - start


def compile_elsewhere(folder: Path, peers: dict, official: bool) -> dict[str, float]:
    """Seconds of first calls by form; what they and the peers compile is then found compiled."""

    def start(cache: str, *options: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, __file__, *options],
            env={**os.environ, "TRITON_CACHE_DIR": str(folder / cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    calls = {form: start(form, "--first-call", form) for form in RANKS}
    helpers, count = [], max(1, min(16, os.cpu_count() or 1) - len(calls))
    if peers:
        more = ["--official"] if official else []
        helpers = [
            start("peers", "--compile-peers", str(i), str(count), *more) for i in range(count)
        ]
    seconds = {}
    for form, process in calls.items():
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"the first call of {form} failed:\n{err}")
        seconds[form] = float(out.splitlines()[-1])
    for helper in helpers:
        helper.communicate()
    for part in list(folder.iterdir()):
        shutil.copytree(part, folder / "all", dirs_exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "all")
    return seconds


# tables


def print_decode(rows: list[dict]) -> None:
    print("\none token     state      error      floor ms   kernel ms  over floor   torch path ms")
    for row in rows:
        print(
            f"{row['form']:12}  {row['state']:9}  {row['error']:.1e}  {row['floor_ms']:9.3f}"
            f"  {row['step_ms']:9.3f}  {row['ratio']:10.2f}  {row['torch_ms']:13.3f}"
        )


def print_scan(rows: list[dict], errors: dict[str, dict[str, float]]) -> None:
    """Every row, with its time and memory over ours; then geometric means."""
    print()
    for form, those in errors.items():
        worst = max(those, key=those.get)
        print(f"{form} against float64: output {those['output']:.1e}, {worst} {those[worst]:.1e}")
    print(
        "\nscan                by                   forward ms  fwd+bwd ms  extra MB"
        "  fwd+bwd, MB over ours"
    )

    def cell(number, width, digits):
        return f"{'-':>{width}}" if number is None else f"{number:{width}.{digits}f}"

    ratios = {}
    for row, mine in paired(rows):
        faster = smaller = None
        if row is not mine and row["both_ms"]:
            faster = row["both_ms"] / mine["both_ms"]
            smaller = row["extra_mb"] / mine["extra_mb"]
            ratios.setdefault((row["form"], row["by"]), []).append((faster, smaller))
        shape = f"{row['form']} B{row['batch']} L{row['length']}" if row is mine else ""
        print(
            f"{shape:18}  {row['by']:19}  {cell(row['forward_ms'], 10, 3)}  "
            f"{cell(row['both_ms'], 10, 3)}  {cell(row['extra_mb'], 8, 0)}  "
            f"{cell(faster, 7, 2)}  {cell(smaller, 12, 2)}"
        )
    print("geometric means; published: measured in another run, on an H200")
    for (form, by), pairs in ratios.items():
        faster, smaller = (statistics.geometric_mean(each) for each in zip(*pairs, strict=True))
        print(f"{form}: {by} takes {faster:.2f} times our time, {smaller:.2f} times our memory")


def paired(rows: list[dict]) -> Iterator[tuple[dict, dict]]:
    """Each row with ours of the same shape, which comes first."""
    for row in rows:
        if row["by"] == OURS:
            mine = row
        yield row, mine


def print_first_calls(seconds: dict[str, float]) -> None:
    for form, first in seconds.items():
        official = PUBLISHED_FIRST_CALL_S.get(form)
        beside = f"; official, published: {official} s" if official else ""
        print(f"{form}: first call, with nothing compiled, {first:.1f} s{beside}")


if __name__ == "__main__":
    main()
