"""Skills: models of the curriculum, measured stage by stage, and held against what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mamba3.data import arithmetic
from mamba3.data.problems import collate
from mamba3.eval.exact_match import ExactMatch, exact_match
from mamba3.eval.perplexity import Perplexity, perplexity

if TYPE_CHECKING:
    from mamba3.train.config import DataRecipe

BATCH = 256


def measure_stage(
    model,
    data: DataRecipe,
    stage: int,
    n: int,
    *,
    tokenizer=None,
    seed: int = 0,
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
    # Batches of about one length.
    problems.sort(key=lambda problem: len(problem.prompt))
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
