"""The arithmetic curriculum: batches of problems to train on, and problems to measure on.

A problem reads ``PROMPT=ANSWER``. In the plain form, numbers are decimal, most significant digit
first; `mamba3.data.arithmetic_forms` has the others.

    stage  task        prompt       answer          what it asks
    1      copy        c1203        1203            the same digits
    1      reverse     r1203        3021            the digits from the end (r120 is 021)
    1      successor   s1299        1300            the number plus one
    1      compare     120?45       >               "<", "=" or ">" between the two numbers
    2      add         3+9          12              sum of two digits
    2      subtract    3-9          -6              difference of two digits
    3      plus        312+57       369             numbers of 2 or 3 digits, nothing to carry
    3      minus       978-45       933             the same, nothing to borrow
    3      chain       31+57-80     8               a sum and then a difference, neither to carry
    4      sum         978+145      1123            numbers of 1 to 10 digits
    4      difference  145-978      -833            the same
    5      times       12345678*7   86419746        a number of 1 to 8 digits times one digit
    5      product     47*36        282+1410=1692   two digits times two, with the working
    6      parity      p0110        0               whether the number of ones is odd
    6      modular     %3+4*2       1               modulo 5, multiplication first
    6      brackets    %((3+4)*2)   4               modulo 5, brackets around each operation

Numbers of stage 1 have 1 to 4 digits, each count equally often, and so have their successors (9999
is not asked). In stage 4 the digits of the longer number are drawn first, each count equally often,
then the number of carries or borrows, and then a problem with just those. Lengths of stage 6 count
the symbols after the letter, from 3 to the longest, which can grow in the course of a run.

What is measured. Problems are split by a hash of the prompt in its natural form: a tenth of them is
held out, is never drawn for training at any stage, seed, size or form, and is what exact match is
measured on. Facts, two single digits with a sign between, are tables to be known by heart: one that
was never shown cannot be known, so all are trained on, and stage 2 measures recall of its 200.
Stage 3 trains on 10,000 problems that are drawn once and stay the same.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator, Philox

from mamba3.data.arithmetic_forms import Form, answer_from_model, prompt_from_model
from mamba3.data.arithmetic_options import STAGES, ProblemOptions
from mamba3.data.arithmetic_tasks import MAX_DIGITS, TASKS, Drawn, Task, fact_table
from mamba3.data.characters import BOS, EOS, characters, constant, hash_shares, squeezed, texts
from mamba3.data.groups import together
from mamba3.data.problems import BLANK, Batch, Problem, collate
from mamba3.data.tokenizer import CharTokenizer, Tokenizer
from mamba3.models.lm import IGNORE

# 32 tokens with the three special ones. Letters name tasks; w to z are free for a user's own.
CHARACTERS = "0123456789+-*%=()<>,?crspwxyz"
PROMPT_SUFFIX = "="
TEST_SHARE = 0.1
SKILL_FILE = Path(__file__).parent / "assets" / "sort_digits.jsonl"
# Share of the answers that guessing gets right, of the tasks that are compared by it.
CHANCE = {task.name: task.chance for task in TASKS.values() if task.chance is not None}
# Problems of stage 3 that are trained on.
FIXED = 10_000
# Problems that are drawn at once where batches are smaller: to begin with an array takes numpy as
# long as to go through hundreds of rows, and so it is with queues and copies.
_AT_ONCE = 8192
# Draws of held-out problems; tasks that have too few give fewer.
_TRIES = 30
_NO_SIZES = np.zeros(0, np.intp)
_FACT = re.compile(r"\d[+\-*]\d")
# First words of the keys of random numbers, so that no two uses of a seed share any.
_TRAIN, _TEST, _ONCE = range(3)


def tokenizer() -> CharTokenizer:
    """The curriculum's tokenizer; a prompt ends with "="."""
    return CharTokenizer(CHARACTERS, prompt_suffix=PROMPT_SUFFIX)


def check_stages(stages: Sequence[int]) -> tuple[int, ...]:
    """The stages as a tuple, or an error that says which there are."""
    if not isinstance(stages, (list, tuple)):
        raise TypeError(f"stages must be a list, got {stages!r}")
    stages = tuple(stages)
    if not stages or len(set(stages)) < len(stages) or not set(stages) <= set(STAGES):
        raise ValueError(f"stages must be some of {list(STAGES)}, each once, got {list(stages)}")
    return stages


def is_held_out(prompt: str) -> bool:
    """Whether a problem, as `natural` gives it, is kept for measuring, and so never trained on."""
    return bool(_held_out(characters([prompt]))[0])


