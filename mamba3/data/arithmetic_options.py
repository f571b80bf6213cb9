"""Which problems of the curriculum are drawn, how large they are, and which are outside of that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mamba3.data.arithmetic_forms import Form
from mamba3.data.arithmetic_tasks import MAX_DIGITS, TASKS, Task

STAGES = tuple(sorted({task.stage for task in TASKS.values()}))
STATE_LABELS = ("answer", "running")

# Sizes in training where no option says so, and those that are measured.
TIMES_DIGITS, LEAST_SYMBOLS, MEASURED_SYMBOLS = 8, 3, 256
# The longest problems of stage 6 grow by so many symbols at a time: each length of a batch is
# recorded by itself on a GPU.
GROWTH = 16


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """What is drawn of some stages.

    Args:
        form: how numbers are written.
        tasks: names of tasks; None is all of the stages'.
        shares: share of each stage in a batch; None is by the weights of all tasks.
        digits: most digits of numbers of stage 4.
        symbols: most symbols of problems of stage 6.
        grow_to: most symbols from batch `grow_batches` on; it grows from `symbols` in a line. None
            does not grow.
        grow_batches: see there.
        state_labels: what is learnt in stage 6: "answer", or "running", the value so far after
            each symbol as well (of brackets with working, all that is written, in any case).
    """

    form: Form = Form()  # noqa: RUF009, it is frozen
    tasks: tuple[str, ...] | None = None
    shares: tuple[float, ...] | None = None
    digits: int = 10
    symbols: int = 40
    grow_to: int | None = None
    grow_batches: int = 10_000
    state_labels: str = "answer"

    def __post_init__(self):
        if self.state_labels not in STATE_LABELS:
            raise ValueError(
                f"state_labels must be one of {', '.join(STATE_LABELS)}, got {self.state_labels!r}"
            )
        for name, least in (("digits", 1), ("symbols", LEAST_SYMBOLS), ("grow_batches", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.grow_to is not None and self.grow_to < self.symbols:
            raise ValueError(f"grow_to must be at least symbols={self.symbols}, got {self.grow_to}")

    def tasks_of(self, stages: Sequence[int]) -> list[Task]:
        """The tasks of stages, in order.

        Raises:
            ValueError: no task of a stage is among those wanted.
        """
        every = [task for stage in stages for task in TASKS.values() if task.stage == stage]
        chosen = [task for task in every if self.tasks is None or task.name in self.tasks]
        if left_out := set(stages) - {task.stage for task in chosen}:
            raise ValueError(f"no task is left of stages {sorted(left_out)}; leave them out")
        return chosen

    def probabilities(self, stages: Sequence[int]) -> list[float]:
        """How often each of `tasks_of` is drawn.

        Raises:
            ValueError: not one positive share for each stage, or a task that none of them has.
        """
        every = [task.name for task in TASKS.values() if task.stage in stages]
        if unknown := [name for name in self.tasks or () if name not in every]:
            raise ValueError(f"tasks must be some of {', '.join(every)}, got {unknown[0]!r}")
        tasks = self.tasks_of(stages)
        if self.shares is None:
            weights = [float(task.weight) for task in tasks]
        else:
            if len(self.shares) != len(stages) or min(self.shares) <= 0:
                raise ValueError(
                    f"shares must be positive numbers, one for each of stages {list(stages)}, got "
                    f"{list(self.shares)}"
                )
            share = dict(zip(stages, self.shares, strict=True))
            whole = {s: sum(task.weight for task in tasks if task.stage == s) for s in stages}
            weights = [share[task.stage] * task.weight / whole[task.stage] for task in tasks]
        return [weight / sum(weights) for weight in weights]

    def sizes(self, task: Task, batch: int = 0) -> tuple[int, int]:
        """The least and the largest size of a task's problems in a batch of training."""
        if task.stage == 4:
            return 1, self.digits
        if task.name == "times":
            return 1, TIMES_DIGITS
        if task.stage == 6:
            return LEAST_SYMBOLS, self.most_symbols(batch)
        return 0, 0

    def most_symbols(self, batch: int) -> int:
        """How long problems of stage 6 are in a batch, at most."""
        if self.grow_to is None:
            return self.symbols
        more = (self.grow_to - self.symbols) * min(batch, self.grow_batches) // self.grow_batches
        return min(self.grow_to, self.symbols - -more // GROWTH * GROWTH)

    def measured_sizes(self, task: Task) -> Sequence[int]:
        """The sizes that are measured where none are asked for; none where a task has one."""
        least, most = self.sizes(task)
        if task.stage == 6:
            return (MEASURED_SYMBOLS,)
        # Single digits are facts.
        return range(min(2, most), most + 1) if least else ()

    def has_form_of(self, prompt: str, stages: Sequence[int]) -> bool:
        """Whether a problem in its natural form looks like one of the stages, of whatever size."""
        return any(re.fullmatch(_SHAPES[task.name], prompt) for task in self.tasks_of(stages))

    def outside(self, prompt: str, stages: Sequence[int]) -> str | None:
        """Why a problem in its natural form is none of those of the stages; None if it is."""
        reasons = []
        for task in self.tasks_of(stages):
            if re.fullmatch(_SHAPES[task.name], prompt):
                reason = self._too_large(task, prompt)
                if reason is None:
                    return None
                reasons.append(reason)
        if reasons:
            return reasons[0]
        names = ", ".join(task.name for task in self.tasks_of(stages))
        return f"{prompt!r} is no problem of what was trained: {names}"

    def _too_large(self, task: Task, prompt: str) -> str | None:
        numbers = re.findall(r"\d+", prompt)
        if task.stage == 3:
            return None if _is_without_carry(prompt) else "there is something to carry"
        if task.stage == 6:
            if task.name == "brackets" and not _is_nested(prompt):
                return "there is not just a pair of brackets around each operation: %((3+4)*2)"
            length, most = len(prompt) - 1, self.grow_to or self.symbols
            if LEAST_SYMBOLS <= length <= most:
                return None
            return f"{length} symbols, trained on {LEAST_SYMBOLS} to {most}"
        most = {4: self.digits, 5: TIMES_DIGITS}.get(task.stage, MAX_DIGITS)
        if max(map(len, numbers)) <= most:
            return None
        return f"a number of {max(map(len, numbers))} digits, trained on up to {most}"


_SHAPES = {
    "copy": r"c\d+",
    "reverse": r"r\d+",
    "successor": r"s(?!9999$)\d+",
    "compare": r"\d+\?\d+",
    "add": r"\d\+\d",
    "subtract": r"\d-\d",
    "plus": r"\d{2,3}\+\d{2,3}",
    "minus": r"\d{2,3}-\d{2,3}",
    "chain": r"\d{2,3}\+\d{2,3}-\d{2,3}",
    "sum": r"\d+\+\d+",
    "difference": r"\d+-\d+",
    "times": r"\d+\*\d",
    "product": r"\d\d\*\d\d",
    "parity": r"p[01]+",
    "modular": r"%[0-4](?:[+\-*][0-4])*",
    "brackets": r"%[0-4+\-*()]+",
}


def _is_without_carry(prompt: str) -> bool:
    first, *others = re.findall(r"[+-]?\d+", prompt)
    total = first.zfill(3)
    for other in others:
        sign = -1 if other[0] == "-" else 1
        digits = [int(x) + sign * int(y) for x, y in zip(total, other[1:].zfill(3), strict=True)]
        if not all(0 <= digit <= 9 for digit in digits):
            return False
        total = "".join(map(str, digits))
    return True


def _is_nested(prompt: str) -> bool:
    """Whether there is a pair of brackets around each operation and no other."""
    text, shorter = re.sub(r"\d", "d", prompt[1:]), ""
    while (shorter := re.sub(r"\((?:-?d|(?:-?d|e)[+\-*](?:-?d|e))\)", "e", text)) != text:
        text = shorter
    return text in ("e", "d", "-d")
