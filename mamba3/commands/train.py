"""train: a run, from a recipe."""

from __future__ import annotations

import json
import os
import sys

from mamba3.commands.arguments import add_json, add_recipe, command
from mamba3.commands.printing import print_shares


def add(commands) -> None:
    example = "mamba3 train configs/debug.yaml --out runs/debug --set optim.lr=2e-3 train.seed=1"
    add = command(commands, run, example).add_argument
    add_recipe(add)
    add("--out", required=True, metavar="DIR", help="folder for the model and the run")
    add("--resume", action="store_true", help="continue the run in DIR from its last checkpoint")
    add_json(add)


def run(args) -> None:
    """Train a model by a recipe."""
    from mamba3.train import Stopped, load_recipe, train

    try:
        result = train(load_recipe(args.recipe, args.set), args.out, resume=args.resume)
    except Stopped as stopped:
        print(f"mamba3: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
    if int(os.environ.get("RANK", 0)):  # which torchrun sets; all ranks have the same result
        return
    if args.json:
        told = {"steps": result.steps, "loss": result.loss, **result.after.values}
        print(json.dumps({**told, "out": result.out, "seconds": result.seconds}))
        return
    print(f"{result.steps} steps, last loss {result.loss:.4g}, {result.seconds:.0f} s")
    if (exact := result.after.exact_match) is not None:
        print_shares(exact.per_task, exact.overall, exact.n)
    if (told := result.after.perplexity) is not None:
        print(f"perplexity of {told.n_tokens:,} tokens: {told.perplexity:.4g}")
    print(f"saved to {result.out}")
