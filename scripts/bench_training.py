"""Training steps of the 187M model on a GPU: what each remedy gives in time and memory.

    python scripts/bench_training.py [--form siso|mimo] [--batch 8] [--length 2048] [--json FILE]

The official 187M architectures, vocabulary 128256, random tokens. Rows: float32; bf16 by autocast;
the same with recorded steps; these with the hybrid optimizer, with bfloat16 weights, with blocks
recomputed. The losses of eager and recorded steps are compared to the last bit.

first   seconds of the first step; what it compiles may be there from an earlier row or run
step    median milliseconds of a step
host    of these, what the host takes until it may go on
peak    GB allocated at most: by the first steps for recorded ones, which hold it from then on
mallocs calls of cudaMalloc in the steps that are timed
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data.problems import Batch
from mamba3.train.config import OptimRecipe, StepRecipe
from mamba3.train.loop import make_step
from mamba3.train.step_cache import WARM_UP, CachedStep

COMMON = {"vocab_size": 128256, "d_model": 768, "n_layer": 12, "headdim": 64, "d_state": 128}
FORMS = {
    "siso": {"d_intermediate": 1536},
    "mimo": {"d_intermediate": 1280, "is_mimo": True, "mimo_rank": 4},
}
ROWS = {
    "float32": ("adamw", {"precision": "float32", "cache_steps": False}),
    "bf16": ("adamw", {"precision": "bf16", "cache_steps": False}),
    "bf16, recorded": ("adamw", {"precision": "bf16"}),
    "bf16, recorded, hybrid": ("hybrid", {"precision": "bf16"}),
    "bf16 weights, recorded": ("adamw", {"precision": "bf16-weights"}),
    "bf16, recorded, selective": ("adamw", {"precision": "bf16", "recompute": "selective"}),
    "bf16, recorded, full": ("adamw", {"precision": "bf16", "recompute": "full"}),
}
TIMED = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--form", choices=FORMS, nargs="+", default=list(FORMS), help="which models"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="of a sequence (%(default)s)")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_training.py needs a CUDA or ROCm GPU, and found none")
    about = [time.strftime("%Y-%m-%d"), torch.cuda.get_device_name(), torch.__version__]
    print(", ".join(about))
    print(f"{'':32}   first s   step ms   host ms   tokens/s   peak GB   mallocs   last loss")
    rows = []
    for form in args.form:
        losses = {}
        for name in ROWS:
            row, losses[name] = measure(form, name, args.batch, args.length)
            torch.cuda.empty_cache()
            rows.append(row)
            print_row(row)
        if not torch.equal(losses["bf16"], losses["bf16, recorded"]):
            raise SystemExit(f"{form}: recorded steps have other losses than eager ones")
        print(f"{form}: recorded steps have the losses of eager ones, bit for bit")
    if args.json:
        Path(args.json).write_text(json.dumps({"about": about, "rows": rows}, indent=1))


def measure(form: str, name: str, rows: int, length: int) -> tuple[dict, torch.Tensor]:
    """A row of the table, and all losses."""
    optimizer, how = ROWS[name]
    recipe = StepRecipe(**how)
    torch.manual_seed(0)
    model = Mamba3LM(Mamba3Config(**COMMON, **FORMS[form]), device="cuda")
    step = make_step(model, OptimRecipe(lr=1e-4, name=optimizer), recipe)
    make = CachedStep(step) if recipe.cache_steps else step
    ids = [torch.randint(COMMON["vocab_size"], (rows, length)).pin_memory() for _ in range(4)]
    losses, times, hosts = [], [], []

    def one(index: int) -> None:
        batch = Batch(ids[index % 4], ids[index % 4], rows * length)
        torch.cuda.synchronize()
        began = time.perf_counter()
        output = make(batch)
        hosts.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append(output.loss.clone())

    torch.cuda.reset_peak_memory_stats()
    warm = WARM_UP + 2
    for index in range(warm):
        one(index)
    mallocs = torch.cuda.memory_stats()["num_device_alloc"]
    for index in range(warm, warm + TIMED):
        one(index)
    median = statistics.median(times[warm:])
    row = {
        "form": form,
        "name": name,
        "first_s": times[0],
        "step_ms": 1e3 * median,
        "host_ms": 1e3 * statistics.median(hosts[warm:]),
        "tokens_per_s": rows * length / median,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "mallocs": torch.cuda.memory_stats()["num_device_alloc"] - mallocs,
        "loss": losses[-1].item(),
    }
    return row, torch.stack(losses).cpu()


def print_row(row: dict) -> None:
    print(
        f"{row['form']} {row['name']:27}  {row['first_s']:8.1f}  {row['step_ms']:8.1f}"
        f"  {row['host_ms']:8.2f}  {row['tokens_per_s']:9,.0f}  {row['peak_gb']:8.1f}"
        f"  {row['mallocs']:8}  {row['loss']:10.6f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
