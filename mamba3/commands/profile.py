"""profile: where the time of training steps goes."""

from __future__ import annotations

import json

from mamba3.commands.arguments import add_json, add_recipe, command


def add(commands) -> None:
    example = "mamba3 profile configs/debug.yaml --out profiles/debug"
    add = command(commands, run, example).add_argument
    add_recipe(add)
    add("--out", required=True, metavar="DIR", help="folder for the trace")
    add("--steps", type=int, default=10, metavar="N", help="steps to look at (%(default)s)")
    add_json(add)


def run(args) -> None:
    """Show where the time of training steps goes, and write a trace of them."""
    from mamba3.train import load_recipe
    from mamba3.train.profile import profile

    found = profile(load_recipe(args.recipe, args.set), args.out, steps=args.steps)
    if args.json:
        print(
            json.dumps(
                {**found._asdict(), "parts": {n: s._asdict() for n, s in found.parts.items()}}
            )
        )
        return
    print(f"a step takes {found.step_ms:.2f} ms, one that is not recorded {found.eager_ms:.2f} ms")
    if found.busy is not None:
        gaps = (1 - found.eager_busy) * found.eager_ms
        print(f"the GPU is busy {found.busy:.1%} of it; of one that is not recorded:")
        print(f"    {found.eager_busy:.1%}; {gaps:.2f} ms it waits for the host")
        print(f"    {found.requests:.0f} tensors are asked for, cudaMalloc {found.mallocs} times")
    print(f"\n{'part':12}  {'host ms':>9}  {'GPU ms':>9}")
    for name, spent in found.parts.items():
        device = "-" if spent.device_ms is None else f"{spent.device_ms:.3f}"
        print(f"{name:12}  {spent.host_ms:9.3f}  {device:>9}")
    print(f"\n{'ms':>9}  {'calls':>6}  name")
    for name, milliseconds, calls in found.kernels:
        print(f"{milliseconds:9.3f}  {calls:6.0f}  {name[:90]}")
    print(f"\nthe trace is in {found.trace}: open it at ui.perfetto.dev")
