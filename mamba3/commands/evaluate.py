"""eval: exact match of a model."""

from __future__ import annotations

import json
from pathlib import Path

from mamba3.commands.arguments import QUICKSTART_MODEL, add_json, add_model, command
from mamba3.commands.loading import device_of, load
from mamba3.commands.printing import print_shares


def add(commands) -> None:
    example = f"mamba3 eval --model {QUICKSTART_MODEL} --n 400"
    add = command(commands, run, example).add_argument
    add_model(add)
    add("--data", metavar="FILE.jsonl", help="rows to measure on (the arithmetic curriculum)")
    add("--n", type=int, help="rows of the file (all), or problems of each stage (2000)")
    add(
        "--stages",
        type=int,
        nargs="+",
        metavar="STAGE",
        help="stages of the curriculum (those of the model's recipe, or all)",
    )
    add_json(add)


def run(args) -> None:
    """Measure exact match of greedy answers."""
    from mamba3 import zoo
    from mamba3.data import arithmetic
    from mamba3.data.jsonl import read_rows
    from mamba3.data.tokenizer import load_tokenizer
    from mamba3.eval.exact_match import exact_match

    if args.n is not None and args.n < 1:
        raise ValueError(f"--n must be at least 1, got {args.n}")
    folder = zoo.resolve(args.model)
    tokenizer = load_tokenizer(folder)
    if args.data:
        problems = read_rows(args.data, tokenizer)[: args.n]
    else:
        problems = [
            problem
            for stage in args.stages or _trained_stages(folder)
            for problem in arithmetic.eval_problems(stage, args.n or 2000)
        ]
    result = exact_match(load(folder, device_of(args)), tokenizer, problems)
    if args.json:
        values = result._asdict()
        misses = [miss._asdict() for miss in values.pop("misses")]
        print(json.dumps({"exact_match": values.pop("overall"), **values, "misses": misses}))
        return
    print_shares(result.per_task, result.overall, result.n)
    for miss in result.misses:
        print(f"wrong: {miss.prompt!r} gave {miss.got!r}, expected {miss.answer!r}")
    if result.truncated:
        print(f"{result.truncated} answers had not ended when they were as long as the longest")


def _trained_stages(folder: Path) -> list[int]:
    """Stages that a model was trained on, as its recipe says; without one, all."""
    from mamba3.data import arithmetic
    from mamba3.train import load_recipe
    from mamba3.train.run import RECIPE_FILE

    recipe = folder / RECIPE_FILE
    return load_recipe(recipe).data.stages if recipe.is_file() else list(arithmetic.STAGES)
