"""Speed of the kernels on a GPU: checks the numbers, then times, then prints a table.

    python scripts/bench_gpu.py [--json FILE]

Decoding: one token for B=128 sequences, H=64 heads, P=64, N=128, bf16 inputs, state in float32 or
bf16, SISO and MIMO R = 4, as a CUDA graph. The floor is the time this GPU takes to copy as many
bytes as the state has: it must be read once and written once. Times are medians of device events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from mamba3.ops import Mamba3State, mamba3_step, use_backend

BATCH, HEADS, HEADDIM, D_STATE = 128, 64, 64, 128


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


def check(call: dict, state: Mamba3State) -> float:
    """Relative error of the output against the float64 reference."""

    def widen(t):
        return tuple(map(widen, t)) if isinstance(t, tuple) else t.double()

    y, _ = mamba3_step(**call, state=state)
    with use_backend("reference"):
        expected, _ = mamba3_step(
            **{name: widen(t) for name, t in call.items()}, state=state.to(torch.float64)
        )
    return ((y.double() - expected).norm() / expected.norm()).item()


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
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


@torch.inference_mode()
def decode() -> list[dict]:
    """One row a form and a state dtype."""
    rows = []
    for form, rank in (("SISO", 1), ("MIMO R=4", 4)):
        for dtype in (torch.float32, torch.bfloat16):
            call, state = token(rank, rank > 1, dtype)
            error = check(call, state)
            if not error < 5e-3:
                raise SystemExit(f"{form}, {dtype}: relative error {error:.1e}; not timing it")
            copy = torch.empty_like(state.h)
            floor = graph_ms(lambda to=copy, h=state.h: to.copy_(h))
            step = graph_ms(lambda call=call, state=state: mamba3_step(**call, state=state))
            with use_backend("torch"):
                plain = graph_ms(lambda call=call, state=state: mamba3_step(**call, state=state))
            name = str(dtype).removeprefix("torch.")
            rows.append(
                {"form": form, "state": name, "error": error, "floor_ms": floor, "step_ms": step,
                 "torch_ms": plain, "ratio": step / floor}
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_gpu.py needs a CUDA or ROCm GPU, and found none")
    rows = decode()
    device, date = torch.cuda.get_device_name(), time.strftime("%Y-%m-%d")
    print(f"{date}, {device}, torch {torch.__version__}")
    print("one token     state      error      floor ms   kernel ms  over floor   torch path ms")
    for row in rows:
        print(
            f"{row['form']:12}  {row['state']:9}  {row['error']:.1e}  {row['floor_ms']:9.3f}"
            f"  {row['step_ms']:9.3f}  {row['ratio']:10.2f}  {row['torch_ms']:13.3f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"date": date, "device": device, "decode": rows}, file, indent=1)


if __name__ == "__main__":
    main()
