"""Problems in, answers out: a model of the curriculum behind the form that people write.

`978+145` may be read as `+857491` and answered `3211`; users see `978+145` and `1123`. The forms
are those of the recipe.yaml beside the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mamba3 import zoo
from mamba3.data.arithmetic_forms import answer_from_model, natural, prompt_to_model, result_of
from mamba3.data.problems import BLANK, Problem, prompt_ids
from mamba3.data.tokenizer import CharTokenizer, load_tokenizer
from mamba3.fill import fill
from mamba3.generate_text import completions

if TYPE_CHECKING:
    import torch

    from mamba3.models.lm import Mamba3LM
    from mamba3.train.config import DataRecipe

BATCH = 256
# An answer may be longer than its problem by so many characters: working that is written out.
LONGER = 16


class Answer(NamedTuple):
    """What a model says to a problem.

    problem: as it was given.
    answer: the last number, most significant digit first; or the text of another answer.
    written: all of the answer in that form, with working that is written out.
    model: the model's name.
    outside: why the problem is none of those that were trained; None if it is one.
    ended: whether the answer had ended when it was longer than any can be.
    """

    problem: str
    answer: str
    written: str
    model: str
    outside: str | None
    ended: bool


@dataclasses.dataclass(frozen=True)
class Skill:
    """A model of the curriculum, before it is loaded.

    Args:
        name: as it is called.
        folder: config.json, weights, tokenizer and recipe.yaml.
        data: what it was trained on, with the forms of its problems.
        tokenizer: the model's.
    """

    name: str
    folder: Path
    data: DataRecipe
    tokenizer: CharTokenizer

    @classmethod
    def of(cls, name_or_path: str | Path) -> Skill:
        """A skill by the name of its model, or by its folder.

        Raises:
            FileNotFoundError: no such model.
            ValueError: it is no model of the curriculum.
        """
        from mamba3.train.run import trained_on

        folder = zoo.resolve(name_or_path)
        data = trained_on(folder)
        if data is None:
            raise ValueError(
                f"'{name_or_path}' has no recipe.yaml, so how it reads problems is not known"
            )
        if data.kind != "arithmetic":
            raise ValueError(f"'{name_or_path}' was not trained on the curriculum, but {data.kind}")
        name = zoo.public_name(str(name_or_path))
        return cls(name, folder, data, load_tokenizer(folder))

    def outside(self, problem: str) -> str | None:
        """Why a problem is none of those that were trained; None if it is one."""
        return self.data.problems.outside(natural(problem), self.data.stages)

    def has_form_of(self, problem: str) -> bool:
        """Whether a problem looks like those that were trained, of whatever size."""
        return self.data.problems.has_form_of(natural(problem), self.data.stages)

    def prompt(self, problem: str) -> str:
        """A problem as the model reads it.

        Raises:
            ValueError: the model cannot read it.
        """
        asked = natural(problem)
        try:
            self.tokenizer.encode(asked)
            if not asked:
                raise ValueError("it is empty")
        except ValueError as error:
            tasks = self.data.problems.tasks_of(self.data.stages)
            raise ValueError(
                f"{self.name} cannot read the problem {problem!r}: {error}. It was trained on "
                f"{', '.join(task.name for task in tasks)}"
            ) from None
        return prompt_to_model(asked, self.data.problems.form)

    def _ids(self, prompt: str) -> tuple[list[int], list[int]]:
        """A prompt's ids, and where its blanks are."""
        return prompt_ids(Problem("", prompt, "", blanks=BLANK in prompt), self.tokenizer)

    def load(self, device: torch.device | str | None = None) -> Mamba3LM:
        """The model, which computes in float32 whatever its weights are stored in."""
        import torch

        from mamba3.threads import worthwhile_threads

        model = zoo.load_model(self.folder, dtype=torch.float32, device=device)
        torch.set_num_threads(worthwhile_threads(model))
        return model

    def solve(self, problems: Sequence[str], model: Mamba3LM) -> list[Answer]:
        """Answer problems, in batches of about the same length.

        Args:
            problems: in their natural form, such as "978+145".
            model: of `load`.

        Returns:
            An answer a problem, in order.

        Raises:
            ValueError: a problem that cannot be read.
        """
        prompts = [self.prompt(problem) for problem in problems]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        rows, blanks = [], []
        for i in order:
            ids, places = self._ids(prompts[i])
            rows.append(ids)
            blanks.append(places)
        rows = fill(model, rows, blanks, batch_size=BATCH)
        longest = max(map(len, rows), default=0)
        made = completions(
            model, self.tokenizer, rows, max_new_tokens=longest + LONGER, batch_size=BATCH
        )
        answers: dict[int, Answer] = {}
        for i, row, places, completion in zip(order, rows, blanks, made, strict=True):
            asked = natural(problems[i])
            text = self.tokenizer.decode(row[place] for place in places) + completion.text
            written = answer_from_model(asked, text, self.data.problems.form)
            answers[i] = Answer(
                problem=problems[i],
                answer=result_of(written),
                written=written,
                model=self.name,
                outside=self.outside(problems[i]),
                ended=completion.ended_by == "eos",
            )
        return [answers[i] for i in range(len(problems))]


def shipped_skills() -> list[Skill]:
    """The skills that ship with the package, those of early stages first."""
    skills = [Skill.of(zoo.MODELS[name].path) for name in zoo.list_models(shipped=True)]
    return sorted(skills, key=lambda skill: (max(skill.data.stages), skill.name))


def choose(problem: str, skills: Sequence[Skill]) -> Skill:
    """The first skill that was trained on a problem, or else on such of other sizes.

    A problem that none was trained on goes to the last skill that can read it.

    Raises:
        ValueError: none can.
    """
    fitting = [skill for skill in skills if skill.outside(problem) is None]
    fitting += [skill for skill in skills if skill.has_form_of(problem)]
    if fitting:
        return fitting[0]
    errors = []
    # Those of states last: their problems have a letter of their own.
    for skill in sorted(skills, key=lambda s: (s.data.stages == [6], -max(s.data.stages))):
        try:
            skill.prompt(problem)
        except ValueError as error:
            errors.append(error)
        else:
            return skill
    raise errors[0]


def solve(
    problems: Sequence[str],
    model: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
) -> list[Answer]:
    """Answer problems in their natural form.

    Args:
        problems: such as "978+145".
        model: name or folder of a model of the curriculum; None takes, for each problem, the
            shipped one that was trained on it.
        device: where models run; None is the CPU.

    Returns:
        An answer a problem, in order.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a problem that cannot be read; a model that is none of the curriculum.

    Example:
        >>> [answer.answer for answer in solve(["8+7", "3-9"])]
        ['15', '-6']
    """
    skills = shipped_skills() if model is None else [Skill.of(model)]
    groups: dict[str, list[int]] = {}
    for i, problem in enumerate(problems):
        skill = skills[0] if model is not None else choose(problem, skills)
        skill.prompt(problem)  # what cannot be read is said before anything is solved
        groups.setdefault(skill.name, []).append(i)
    answers: dict[int, Answer] = {}
    for skill in skills:
        if rows := groups.get(skill.name):
            made = skill.solve([problems[i] for i in rows], skill.load(device))
            answers |= zip(rows, made, strict=True)
    return [answers[i] for i in range(len(problems))]
