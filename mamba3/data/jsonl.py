"""Prompt/completion rows of a user's own: one JSON object a line.

    {"prompt": "12+7", "completion": "19"}

Other keys are ignored. The tokenizer's `prompt_suffix` ("=" in the arithmetic models) is added
where a prompt lacks it, in training and in evaluation alike, so rows need not carry it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mamba3.data.problems import Problem, hash_share
from mamba3.data.tokenizer import CharTokenizer


def read_rows(path: str | Path, tokenizer: CharTokenizer) -> list[Problem]:
    """Read a file of prompt/completion rows.

    Args:
        path: the .jsonl file, UTF-8.
        tokenizer: must be able to encode every row.

    Returns:
        One problem a row, in the order of the file; their task is the file's name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the first line that cannot be used, with the file and the number of the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected prompt/completion rows (.jsonl)")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            prompt, completion = _read_line(line)
            tokenizer.encode_prompt(prompt)
            tokenizer.encode(completion)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        rows.append(Problem(path.stem, prompt, completion))
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def split_rows(
    rows: Sequence[Problem], valid_fraction: float
) -> tuple[list[Problem], list[Problem]]:
    """Split rows into training and validation rows by a hash of the prompt.

    A prompt is on one side only, and stays there when rows are added. Each side gets at least one
    prompt, whatever the hash says.

    Args:
        rows: at least two different prompts.
        valid_fraction: expected share of the validation rows, between 0 and 1.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must lie between 0 and 1, got {valid_fraction}")
    shares = {row.prompt: hash_share(row.prompt) for row in rows}
    if len(shares) < 2:
        raise ValueError(
            f"{len(shares)} different prompt(s) cannot be split into training and validation rows; "
            "give at least 2"
        )
    ranked = sorted(shares, key=shares.get)
    cut = sum(share < valid_fraction for share in shares.values())
    valid = set(ranked[: min(max(cut, 1), len(ranked) - 1)])
    train_rows = [row for row in rows if row.prompt not in valid]
    return train_rows, [row for row in rows if row.prompt in valid]


def _read_line(line: bytes) -> tuple[str, str]:
    if not line.strip():
        raise ValueError("the line is empty")
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with prompt and completion, got {row!r}")
    for key in ("prompt", "completion"):
        if key not in row:
            raise ValueError(f"the key {key!r} is missing; there are {sorted(row)}")
        if not isinstance(row[key], str):
            raise ValueError(f"{key} must be a string, got {row[key]!r}")
        if not row[key]:
            raise ValueError(f"{key} is empty")
    return row["prompt"], row["completion"]
