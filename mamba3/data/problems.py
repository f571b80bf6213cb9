"""Problems, a prompt and its one right answer each, and batches of them.

A problem becomes ``<bos>PROMPT=ANSWER<eos>`` (the "=" is the tokenizer's `prompt_suffix`). Labels
lie at the ids they stand for, the model shifts them; prompt and padding carry `IGNORE`, so the
loss is that of the answer and of eos. A prompt can have blanks, into which the model writes the
first characters of its answer while it reads. Rows are padded on the right and have no attention
mask: the model is causal, so pads after a row cannot reach it, and the path without a mask is the
faster one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba3.data.tokenizer import CharTokenizer
from mamba3.models.lm import IGNORE

BLANK = "_"


class Problem(NamedTuple):
    """A prompt, its answer, and the task it belongs to (the name results are reported under).

    traits: what it has so many of, as (name, number), such as ("digits", 7).
    blanks: whether each `BLANK` of the prompt is a place that the model writes a character of the
        answer into, once it has read what is before; what is left of the answer comes at the end.
    """

    task: str
    prompt: str
    answer: str
    traits: tuple[tuple[str, int], ...] = ()
    blanks: bool = False

    @property
    def group(self) -> str:
        """The task and the traits, as in "sum, 7 digits, 3 carries"."""
        return ", ".join([self.task, *(f"{number} {name}" for name, number in self.traits)])


class Batch(NamedTuple):
    """input_ids and labels (B, L) int64, and how many ids are not padding.

    seq_idx (B, L) int64 says which document of its row an id belongs to, where rows hold several.
    """

    input_ids: Tensor
    labels: Tensor
    n_tokens: int
    seq_idx: Tensor | None = None


def scored_tokens(labels: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """How many tokens of (B, L) labels a model scores: the first of a row or a document is not."""
    scored = labels[:, 1:] != IGNORE
    if seq_idx is not None:
        scored &= seq_idx[:, 1:] == seq_idx[:, :-1]
    return scored.sum()


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, the same in every process and version.

    Splits compare it with a fraction, so that a problem stays on its side whatever is drawn, and
    however the data grows.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def prompt_ids(problem: Problem, tokenizer: CharTokenizer) -> tuple[list[int], list[int]]:
    """The ids of a prompt, and where among them its blanks are, which are padding."""
    if not problem.blanks:
        return tokenizer.encode_prompt(problem.prompt), []
    rest = problem.prompt.replace(BLANK, "")
    ids = tokenizer.encode_prompt(rest)
    if ids[1 : len(rest) + 1] != tokenizer.encode(rest) or tokenizer.decode(ids[:1]):
        raise ValueError("prompts with blanks need a tokenizer with a token for each character")
    places = [i + 1 for i, character in enumerate(problem.prompt) if character == BLANK]  # bos
    for place in places:
        ids.insert(place, tokenizer.pad_token_id)
    return ids, places


def ids_and_labels(problem: Problem, tokenizer: CharTokenizer) -> tuple[list[int], list[int]]:
    """The ids of a problem, and their labels: the prompt carries `IGNORE`, but for its blanks."""
    prompt, blanks = prompt_ids(problem, tokenizer)
    answer = tokenizer.encode_answer(problem.answer)
    labels = [IGNORE] * len(prompt)
    for place, token in zip(blanks, answer, strict=False):
        prompt[place] = labels[place] = token
    rest = answer[len(blanks) :]
    return prompt + rest, labels + rest


def collate(problems: Sequence[Problem], tokenizer: CharTokenizer) -> Batch:
    """Make one batch of problems, as long as the longest."""
    pairs = [ids_and_labels(problem, tokenizer) for problem in problems]
    lengths = np.array([len(ids) for ids, _ in pairs])
    real = np.arange(lengths.max()) < lengths[:, None]
    # One list each: Python's loop over rows of every batch took longer than a small model's step.
    batch = []
    for rows, pad in zip(zip(*pairs, strict=True), (tokenizer.pad_token_id, IGNORE), strict=True):
        padded = np.full(real.shape, pad)
        padded[real] = list(itertools.chain.from_iterable(rows))
        batch.append(torch.from_numpy(padded))
    return Batch(*batch, int(lengths.sum()))
