"""The arithmetic curriculum: its stages in order, each from the best weights of the one before.

OUT/digits, OUT/facts, ...    a run each, as `mamba3 train` leaves it
OUT/curriculum.json           what each stage came to
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mamba3
from mamba3 import zoo
from mamba3.atomic import replace_text
from mamba3.eval.exact_match import ExactMatch, percent
from mamba3.eval.skill import measure_stage
from mamba3.ops.dispatch import default_device
from mamba3.threads import limited_threads, worthwhile_threads
from mamba3.train import Recipe, load_recipe, train
from mamba3.train.checkpoint import STATES
from mamba3.train.run import BEST

RESULT_FILE = "curriculum.json"
NAMES = {1: "digits", 2: "facts", 3: "arithmetic", 4: "carry", 5: "products", 6: "state"}
# Least share of right answers on problems that were never trained on (stage 2: on all facts).
GATES = {1: 0.999, 2: 1.0, 3: 0.999, 4: 0.999, 5: 0.99}
# Of stage 6, by task: least scaled accuracy at so many symbols.
STATE_GATES, STATE_SIZES = {"parity": 1.0, "modular": 0.9925, "brackets": 0.935}, [256]


class Gate(NamedTuple):
    """What a stage had to reach, and what it did.

    name: what is measured.
    wanted, measured: shares; of stage 6, scaled accuracies.
    """

    name: str
    wanted: float
    measured: float

    @property
    def reached(self) -> bool:
        """Whether it did."""
        return self.measured >= self.wanted

    def __str__(self) -> str:
        verdict = "reached" if self.reached else "MISSED"
        return f"{self.name} {percent(self.measured)}, gate {percent(self.wanted)}: {verdict}"


def gates(stage: int, found: ExactMatch) -> list[Gate]:
    """The gates of a stage, with what was measured of its problems."""
    if stage != 6:
        return [Gate("exact match", GATES[stage], found.overall)]
    return [
        Gate(f"{task}, scaled accuracy", wanted, found.scaled[task])
        for task, wanted in STATE_GATES.items()
        if task in found.scaled
    ]


def find_recipes(folder: str | Path | None = None) -> Path:
    """The folder with a recipe for each stage, such as digits.yaml.

    Args:
        folder: where they are; None looks where the user stands, and in the repository that the
            package is installed from.

    Raises:
        FileNotFoundError: they are not there.
    """
    places = [Path(folder)] if folder is not None else []
    if folder is None:
        tree = Path("configs") / "curriculum"
        places = [tree, Path(mamba3.__file__).parents[1] / tree]
    for place in places:
        if (place / f"{NAMES[1]}.yaml").is_file():
            return place
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(
        f"no recipe {NAMES[1]}.yaml in {looked}. The recipes are in configs/curriculum of the "
        "repository, and no part of an installed package: run this where they are, or name their "
        "folder"
    )


def run_curriculum(
    out: str | Path,
    stages: Sequence[int] = tuple(NAMES),
    *,
    recipes: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    go_on: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Train stages one after the other, and check the gate of each.

    Args:
        out: folder of the runs.
        stages: which, in order. The first starts from the best weights in `out` of the stage that
            its recipe starts from.
        recipes: their folder, see `find_recipes`.
        overrides: changes to all recipes, such as "optim.lr=1e-3"; those of the group model go to
            stages that start anew.
        resume: leave out stages that reached their gates in `out`, and continue a run that stopped.
        go_on: train the next stage where a gate was missed, too.
        report: called with a line of text after each stage.

    Returns:
        What each stage came to, as OUT/curriculum.json has it; those that were left out as well.

    Raises:
        FileNotFoundError: no recipes; no weights to start from.
        FileExistsError: `out` has a run of a stage, and it is not to be resumed.
        ValueError: a stage that there is not; a recipe that cannot be.
        Stopped: a signal came; `resume` continues.
    """
    if not stages or not set(stages) <= set(NAMES):
        raise ValueError(f"stages must be some of {list(NAMES)}, got {list(stages)}")
    out, folder = Path(out), find_recipes(recipes)
    planned = {stage: _recipe(stage, folder, out, overrides) for stage in stages}
    _check_starts(planned, out)
    path = out / RESULT_FILE
    done = json.loads(path.read_text()) if resume and path.is_file() else []
    results = {result["stage"]: result for result in done}
    for stage, recipe in planned.items():
        if not (resume and stage in results and results[stage]["reached"]):
            before = results.get(stage)
            results[stage] = _train_stage(stage, recipe, out / NAMES[stage], resume, before)
            told = sorted(results.values(), key=lambda result: result["stage"])
            replace_text(path, json.dumps(told, indent=1))
        result = results[stage]
        for gate in result["gates"]:
            report(f"stage {stage} ({NAMES[stage]}): {gate['told']}")
        if not (result["reached"] or go_on):
            break
    return [results[stage] for stage in planned if stage in results]


