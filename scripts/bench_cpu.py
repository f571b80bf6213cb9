"""Speed and memory of one layer on a CPU: checks the numbers, then times, then prints a table.

    python scripts/bench_cpu.py [--threads N] [--json FILE] [--quick]

Shapes are B4 L512 d_model 256, N 64, P 64, float32, SISO and MIMO R = 4. Compared are

    scan        mamba3_scan forward + backward, chunked against the sequential reference
    layer       TMamba3Layer forward + backward against its two projections and its gate alone
    step        one token for 4 sequences
    Mamba-1     TMambaLayer against transformers' MambaMixer, where transformers is installed
    memory      peak resident size of a process that runs the layer forward + backward

Both sides of a ratio are timed in turn, so that a noisy machine is noisy for both; times are
medians. Memory is measured in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from mamba3 import TMamba3Layer, ops
from mamba3.layers import TMambaLayer

BATCH, LENGTH, WIDTH = 4, 512, 256
LONG = (4096, 8192, 16384)
KINDS = {"SISO": {}, "MIMO R=4": {"is_mimo": True, "mimo_rank": 4}}


def make_layer(kind: str) -> TMamba3Layer:
    torch.manual_seed(0)
    return TMamba3Layer(WIDTH, d_state=64, headdim=64, **KINDS[kind])


def medians(*functions, repeats: int = 15) -> list[float]:
    """Median milliseconds of each function, called in turn."""
    times = [[] for _ in functions]
    for i in range(repeats + 2):
        for function, measured in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if i >= 2:
                measured.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(measured) for measured in times]


def check(kind: str) -> float:
    """Largest relative error of the float32 layer against the float64 reference, with gradients."""
    layer = make_layer(kind)
    wide = make_layer(kind).double()
    u = torch.randn(2, 80, WIDTH)
    results = []
    for module, x, backend in ((layer, u, "torch"), (wide, u.double(), "reference")):
        x = x.clone().requires_grad_()
        with ops.use_backend(backend):
            y = module(x)
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    return max(
        ((got - expected).norm() / expected.norm()).item()
        for got, expected in zip(*results, strict=True)
    )


def scan_times(kind: str, batch: int, length: int) -> list[float]:
    """Milliseconds of the scan alone, forward + backward: chunked, reference."""
    layer = make_layer(kind)
    with torch.no_grad():
        tensors, options = layer._project(torch.randn(batch, length, WIDTH))
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    grad = torch.randn_like(tensors[0])

    def run(backend):
        with ops.use_backend(backend):
            y, _ = ops.mamba3_scan(*tensors, **options)
            torch.autograd.grad(y, tensors, grad)

    (chunked,) = medians(lambda: run("torch"))
    (reference,) = medians(lambda: run("reference"), repeats=3)
    return [chunked, reference]


def layer_times(kind: str, batch: int, length: int) -> list[float]:
    """Milliseconds: layer forward, its floor; layer forward + backward, its floor."""
    layer = make_layer(kind)
    u = torch.randn(batch, length, WIDTH, requires_grad=True)
    grad = torch.randn(batch, length, WIDTH)
    inner = layer.config.d_inner
    sizes = (inner, inner, layer.in_proj.out_features - 2 * inner)

    def floor():
        z, x, _ = layer.in_proj(u).split(sizes, dim=-1)
        return layer.out_proj(x * F.silu(z))

    def forward(function):
        with torch.no_grad():
            function()

    return medians(
        lambda: forward(lambda: layer(u)),
        lambda: forward(floor),
        lambda: layer(u).backward(grad),
        lambda: floor().backward(grad),
    )


def step_time(kind: str) -> float:
    """Milliseconds of one token."""
    layer = make_layer(kind)
    token, state = torch.randn(BATCH, WIDTH), layer.new_state(BATCH)
    with torch.inference_mode():
        (milliseconds,) = medians(lambda: layer.step(token, state), repeats=500)
    return milliseconds


def mamba1_times(batch: int, length: int) -> dict | None:
    """Milliseconds of the Mamba-1 layer and of transformers' with its weights, if it is there."""
    try:
        import transformers
        from transformers.models.mamba.modeling_mamba import MambaMixer
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    layer = TMambaLayer(WIDTH)
    config = transformers.MambaConfig(
        vocab_size=1, hidden_size=WIDTH, num_hidden_layers=1, time_step_rank=layer.dt_rank
    )
    other = MambaMixer(config, 0)
    other.load_state_dict(layer.state_dict())
    u = torch.randn(batch, length, WIDTH)
    with torch.no_grad():
        error = ((layer(u) - other(u)).norm() / other(u).norm()).item()
    if not error < 1e-4:
        raise SystemExit(f"Mamba-1: relative difference {error:.1e}; not timing it")
    u.requires_grad_()
    grad = torch.randn_like(u)

    @torch.no_grad()
    def forward(module):
        module(u)

    times = medians(lambda: forward(layer), lambda: forward(other))
    times += medians(lambda: layer(u).backward(grad), lambda: other(u).backward(grad), repeats=3)
    names = "forward_ms", "forward_transformers_ms", "both_ms", "both_transformers_ms"
    return {"error": error, **dict(zip(names, times, strict=True))}


