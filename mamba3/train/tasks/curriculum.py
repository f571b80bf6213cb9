"""Stages of the arithmetic curriculum."""

from __future__ import annotations

from mamba3.data import arithmetic
from mamba3.data.arithmetic_forms import Form, prompt_from_model, prompt_to_model
from mamba3.data.arithmetic_tasks import TASKS
from mamba3.data.problems import BLANK
from mamba3.eval.skill import measure_problems
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
        data = recipe.data
        self.problems = [
            problem
            for stage in data.stages
            for problem in arithmetic.eval_problems(
                stage, data.eval_problems, options=data.problems, sizes=data.eval_sizes(stage)
            )
        ]
        self.about = f"stages {data.stages}, {data.batch_size} problems a step"
        example = self._example()
        natural = prompt_from_model(example, data.problems.form)
        self.told = Told(
            data=f"{self._what()} of the arithmetic curriculum",
            units="problems",
            measured_on=self._measured_on(),
            example=example,
            tags=("arithmetic",),
            solved=natural if BLANK in example else None,
        )

    def _what(self) -> str:
        data = self.recipe.data
        tasks = f" ({', '.join(data.tasks)})" if data.tasks else ""
        form = data.problems.form
        return f"stages {data.stages}{tasks}{'' if form == Form() else f', {form},'}"

    def _example(self) -> str:
        data = self.recipe.data
        if data.tasks or 2 not in data.stages:
            return self.problems[0].prompt
        return prompt_to_model("7+8", data.problems.form)

    def _measured_on(self) -> str:
        tasks = [task.name for task in self.recipe.data.problems.tasks_of(self.recipe.data.stages)]
        facts = [name for name in tasks if TASKS[name].stage == 2]
        others = [name for name in tasks if name not in facts]
        told = []
        if others:
            told.append(
                f"{', '.join(others)}: measured on problems that are held out by a hash and never "
                "trained on, at any stage or seed."
            )
        if facts:
            told.append(
                f"{', '.join(facts)}: tables of 100 facts each, all of which are trained on and "
                "measured, so it is recall."
            )
        return " ".join(told)

    def stream(self) -> arithmetic.CurriculumStream:
        """Batches of problems, drawn anew for each."""
        data = self.recipe.data
        return arithmetic.CurriculumStream(
            data.stages,
            self.tokenizer,
            batch_size=data.batch_size,
            seed=self.recipe.train.seed,
            options=data.problems,
        )

    def measure(self, model) -> Measured:
        """Exact match on the held-out problems, and the loss of their answers."""
        data = self.recipe.data
        return Measured(*measure_problems(model, self.tokenizer, self.problems, data))
