"""Stages of the arithmetic curriculum."""

from __future__ import annotations

from mamba3.data import arithmetic
from mamba3.eval.exact_match import exact_match
from mamba3.train.config import Recipe
from mamba3.train.tasks import Measured, Told


class Curriculum:
    """Problems of the stages of a recipe; a `Task`."""

    own_ids = True
    measures_first = False

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.tokenizer = arithmetic.tokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.problems = [
            problem
            for stage in recipe.data.stages
            for problem in arithmetic.eval_problems(stage, recipe.data.eval_problems)
        ]
        self.about = f"stages {recipe.data.stages}, {recipe.data.batch_size} problems a step"
        self.told = Told(
            data=f"stages {recipe.data.stages} of the arithmetic curriculum",
            units="problems",
            measured_on=(
                "Stages 1 (copy, reverse, successor, compare) and 3 (plus, minus, chain) are "
                "measured on problems that are held out by a hash and never trained on. Stage 2 "
                "(add, subtract) is a table of 200 facts: all are trained on and all are measured, "
                "so it is recall."
            ),
            example="7+8",
            tags=("arithmetic",),
        )

    def stream(self) -> arithmetic.CurriculumStream:
        """Batches of problems, drawn anew for each."""
        data = self.recipe.data
        return arithmetic.CurriculumStream(
            data.stages, self.tokenizer, batch_size=data.batch_size, seed=self.recipe.train.seed
        )

    def measure(self, model) -> Measured:
        """Exact match on the held-out problems."""
        return Measured(exact_match(model, self.tokenizer, self.problems))
