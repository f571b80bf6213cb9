"""Skills: models of the curriculum, measured row by row, and held against what was recorded.

A row is a stage, at the sizes of training or at others. What was measured lies beside the weights
as eval.json, and the tables of the card are made of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mamba3.data import arithmetic
from mamba3.data.problems import Problem, collate
from mamba3.eval.exact_match import ExactMatch, exact_match, percent
from mamba3.eval.perplexity import Perplexity, perplexity

if TYPE_CHECKING:
    from mamba3.train.config import DataRecipe

EVAL_FILE = "eval.json"
BATCH = 256
# Of the draw of problems: others than those that a run's best checkpoint is chosen by.
SEED = 1
# Problems of a row in full: so many a size of the last stage, or in all of the others.
EACH, OTHERS = 2000, 2000
# Other sizes that the last stage is measured at, beyond those of training for the most part.
BEYOND = {4: (12, 15, 20, 40, 100, 200), 6: (40, 160, 256, 512)}
UNITS = {4: "digits", 6: "symbols"}
# How often a difference that is only chance is taken for one, over all numbers of a model.
FALSE_ALARMS = 0.01


class Row(NamedTuple):
    """Something to measure.

    stage: of the curriculum.
    n: problems, spread evenly over tasks and sizes.
    sizes: digits or symbols; None takes those that the recipe measures.
    """

    stage: int
    n: int
    sizes: tuple[int, ...] | None = None

    @property
    def title(self) -> str:
        """What it is called."""
        if self.sizes is None:
            return f"stage {self.stage}"
        return f"stage {self.stage}, {' and '.join(map(str, self.sizes))} {UNITS[self.stage]}"


class Number(NamedTuple):
    """A share that was measured and recorded before, each of so many problems."""

    row: str
    name: str
    share: float
    n: int
    recorded: float
    recorded_n: int

    @property
    def chance(self) -> float:
        """How likely the two are to lie so far apart if the model is the same: Fisher's test."""
        wrong = round((1 - self.share) * self.n)
        total = wrong + round((1 - self.recorded) * self.recorded_n)
        least, most = max(0, total - self.recorded_n), min(total, self.n)
        weights = [
            math.exp(
                _log_choose(self.n, x)
                + _log_choose(self.recorded_n, total - x)
                - _log_choose(self.n + self.recorded_n, total)
            )
            for x in range(least, most + 1)
        ]
        below, above = sum(weights[: wrong - least + 1]), sum(weights[wrong - least :])
        return min(1.0, 2 * min(below, above))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def rows_of(data: DataRecipe) -> list[Row]:
    """What is measured of a model that was trained on this data, in full."""
    options, last, rows = data.problems, max(data.stages), []
    for stage in data.stages:
        if stage == last == 6:
            continue  # all of its lengths are below
        tasks, wanted = options.tasks_of([stage]), data.eval_sizes(stage)
        sizes = max(len(wanted or options.measured_sizes(task)) or 1 for task in tasks)
        rows.append(Row(stage, EACH * sizes if stage == last else OTHERS))
    known = (data.eval_digits or ()) if last == 4 else ()
    beyond = [size for size in BEYOND.get(last, ()) if size not in known]
    return [*rows, *(Row(last, EACH, (size,)) for size in beyond)]


def measure_problems(
    model, tokenizer, problems: Sequence[Problem], data: DataRecipe
) -> tuple[ExactMatch, Perplexity]:
    """Exact match on problems in the form of a recipe's data, and the loss of their answers."""
    found = exact_match(
        model,
        tokenizer,
        problems,
        batch_size=BATCH,
        chance=arithmetic.CHANCE,
        well_formed=partial(arithmetic.well_formed, form=data.problems.form),
    )
    batches = (
        collate(problems[first : first + BATCH], tokenizer)
        for first in range(0, len(problems), BATCH)
    )
    return found, perplexity(model, batches)


def measure_stage(
    model,
    data: DataRecipe,
    stage: int,
    n: int,
    *,
    tokenizer=None,
    seed: int = SEED,
    sizes: Sequence[int] | None = None,
) -> tuple[ExactMatch, Perplexity]:
    """Exact match on held-out problems of a stage, and the loss of their answers.

    Args:
        model: a `Mamba3LM`.
        data: of its recipe: tasks, forms and sizes.
        stage: of the curriculum.
        n: problems, spread evenly over tasks and sizes.
        tokenizer: the model's; None is the curriculum's.
        seed: of the draw.
        sizes: digits or symbols; None takes those that the recipe measures.
    """
    tokenizer = tokenizer or arithmetic.tokenizer()
    problems = arithmetic.eval_problems(
        stage,
        n,
        seed=seed,
        options=data.problems,
        sizes=data.eval_sizes(stage) if sizes is None else sizes,
    )
    problems.sort(key=lambda problem: len(problem.prompt))  # batches of about one length
    found, loss = measure_problems(model, tokenizer, problems, data)
    order = [task.name for task in data.problems.tasks_of([stage])]
    found = found._replace(
        per_task={task: found.per_task[task] for task in order if task in found.per_task},
        n_per_task={task: found.n_per_task[task] for task in order if task in found.n_per_task},
    )
    return found, loss


