"""Make a run's best model one that ships: weights, tokenizer, recipe, measured numbers and card.

    python scripts/ship.py RUN NAME [--description TEXT] [--note TEXT] [--limits TEXT]
        [--dtype float32|bfloat16] [--share 1.0] [--device cuda] [--out mamba3/weights]

RUN is a folder of `mamba3 train` or `mamba3 curriculum`. The numbers are measured on the weights as
they are stored, the way `mamba3 eval NAME --full` does it. --note is added to what the card says of
the training, such as "One H200, 212 s."; the time and the device of a curriculum's run are known.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import mamba3
from mamba3 import zoo
from mamba3.curriculum import RESULT_FILE
from mamba3.data.arithmetic_forms import prompt_to_model
from mamba3.data.problems import BLANK
from mamba3.eval.exact_match import ExactMatch
from mamba3.eval.skill import EVAL_FILE, measure_row, rows_of, tables
from mamba3.ops.dispatch import default_device
from mamba3.solve import Skill
from mamba3.train import Recipe, load_recipe
from mamba3.train.card import write_card
from mamba3.train.config import OPTIMIZERS
from mamba3.train.run import BEST, RECIPE_FILE
from mamba3.train.tasks import Measured, Told

LARGEST = 4_000_000  # bytes of a model that ships
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What the last stage adds, and a problem of it.
SKILLS = {
    1: ("copy, reverse, successor and comparison of numbers of 1-4 digits", "s1299"),
    2: ("sums and differences of single digits, after copying and comparing numbers", "7+8"),
    3: ("sums and differences of 2- and 3-digit numbers, nothing to carry", "312+57"),
    4: ("sums and differences of numbers of up to {digits} digits", "978+145"),
    5: ("numbers times a digit, two digits times two with the working, and sums", "47*36"),
    6: ("{tasks} of long problems", ""),
}
STATES = {"parity": "p0110100", "modular": "%3+4*2-1", "brackets": "%((3+4)*2)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", type=Path, help="folder of a run")
    add("name", help="of the model that ships")
    add("--description", help="one line for `mamba3 list` (by the stages)")
    add("--note", help="added to what the card says of the training")
    add("--limits", help="what is known not to work, in whole sentences")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights (%(default)s)")
    add("--share", type=float, default=1.0, help="of the problems of a card (%(default)s)")
    add("--device", help="that measures (a GPU if there is one)")
    add("--out", type=Path, default=zoo.WEIGHTS, help="where models that ship lie (%(default)s)")
    args = parser.parse_args()
    folder = args.out / args.name
    # Whole or not at all: a folder with half of a model would be one that ships.
    with tempfile.TemporaryDirectory(dir=args.out, prefix=".") as temporary:
        made = Path(temporary) / args.name
        ship(args, made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    print((folder / "README.md").read_text())
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB; of all models that ship, {total(args.out) / 1e6:.2f} MB")


def total(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ship(args: argparse.Namespace, folder: Path) -> None:
    """Write the folder of a model that ships."""
    source = args.run / BEST if (args.run / BEST).is_dir() else args.run
    skill = Skill.of(source.absolute())
    model = zoo.load_model(source.absolute(), dtype=DTYPES[args.dtype])
    model.save_pretrained(folder, tokenizer=skill.tokenizer)
    if (size := total(folder)) > LARGEST:
        raise SystemExit(f"{size:,} bytes are more than {LARGEST:,}: try --dtype bfloat16")
    recipe = load_recipe(args.run / RECIPE_FILE)
    write_recipe(recipe, folder)
    record = measured(args, Skill.of(folder.absolute()), args.device or default_device())
    (folder / EVAL_FILE).write_text(json.dumps(record, indent=1) + "\n")
    write_skill_card(args, folder, model, recipe, record)


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """The run's recipe, without paths of this machine."""
    base = recipe.train.init_from
    values = recipe.to_dict()
    values["train"]["init_from"] = base and zoo.public_name(base)
    (folder / RECIPE_FILE).write_text(yaml.safe_dump(values, sort_keys=False))