def _held_out(prompts: np.ndarray) -> np.ndarray:
    held = hash_shares(prompts) < TEST_SHARE
    [short] = np.nonzero(held & (np.count_nonzero(prompts, axis=1) == 3))
    if len(short):
        held[short] = [not _FACT.fullmatch(text) for text in texts(prompts[short])]
    return held


def _random(use: int, seed: int, number: int) -> Generator:
    """Random numbers of their own for each use, seed and number."""
    return Generator(Philox(key=[use << 56 | seed, number]))


def facts(form: Form = Form()) -> list[Problem]:  # noqa: B008, it is frozen
    """All 200 problems of stage 2."""
    return [
        problem
        for name, sign in (("add", "+"), ("subtract", "-"))
        for problem in _problems(name, fact_table(sign, form))
    ]


@functools.cache
def training_set(name: str, form: Form = Form()) -> Drawn:  # noqa: B008
    """The problems that a task of stage 3 is trained on, each once, and none held out."""
    task = TASKS[name]
    every = [other for other in TASKS.values() if other.stage == task.stage]
    size = FIXED * task.weight // sum(other.weight for other in every)
    drawn = task.draw(_random(_ONCE, 0, every.index(task)), 4 * size, form, _NO_SIZES)
    drawn = drawn.take(np.flatnonzero(~_held_out(drawn.natural)))
    chosen = _first_of_each(drawn)[:size]
    assert len(chosen) == size
    return drawn.take(chosen)


def _first_of_each(drawn: Drawn) -> np.ndarray:
    """The rows, in order, whose prompt is in none before."""
    prompts = np.ascontiguousarray(squeezed(drawn.natural, drawn.natural.shape[1]))
    return np.sort(np.unique(prompts.view(f"S{prompts.shape[1]}"), return_index=True)[1])


def _draw_for_training(task: Task, rng: Generator, n: int, form: Form, sizes: np.ndarray) -> Drawn:
    if task.stage == 3:
        those = training_set(task.name, form)
        return those.take(rng.integers(0, len(those.natural), n))
    return task.draw(rng, n, form, sizes)


def _problems(name: str, drawn: Drawn) -> list[Problem]:
    traits = [
        tuple(zip(drawn.traits, numbers, strict=True))
        for numbers in zip(*(values.tolist() for values in drawn.traits.values()), strict=True)
    ] or [()] * len(drawn.prompts)
    each = zip(texts(drawn.prompts), texts(drawn.answers), traits, strict=True)
    return [_problem(name, *rest) for rest in each]


def _problem(name: str, prompt: str, answer: str, traits=()) -> Problem:
    return Problem(name, prompt, answer, traits, blanks=BLANK in prompt)


class _Rows(NamedTuple):
    """Some batches' problems: the task of each, and its characters."""

    tasks: np.ndarray
    prompts: np.ndarray
    answers: np.ndarray
    running: np.ndarray | None


class _Block(NamedTuple):
    """Batches that are drawn at once; ids and labels are None for the tokenizers of others."""

    number: int
    rows: _Rows
    ids: np.ndarray | None
    labels: np.ndarray | None