def measure_row(
    model, tokenizer, data: DataRecipe, row: Row, *, seed: int = SEED
) -> dict[str, Any]:
    """What eval.json holds of a row.

    Args:
        model: a `Mamba3LM`.
        tokenizer: the model's.
        data: of its recipe.
        row: what to measure.
        seed: of the draw of problems.
    """
    found, loss = measure_stage(
        model, data, row.stage, row.n, tokenizer=tokenizer, seed=seed, sizes=row.sizes
    )
    values = {
        **row._asdict(),
        "seed": seed,
        "n_found": found.n,
        "exact_match": found.overall,
        "per_task": found.per_task,
        "n_per_task": found.n_per_task,
        "scaled": found.scaled,
        "loss": loss.loss,
        "truncated": found.truncated,
        "malformed": found.malformed,
    }
    if row.sizes is None:
        values |= {"per_group": found.per_group, "n_per_group": found.n_per_group}
    return values


def read_record(folder: Path) -> dict[str, Any] | None:
    """The eval.json of a model's folder; None if it has none."""
    path = folder / EVAL_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def measured_again(
    model, tokenizer, data: DataRecipe, record: dict[str, Any], *, share: float = 1.0
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row of a record, measured anew, beside the recorded one.

    Args:
        model, tokenizer, data: as of `measure_row`.
        record: of `read_record`.
        share: of the problems of each row to take.
    """
    for recorded in record["rows"]:
        sizes = recorded["sizes"] and tuple(recorded["sizes"])
        n = max(1, round(share * recorded["n"]))
        row = Row(recorded["stage"], n, sizes)
        yield measure_row(model, tokenizer, data, row, seed=recorded["seed"]), recorded


def numbers(measured: dict[str, Any], recorded: dict[str, Any]) -> list[Number]:
    """The shares of a row that both have, tasks first."""
    row = Row(recorded["stage"], recorded["n"], recorded["sizes"])
    found = []
    for shares, counts in (("per_task", "n_per_task"), ("per_group", "n_per_group")):
        for name, share in measured.get(shares, {}).items():
            if name in recorded.get(shares, {}):
                before = recorded[shares][name], recorded[counts][name]
                found.append(Number(row.title, name, share, measured[counts][name], *before))
    return found


def differing(found: Sequence[Number]) -> list[Number]:
    """The numbers that lie further from the recorded ones than chance explains."""
    return [number for number in found if number.chance < FALSE_ALARMS / len(found)]


def tables(record: dict[str, Any]) -> str:
    """The tables of a card: each row by task, what was trained by digits and carries as well."""
    scaled = any(row["scaled"] for row in record["rows"])
    head = ["", "n", "exact match", *["scaled"] * scaled, "loss", "malformed", "truncated"]
    table = [head, ["---"] * len(head)]
    for row in record["rows"]:
        for task, n in row["n_per_task"].items():
            cells = [f"{task}{_at(row)}", f"{n:,}", percent(row["per_task"][task])]
            table.append([*cells, *[_scaled(row, task)] * scaled, "", "", ""])
        title = f"all of {Row(row['stage'], row['n'], row['sizes']).title}"
        cells = [title, f"{row['n_found']:,}", percent(row["exact_match"]), *[""] * scaled]
        ends = [f"{row['loss']:.2g}", str(row["malformed"]), str(row["truncated"])]
        table.append([*cells, *ends])
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    groups = [
        f"| {name} | {n:,} | {percent(right / n)} |"
        for row in record["rows"]
        for name, (right, n) in _merged(row).items()
    ]
    if groups:
        lines += ["", "| by size and carries | n | exact match |", "|---|---|---|", *groups]
    return "\n".join(lines)


def _merged(row: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """How many are right, of how many, by size and carries; carries from 10 on in tens."""
    found: dict[str, tuple[int, int]] = {}
    for group, share in row.get("per_group", {}).items():
        task, number, trait = re.fullmatch(r"(.*), (\d+) (.*)", group).groups()
        tens = int(number) // 10 * 10 if trait == "carries" else 0
        name = f"{task}, {f'{tens} to {tens + 9}' if tens else number} {trait}"
        n = row["n_per_group"][group]
        right, before = found.get(name, (0, 0))
        found[name] = right + round(share * n), before + n
    return found


def _scaled(row: dict[str, Any], task: str) -> str:
    return percent(row["scaled"][task]) if task in row["scaled"] else ""


def _at(row: dict[str, Any]) -> str:
    sizes = row["sizes"]
    return f", {' and '.join(map(str, sizes))} {UNITS[row['stage']]}" if sizes else ""
