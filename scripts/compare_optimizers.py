"""Loss curves of optimizers on the same data, tokens and seeds.

    python scripts/compare_optimizers.py [RECIPE] [--lr adamw=1e-3,3e-3 hybrid=3e-3,1e-2]
        [--seeds 0,1,2] [--steps N] [--init MODEL] [--jobs N] [--out DIR] [--quick]

Every run is `mamba3 train RECIPE` with another optim.name, optim.lr and train.seed, from the model
that the recipe or --init names; its folder in DIR keeps metrics.jsonl. Prints the mean loss of the
steps before each quarter of the run, and exact match at its end. Runs that are in DIR already are
read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mamba3.train import load_recipe, train

RECIPE = Path(__file__).parents[1] / "configs" / "curriculum" / "arithmetic.yaml"
LRS = ("adamw=1e-3,3e-3,1e-2", "hybrid=3e-3,1e-2,3e-2")
WINDOW = 50


class Run(NamedTuple):
    """One run, and where it is kept."""

    recipe: str
    name: str
    lr: float
    seed: int
    steps: int
    folder: str
    init: str | None = None

    def curve(self) -> list[float]:
        """The loss of every step; trains if that was not done before."""
        lines = Path(self.folder, "metrics.jsonl")
        if not Path(self.folder, "config.json").is_file():
            settings = [
                f"optim.name={self.name}",
                f"optim.lr={self.lr}",
                f"optim.decay_steps={self.steps}",
                f"optim.warmup_steps={min(100, self.steps // 4)}",
                f"train.seed={self.seed}",
                f"train.steps={self.steps}",
                f"train.save_every={self.steps}",
            ]
            settings += [] if self.init is None else [f"train.init_from={self.init}"]
            train(load_recipe(self.recipe, settings), self.folder, progress=False)
        found = [json.loads(line) for line in lines.read_text().splitlines()]
        return [line["loss"] for line in found if "loss" in line]

    def exact_match(self) -> float:
        """At the end of the run."""
        lines = Path(self.folder, "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if "exact_match" in line][-1]["exact_match"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", default=str(RECIPE), help="YAML (%(default)s)")
    parser.add_argument("--lr", nargs="+", default=LRS, metavar="NAME=LR,LR", help="what to try")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2 (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of every run (%(default)s)")
    parser.add_argument("--init", metavar="MODEL", help="model to start from (the recipe's)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    parser.add_argument("--out", help="folder to keep the runs in (none)")
    parser.add_argument("--quick", action="store_true", help="one lr each, 8 steps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = runs_of(args, Path(args.out or temporary))
        print(
            "optimizer  lr      seed  loss at 1/4, 1/2, 3/4 and the end      exact match",
            flush=True,
        )
        with ProcessPoolExecutor(args.jobs) as pool:
            for run, curve in zip(runs, pool.map(Run.curve, runs), strict=True):
                print(row(run, curve), flush=True)


def runs_of(args: argparse.Namespace, folder: Path) -> list[Run]:
    """All runs that are asked for."""
    steps = 8 if args.quick else args.steps
    runs = []
    for setting in args.lr:
        name, _, lrs = setting.partition("=")
        for lr in [float(lr) for lr in lrs.split(",")][: 1 if args.quick else None]:
            for seed in map(int, args.seeds.split(",")):
                where = folder / f"{name}-{lr:g}-{seed}-{steps}"
                runs.append(Run(args.recipe, name, lr, seed, steps, str(where), args.init))
    return runs


def row(run: Run, curve: list[float]) -> str:
    """A line of the table."""
    ends = [len(curve) * quarter // 4 for quarter in range(1, 5)]
    losses = [statistics.mean(curve[max(0, end - WINDOW) : end]) for end in ends]
    numbers = "  ".join(f"{loss:7.4f}" for loss in losses)
    return (
        f"{run.name:9}  {run.lr:<6g}  {run.seed:<4}  {numbers}  {100 * run.exact_match():17.2f} %"
    )


if __name__ == "__main__":
    main()