def peak_memory(kind: str, batch: int, length: int) -> float:
    """Peak MB of a fresh process that runs the layer once forward and backward."""
    command = [sys.executable, __file__, "--peak", kind, str(batch), str(length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def print_peak(kind: str, batch: int, length: int) -> None:
    if length:
        u = torch.randn(batch, length, WIDTH, requires_grad=True)
        make_layer(kind)(u).sum().backward()
    # Not getrusage: its peak also counts what the parent had in memory when it forked.
    with open("/proc/self/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM"))
    print(int(peak.split()[1]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing"
    )
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        kind, *sizes = args.peak
        return print_peak(kind, *map(int, sizes))
    torch.set_num_threads(args.threads)
    batch, length, long = (1, 33, (64,)) if args.quick else (BATCH, LENGTH, LONG)
    results = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": args.threads,
        "date": time.strftime("%Y-%m-%d"),
        "import_mb": peak_memory("SISO", 1, 0),
    }
    for kind in tqdm(KINDS, disable=None):
        worst = check(kind)
        if not worst < 1e-4:
            raise SystemExit(f"{kind}: relative error {worst:.1e} against float64; not timing it")
        forward, floor_forward, both, floor_both = layer_times(kind, batch, length)
        chunked, reference = scan_times(kind, batch, length)
        results[kind] = {
            "error": worst,
            "scan_ms": chunked,
            "scan_reference_ms": reference,
            "scan_ratio": reference / chunked,
            "forward_ms": forward,
            "forward_floor_ms": floor_forward,
            "both_ms": both,
            "both_floor_ms": floor_both,
            "layer_ratio": both / floor_both,
            "step_ms": step_time(kind),
            "peak_mb": peak_memory(kind, batch, length),
            "peak_mb_by_length": {n: peak_memory(kind, 1, n) for n in long},
        }
    results["Mamba-1"] = mamba1_times(batch, length)
    print_table(results)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    return None


def print_table(results: dict) -> None:
    print(
        f"{results['date']}, torch {results['torch']}, {results['threads']} threads, "
        f"{results['machine']}; a process that only imports: {results['import_mb']:.0f} MB"
    )
    rows = [
        ("relative error against float64", "error", "{:.1e}"),
        ("scan, chunked, ms", "scan_ms", "{:.1f}"),
        ("scan, sequential reference, ms", "scan_reference_ms", "{:.0f}"),
        ("  times faster", "scan_ratio", "{:.1f}"),
        ("layer forward, ms", "forward_ms", "{:.1f}"),
        ("  its projections and gate, ms", "forward_floor_ms", "{:.1f}"),
        ("layer forward + backward, ms", "both_ms", "{:.1f}"),
        ("  its projections and gate, ms", "both_floor_ms", "{:.1f}"),
        ("  times the floor", "layer_ratio", "{:.2f}"),
        ("step, 4 sequences, ms", "step_ms", "{:.3f}"),
        ("peak memory, MB", "peak_mb", "{:.0f}"),
    ]
    print(f"{'':34}" + "".join(f"{kind:>12}" for kind in KINDS))
    for label, key, form in rows:
        print(f"{label:34}" + "".join(f"{form.format(results[k][key]):>12}" for k in KINDS))
    for length in results["SISO"]["peak_mb_by_length"]:
        cells = (f"{results[k]['peak_mb_by_length'][length]:.0f}" for k in KINDS)
        print(f"{f'peak memory, B1 L{length}, MB':34}" + "".join(f"{c:>12}" for c in cells))
    if results["Mamba-1"] is None:
        print("Mamba-1 against transformers: transformers is not installed")
        return
    for label, key in (("forward", "forward"), ("forward + backward", "both")):
        ours, theirs = (results["Mamba-1"][f"{key}{whose}_ms"] for whose in ("", "_transformers"))
        print(
            f"Mamba-1 layer {label}: {ours:.1f} ms; transformers {theirs:.0f} ms, "
            f"{theirs / ours:.1f} times as long"
        )


if __name__ == "__main__":
    main()