class CurriculumStream:
    """An endless stream of training batches, the tasks of all stages mixed.

    Batch i is a function of (stages, batch_size, seed, options, i): a run continues from the number
    of its batch. Held-out problems never appear. All batches have one length, that of the longest
    problem there can be, but for those of stage 6 while problems grow.

    Args:
        stages: stages to mix.
        tokenizer: turns problems into ids.
        batch_size: problems in a batch.
        seed: of the draws.
        options: which problems of the stages.
    """

    def __init__(
        self,
        stages: Sequence[int],
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seed: int,
        options: ProblemOptions = ProblemOptions(),  # noqa: B008, it is frozen
    ):
        stages = check_stages(stages)
        self.tasks, self.shares = options.tasks_of(stages), options.probabilities(stages)
        self.tokenizer, self.batch_size, self.seed = tokenizer, batch_size, seed
        self.options = options
        self.batches_at_once = together(batch_size, _AT_ONCE)
        self._made: _Block | None = None

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_made": None}

    def __call__(self, index: int) -> Batch:
        """Batch number `index`, from 0."""
        block, rows = self._find(index)
        if block.ids is None:
            return collate(self.problems(index), self.tokenizer)
        ids, labels = block.ids[rows], block.labels[rows]
        n_tokens = int(np.count_nonzero(ids != self.tokenizer.pad_token_id))
        ids, labels = (torch.from_numpy(each.astype(np.int64)) for each in (ids, labels))
        return Batch(ids, labels, n_tokens)

    def problems(self, index: int) -> list[Problem]:
        """The problems of batch number `index`."""
        (_, (tasks, prompts, answers, _), *_), rows = self._find(index)
        names = (self.tasks[i].name for i in tasks[rows])
        each = zip(names, texts(prompts[rows]), texts(answers[rows]), strict=True)
        return [_problem(*problem) for problem in each]

    def _find(self, index: int) -> tuple[_Block, slice]:
        """The block that a batch lies in, and which of its rows are the batch's."""
        number, place = divmod(index, self.batches_at_once)
        if self._made is None or self._made.number != number:
            self._made = self._block(number)
        return self._made, slice(place * self.batch_size, (place + 1) * self.batch_size)

    def _block(self, number: int) -> _Block:
        rows, ids, labels = self._rows(number), None, None
        if _is_ours(self.tokenizer):
            widths = self._widths(number * self.batches_at_once)
            width = 3 + max(prompt + answer - blanks for _, prompt, answer, blanks in widths)
            ids, labels = _encoded(rows, width, self.tokenizer)
        return _Block(number, rows, ids, labels)

    def _rows(self, number: int) -> _Rows:
        """The problems of block `number`."""
        n = self.batches_at_once * self.batch_size
        rng, extra = _random(_TRAIN, self.seed, number), n // 6 + 64  # a tenth is held out
        while True:
            drawn, natural = self._draw(rng, n + extra, number * self.batches_at_once)
            order = rng.permutation(n + extra)
            order = order[~_held_out(natural)[order]][:n]
            if len(order) == n:
                return _Rows(
                    *(None if each is None else each.take(order, axis=0) for each in drawn)
                )
            # There are so few problems of these sizes that much more than a tenth is held out.
            extra *= 4
            if extra > 100 * n:
                raise ValueError(f"almost all problems of {self.options} are held out")

    def _draw(self, rng: Generator, n: int, batch: int) -> tuple[_Rows, np.ndarray]:
        """n problems, held-out ones among them, task by task; and their natural prompts."""
        counts, form = rng.multinomial(n, self.shares), self.options.form
        parts = []
        for task, count in zip(self.tasks, counts.tolist(), strict=True):
            least, most = self.options.sizes(task, batch)
            sizes = rng.integers(least, most + 1, count)
            parts.append(_draw_for_training(task, rng, count, form, sizes))
        widths = self._widths(batch)
        natural, prompts, answers = (
            _stacked([part[i] for part in parts], max(width[i] for width in widths))
            for i in range(3)
        )
        running = None
        if self.options.state_labels == "running":
            none = np.zeros((n, 0), np.uint8)
            each = [none[: len(p.prompts)] if p.running is None else p.running for p in parts]
            running = _stacked(each, prompts.shape[1])
        return _Rows(np.repeat(np.arange(len(parts)), counts), prompts, answers, running), natural

    def _widths(self, batch: int) -> list[tuple[int, int, int, int]]:
        """Of each task in a batch, what `_widths` gives."""
        form, options = self.options.form, self.options
        return [_widths(task.name, form, options.sizes(task, batch)[1]) for task in self.tasks]


@functools.cache
def _widths(name: str, form: Form, size: int) -> tuple[int, int, int, int]:
    """Columns of a task's natural prompts, prompts, answers and blanks, up to a size."""
    drawn = TASKS[name].draw(_random(_ONCE, 0, 0), 1, form, np.array([size]))
    return *(chars.shape[1] for chars in drawn[:3]), drawn.blanks


