"""Time of an optimizer step on a GPU: checks the numbers, then times, then prints a table.

    python scripts/bench_optimizer.py [--quick] [--json FILE]

The matrices are those of a 1.2B model, 24 each of 8512 x 2048, 2048 x 4096, 8192 x 2048 and
2048 x 4096, float32 weights and gradients. Peers of the same run: torch.optim.AdamW(fused=True) and
torch.optim.Muon. Times are medians between device events around a whole step, launches included;
"replayed" is the same step as a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_gpu import median_ms
from torch import nn

from mamba3.optim import ANVIL, HybridOptimizer, orthogonalize
from mamba3.optim.orthogonalize import PRESETS

SHAPES = ((8512, 2048), (2048, 4096), (8192, 2048), (2048, 4096))
LAYERS = 24
REPEATS = 10
# Relative errors against the polar factor of a Gaussian matrix; see the presets.
TOLERANCE = {"keller5": 0.2, "polar_express5": 0.11, "anvil6": 0.01}
HYBRIDS = {
    "hybrid": {},
    "hybrid, keller5": {"preset": "keller5"},
    "hybrid, anvil6": {"preset": "anvil6"},
    "ANVIL": ANVIL,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two layers in place of 24")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_optimizer.py needs a CUDA or ROCm GPU, and found none")
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(", ".join(results.values()))
    results["errors"] = check()
    results["steps"] = steps(2 if args.quick else LAYERS)
    print_steps(results["steps"])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


def check() -> dict[str, float]:
    """Errors of the presets against the polar factor; exits where one is off."""
    errors = {}
    for rows, columns in dict.fromkeys(SHAPES):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.float64)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        polar = u @ v
        for preset in PRESETS:
            for gram in (True, False):
                got = orthogonalize(x.float(), preset, gram=gram).double()
                off = ((got - polar).norm() / polar.norm()).item()
                name = f"{preset} {rows}x{columns} {'gram' if gram else 'in turn'}"
                errors[name] = off
                print(f"{name}: off by {off:.1e}")
                if not off < TOLERANCE[preset]:
                    raise SystemExit(f"{name} is off by {off:.1e}; not timing it")
    return errors


def model_of(layers: int) -> nn.ParameterList:
    """The matrices, with gradients."""
    matrices = [torch.randn(shape, device="cuda") * 0.02 for _ in range(layers) for shape in SHAPES]
    model = nn.ParameterList(nn.Parameter(matrix) for matrix in matrices)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    return model


def steps(layers: int) -> list[dict]:
    """One row an optimizer."""
    model = model_of(layers)
    makers: dict[str, Callable] = {
        "torch AdamW, fused": lambda: torch.optim.AdamW(model.parameters(), fused=True)
    }
    if hasattr(torch.optim, "Muon"):
        makers["torch Muon"] = lambda: torch.optim.Muon(
            model.parameters(), adjust_lr_fn="match_rms_adamw"
        )
    for name, options in HYBRIDS.items():
        makers[name] = lambda options=options: HybridOptimizer(
            model, overrides={"*": "muon"}, **options
        )
    rows = []
    for name, make in makers.items():
        optimizer = make()
        row = {"by": name, "step_ms": median_ms(optimizer.step, REPEATS), "replayed_ms": None}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        row["extra_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if isinstance(optimizer, HybridOptimizer):
            row["replayed_ms"] = replayed_ms(optimizer)
        rows.append(row)
        print(f"{name}: {row['step_ms']:.1f} ms", flush=True)
        del optimizer
    return rows


def replayed_ms(optimizer: HybridOptimizer) -> float:
    """Milliseconds of a step whose device part is a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    optimizer.advance()
    with torch.cuda.graph(graph):
        optimizer.update()

    def step():
        optimizer.advance()
        graph.replay()

    return median_ms(step, REPEATS)


def print_steps(rows: list[dict]) -> None:
    reference = next((row["step_ms"] for row in rows if row["by"] == "torch Muon"), None)
    print("\noptimizer            step ms  replayed ms  over torch's Muon  extra MB")
    for row in rows:
        replayed = "-" if row["replayed_ms"] is None else f"{row['replayed_ms']:.1f}"
        ratio = "-" if reference is None else f"{reference / row['step_ms']:.2f}"
        print(
            f"{row['by']:19}  {row['step_ms']:7.1f}  {replayed:>11}  {ratio:>17}"
            f"  {row['extra_mb']:8.0f}"
        )


if __name__ == "__main__":
    main()
