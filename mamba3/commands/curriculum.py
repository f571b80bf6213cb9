"""curriculum: all stages of arithmetic, one after the other."""

from __future__ import annotations

import re
import sys

from mamba3.commands.arguments import add_changes, command


def add(commands) -> None:
    example = "mamba3 curriculum --stages 1-3 --out curriculum"
    add = command(commands, run, example).add_argument
    add("--out", default="curriculum", metavar="DIR", help="folder of the runs (%(default)s)")
    add("--stages", default="1-5", metavar="1-5", help="which, as in 1-3 or 6 (%(default)s)")
    add("--recipes", metavar="DIR", help="folder of digits.yaml, ... (configs/curriculum)")
    add_changes(add)
    add("--resume", action="store_true", help="leave out what is done, continue what stopped")
    add("--go-on", action="store_true", help="train the next stage where a gate was missed, too")


def run(args) -> None:
    """Train the arithmetic curriculum, each stage from the last one's best weights, with gates."""
    from mamba3.curriculum import RESULT_FILE, run_curriculum, table
    from mamba3.train import Stopped

    stages = _stages(args.stages)
    try:
        results = run_curriculum(
            args.out,
            stages,
            recipes=args.recipes,
            overrides=args.set,
            resume=args.resume,
            go_on=args.go_on,
            report=lambda line: print(line, flush=True),
        )
    except Stopped as stopped:
        print(f"mamba3: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
    print(f"\n{table(results)}")
    if len(results) < len(stages):
        left = ", ".join(map(str, stages[len(results) :]))
        print(f"not trained, since a gate was missed: stages {left} (--go-on trains them)")
    print(f"saved to {args.out}, {RESULT_FILE} among it")


def _stages(text: str) -> list[int]:
    """The stages of "1-3", "6" or "1-3,6"."""
    stages: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"--stages takes stages such as 1-3 or 1-3,6, got {text!r}")
        stages += range(int(match[1]), int(match[2] or match[1]) + 1)
    return stages