def _recipe(stage: int, folder: Path, out: Path, overrides: Sequence[str]) -> Recipe:
    """A stage's recipe, which starts from the best weights in `out`."""
    path = folder / f"{NAMES[stage]}.yaml"
    base = load_recipe(path).train.init_from
    start = []
    if base is not None:
        start = [f"train.init_from={_weights(out / Path(base).name)}"]
    # Where a stage starts from weights, their architecture is the one.
    changes = [o for o in overrides if base is None or not o.startswith("model.")]
    return load_recipe(path, [*start, *changes])


def _weights(run: Path) -> str:
    """The best weights of a run, as a path that no model's name is taken for."""
    return str(run / BEST) if run.is_absolute() else f"./{run / BEST}"


def _check_starts(planned: dict[int, Recipe], out: Path) -> None:
    """Whether the weights that stages start from are there, or will be."""
    to_come = set()
    for stage, recipe in planned.items():
        base = recipe.train.init_from
        if base is not None and base not in to_come and not Path(base).is_dir():
            raise FileNotFoundError(
                f"stage {stage} starts from {base}, which is not there: train the stage before, too"
            )
        to_come.add(_weights(out / NAMES[stage]))


def _train_stage(
    stage: int, recipe: Recipe, folder: Path, resume: bool, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Train a stage, or go on with it, and measure its best model; `before` is what it came to."""
    resume = resume and (folder / STATES).is_dir()
    trained = train(recipe, folder, resume=resume)
    seconds = trained.seconds
    if before is not None:
        # What is measured once more has no more steps, and its time is that of them.
        seconds = before["seconds"] + (seconds if trained.steps > before["steps"] else 0.0)
    best = zoo.load_model(folder / BEST, device=recipe.train.device or default_device())
    with limited_threads(worthwhile_threads(best)):
        n, sizes = recipe.data.eval_problems, STATE_SIZES if stage == 6 else None
        found, loss = measure_stage(best, recipe.data, stage, n, sizes=sizes)
    checked = gates(stage, found)
    return {
        "stage": stage,
        "name": NAMES[stage],
        "folder": str(folder),
        "steps": trained.steps,
        "problems": trained.steps * recipe.data.batch_size,
        "seconds": seconds,
        "device": _device_name(next(best.parameters()).device),
        "n": found.n,
        "exact_match": found.overall,
        "per_task": found.per_task,
        "scaled": found.scaled,
        "loss": loss.loss,
        "gates": [
            {**gate._asdict(), "reached": gate.reached, "told": str(gate)} for gate in checked
        ],
        "reached": all(gate.reached for gate in checked),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def table(results: Sequence[dict[str, Any]]) -> str:
    """What the stages came to, in Markdown."""
    lines = [
        "| stage | steps | problems | seconds | n | exact match | gates |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        told = "; ".join(gate["told"] for gate in result["gates"])
        lines.append(
            f"| {result['stage']} {result['name']} | {result['steps']:,} | "
            f"{result['problems']:,} | {result['seconds']:.0f} | {result['n']} | "
            f"{percent(result['exact_match'])} | {told} |"
        )
    return "\n".join(lines)
