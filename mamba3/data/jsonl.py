"""Prompt/completion rows as problems, which exact match is measured on.

    {"prompt": "12+7", "completion": "19"}

The tokenizer's `prompt_suffix` ("=" in the arithmetic models) is added where a prompt lacks it, in
training and in evaluation alike, so rows need not carry it.
"""

from __future__ import annotations

from pathlib import Path

from mamba3.data.problems import Problem
from mamba3.data.rows import read_file, split_rows
from mamba3.data.tokenizer import Tokenizer

__all__ = ["read_rows", "split_rows"]


def read_rows(path: str | Path, tokenizer: Tokenizer) -> list[Problem]:
    """Read a file of prompt/completion rows.

    Args:
        path: the file, as of `mamba3.data.rows.read_file`.
        tokenizer: must be able to encode every row.

    Returns:
        One problem a row, in the order of the file; their task is the file's name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the first row that cannot be used, with the file and the number of the line.
    """
    problems = []
    for row in read_file(path):
        if row.form != "prompt":
            raise row.error("a prompt with its completion is needed to be measured by exact match")
        try:
            tokenizer.encode_prompt(row.content[0])
            tokenizer.encode_answer(row.content[1])
        except ValueError as error:
            raise row.error(error) from None
        problems.append(Problem(Path(path).stem, *row.content))
    return problems