def _stacked(parts: list[np.ndarray], width: int) -> np.ndarray:
    """Matrices one below the other, each widened to `width`."""
    rows = np.zeros((sum(map(len, parts)), width), np.uint8)
    first = 0
    for part in parts:
        rows[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return rows


def _is_ours(tokenizer: Tokenizer) -> bool:
    """Whether ids can be looked up character by character."""
    return isinstance(tokenizer, CharTokenizer) and tokenizer.prompt_suffix == PROMPT_SUFFIX


def _encoded(
    problems: _Rows, width: int, tokenizer: CharTokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels (n, width) int32 of whole problems, as `collate` makes them.

    Where there are running values, the label after a character is the value so far.
    """
    _, prompts, answers, running = problems
    n = len(prompts)
    first, last = np.full((n, 1), BOS, np.uint8), np.full((n, 1), EOS, np.uint8)
    blanks, written = prompts == ord(BLANK), None
    if blanks.any():
        prompts, answers = _filled(prompts, answers, blanks)
        written = blanks * prompts
    rows = np.hstack([first, prompts, constant(PROMPT_SUFFIX, n), answers, last])
    chars, table = squeezed(rows, width), _id_table(tokenizer)
    ids, at = table.take(chars), np.arange(width, dtype=np.int16)
    ends = np.count_nonzero(prompts, axis=1).astype(np.int16)[:, None] + np.int16(2)
    labels = np.where((at >= ends) & (chars != 0), ids, np.int32(IGNORE))
    if written is not None:
        np.copyto(labels, ids, where=_placed(written, rows, width) != 0)
    if running is not None:
        values = _placed(running, rows, width)[:, :-1]
        np.copyto(labels[:, 1:], table.take(values), where=values != 0)
    return ids, labels


def _placed(values: np.ndarray, rows: np.ndarray, width: int) -> np.ndarray:
    """What belongs to the characters of prompts, where these are in rows without gaps."""
    beside = np.zeros_like(rows)
    beside[:, 1 : values.shape[1] + 1] = values
    return squeezed(beside, width, by=rows)


def _filled(prompts: np.ndarray, answers: np.ndarray, blanks: np.ndarray) -> tuple:
    """Prompts with the first characters of the answers in their blanks, and what is left."""
    answers = squeezed(answers, answers.shape[1])
    counts = blanks.sum(axis=1, keepdims=True)
    written = np.arange(answers.shape[1]) < counts
    prompts = prompts.copy()
    prompts[blanks] = answers[written]
    return prompts, answers * ~written


def _id_table(tokenizer: CharTokenizer) -> np.ndarray:
    """The id of each character code."""
    table = np.zeros(256, np.int32)
    for text in CHARACTERS:
        [table[ord(text)]] = tokenizer.encode(text)
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    table[[0, BOS, EOS]] = special
    return table


def eval_problems(
    stage: int,
    n: int,
    *,
    seed: int = 0,
    options: ProblemOptions = ProblemOptions(),  # noqa: B008, it is frozen
    sizes: Sequence[int] | None = None,
) -> list[Problem]:
    """What exact match of a stage is measured on: each problem once, all held out.

    Args:
        stage: one of `STAGES`.
        n: number of problems, spread evenly over the tasks (rounded up) and their sizes; where
            fewer are held out, there are fewer. Stage 2 gives its 200 facts, whatever n.
        seed: of the draw.
        options: form and tasks.
        sizes: digits (stage 4, and n x 1 of stage 5) or symbols (stage 6) of the problems, whatever
            was trained; None takes those of training from 2 digits on, and 256 symbols.

    Raises:
        ValueError: no problem is held out.
    """
    tasks = options.tasks_of(check_stages([stage]))
    if stage == 2:
        names = {task.name for task in tasks}
        return [problem for problem in facts(options.form) if problem.task in names]
    share, found = -(-n // len(tasks)), []
    for task in tasks:
        wanted = options.measured_sizes(task)
        if wanted and sizes is not None:
            wanted = sizes
        found += _measured(task, share, seed, options.form, wanted)
    return found


def _measured(task: Task, n: int, seed: int, form: Form, sizes: Sequence[int]) -> list[Problem]:
    """Held-out problems of a task, as many of each size as can be."""
    rng = _random(_TEST, seed, list(TASKS).index(task.name))
    found: dict[str, Problem] = {}
    for _ in range(_TRIES):
        missing = n - len(found)
        if not missing:
            break
        each = np.resize(np.array(sizes or [0]), 12 * missing + 1000)
        drawn = task.draw(rng, len(each), form, each)
        drawn = drawn.take(np.flatnonzero(_held_out(drawn.natural)))
        new = {p.prompt: p for p in _problems(task.name, drawn) if p.prompt not in found}
        found |= dict(list(new.items())[:missing])
    if not found:
        raise ValueError(f"no problem of the task {task.name} at sizes {list(sizes)} is held out")
    return list(found.values())


def well_formed(problem: Problem, answer: str, form: Form = Form()) -> bool:  # noqa: B008
    """Whether what a model wrote has the form of an answer to a problem of its task."""
    prompt = prompt_from_model(problem.prompt, form)
    text = answer_from_model(prompt, answer, form)
    return re.fullmatch(TASKS[problem.task].answer, text) is not None


def skill_rows(n: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Prompt/completion rows of a skill that is in no stage: sort the digits.

    ``x4132`` becomes ``1234``; 3 or 4 digits, each prompt once. `SKILL_FILE` holds 500 of them,
    those of seed 0.
    """
    rng = random.Random(f"skill/{seed}")
    rows: dict[str, str] = {}
    while len(rows) < n:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, MAX_DIGITS)))
        rows[f"x{digits}"] = "".join(sorted(digits))
    return [{"prompt": prompt, "completion": completion} for prompt, completion in rows.items()]