def measured(args: argparse.Namespace, skill: Skill, device: str) -> dict[str, Any]:
    """The content of eval.json."""
    data = skill.data
    model = skill.load(device)
    rows = []
    for row in rows_of(data):
        row = row._replace(n=max(1, round(args.share * row.n)))
        rows.append(measure_row(model, skill.tokenizer, data, row))
        print(f"{row.title}: {rows[-1]['per_task']} of {rows[-1]['n_found']}", flush=True)
    on_gpu = torch.device(device).type == "cuda"
    return {
        "description": args.description or described(data),
        "stages": data.stages,
        "tasks": [task.name for task in data.problems.tasks_of(data.stages)],
        "form": str(data.problems.form),
        "command": f"mamba3 eval {args.name} --full",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {"mamba3": mamba3.__version__, "torch": torch.__version__},
        "weights": args.dtype,
        "rows": rows,
    }


def described(data) -> str:
    """One line of what a model does."""
    last = max(data.stages)
    tasks = [task.name for task in data.problems.tasks_of([last])]
    modulo = "sums and products modulo 5"
    known = {"modular": modulo, "brackets": f"{modulo} in brackets"}
    named = ", ".join(known.get(task, task) for task in tasks)
    return SKILLS[last][0].format(digits=data.digits, tasks=named)


def write_skill_card(args, folder: Path, model, recipe: Recipe, record: dict[str, Any]) -> None:
    """README.md."""
    data = recipe.data
    problem = SKILLS[max(data.stages)][1] or STATES[record["tasks"][0]]
    example = prompt_to_model(problem, data.problems.form)
    base = recipe.train.init_from and zoo.public_name(recipe.train.init_from)
    what = f"stages {data.stages} of the arithmetic curriculum ({', '.join(record['tasks'])})"
    write_card(
        folder,
        model=model,
        summary=(
            f"Trained with mamba3 on {what}, {record['form']}"
            f"{'' if base is None else f', from the weights of the stage before, {base}'}: "
            f"{recipe.train.steps} steps of {data.batch_size} problems, seed {recipe.train.seed}, "
            f"{OPTIMIZERS[recipe.optim.name]} with a learning rate of {recipe.optim.lr:.2g}; the "
            f"best of its checkpoints. {how_long(args.run)}"
            f"{'`mamba3 train recipe.yaml --out DIR`' if base is None else '`mamba3 curriculum`'} "
            f"trains it again.{' ' if args.note else ''}{args.note or ''}"
        ),
        told=Told(
            what, "problems", "", example, ("arithmetic",), problem if BLANK in example else None
        ),
        results={args.name: Measured(together(record))},
        base_model=None,
        licence="Apache-2.0",
        limits=args.limits,
        evaluation=f"{evaluated(record)}\n\n{tables(record)}",
        asked=problem,
    )


def evaluated(record: dict[str, Any]) -> str:
    """How the numbers of a card came about."""
    recall = (
        " Stage 2 is a table of 200 facts, all of which are trained on and measured, so it is "
        "recall."
        if 2 in record["stages"]
        else ""
    )
    return (
        "Exact match of greedy generation, whole answer and end token, on problems that are held "
        f"out by a hash and never trained on, at any stage or seed.{recall} The checkpoint was "
        "chosen by another draw of such problems. Numbers are of these weights, one run; measured "
        f"{record['date']} on {record['device']}, problems of seed {record['rows'][0]['seed']}: "
        f"`{record['command']}` measures them again."
    )


def how_long(run: Path) -> str:
    """Time and device of a run, where the curriculum has told them."""
    path = run.parent / RESULT_FILE
    for result in json.loads(path.read_text()) if path.is_file() else []:
        if result["name"] == run.name:
            return f"{result['seconds']:.0f} seconds on {result['device']}. "
    return ""


def together(record: dict[str, Any]) -> ExactMatch:
    """All rows of training's sizes as one, for the card's header; of stage 6, those of 256."""
    rows = [row for row in record["rows"] if row["sizes"] in (None, [256], (256,))]
    n = sum(row["n_found"] for row in rows)
    return ExactMatch(
        overall=sum(row["exact_match"] * row["n_found"] for row in rows) / n,
        per_task={task: share for row in rows for task, share in row["per_task"].items()},
        n=n,
        n_per_task={task: n for row in rows for task, n in row["n_per_task"].items()},
        truncated=sum(row["truncated"] for row in rows),
        misses=[],
    )


if __name__ == "__main__":
    main()
