"""Rows of a user's own to fine-tune on: texts, prompts with completions, or conversations.

    {"text": "..."}                                                     all tokens are trained on
    {"prompt": "...", "completion": "..."}                              the completion
    {"messages": [{"role": "user", "content": "..."}, ...]}             what the assistant says

One form a data set; other keys are ignored. Files are .jsonl (an object a line), .parquet (a row,
its columns being the keys) and .txt (a text a paragraph: blank lines part them).
"""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mamba3.data.problems import hash_share
from mamba3.data.sources import SUFFIXES, Record, read_records

FORMS = {"text": ("text",), "prompt": ("prompt", "completion"), "messages": ("messages",)}
EXPECTED = (
    'expected {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., '
    '"content": ...}, ...]}; for keys of other names, --columns prompt=question completion=answer'
)
# What files to train on and to measure on begin with, and those that are left alone.
TRAIN, VALID, TEST = ("train",), ("valid", "validation", "dev", "val"), ("test",)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """A row of a data set.

    form: a key of `FORMS`.
    content: the text, the pair of prompt and completion, or the list of messages.
    where: file and line, for messages.
    line: how it stands there, shortened.
    """

    form: str
    content: Any
    where: str
    line: str

    @property
    def key(self) -> str:
        """What rows are told apart by where they are split: rows of a key stay together."""
        if self.form == "prompt":
            return self.content[0]
        return self.content if self.form == "text" else json.dumps(self.content, sort_keys=True)

    def error(self, reason: object) -> ValueError:
        """The error that says what is wrong with this row."""
        return _error(self.where, self.line, reason)


class Rows(NamedTuple):
    """A data set.

    name: of the file, the folder or the data set, without what stands before or after it.
    form: of all its rows.
    train, valid: rows to train on, and those to measure on.
    valid_files: names of the files of `valid`; none where it was split off by a hash.
    """

    name: str
    form: str
    train: list[Row]
    valid: list[Row]
    valid_files: list[str]


def load_rows(
    data: str | Path, *, columns: Mapping[str, str] | None = None, valid_fraction: float = 0.2
) -> Rows:
    """Read a data set.

    Args:
        data: a file; a folder with files train.* (train-00000.parquet, ...) and, if there are any,
            valid.* (or validation, dev, val; else test); or a data set of the Hub, as org/name or
            org/name@revision, whose .jsonl and .parquet files are downloaded. A folder in which no
            file is named so is all to train on.
        columns: names of keys in the files, by the names they have here, as in
            {"prompt": "question"}.
        valid_fraction: share of the rows that is split off by a hash where no file is for that.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: a row that cannot be used, with its file, its line and what was expected.
        RuntimeError: there is a Parquet file, and pyarrow is not installed.
    """
    name, train_files, valid_files = data_files(data)
    columns = dict(columns or {})
    _check_columns(columns)
    train = [row for file in train_files for row in read_file(file, columns)]
    valid = [row for file in valid_files for row in read_file(file, columns)]
    form = _only_form([*train, *valid])
    if valid_files:
        train = _without(train, valid)
    else:
        train, valid = split_rows(train, valid_fraction, key=lambda row: row.key)
    return Rows(name, form, train, valid, [file.name for file in valid_files])


def read_file(path: str | Path, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Read the rows of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there are no rows, or one cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file; expected rows of a text, or of a prompt and a completion, or "
            f"of messages ({', '.join(SUFFIXES)})"
        )
    rows = [_row(record, columns or {}) for record in read_records(path)]
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def split_rows(
    rows: Sequence, valid_fraction: float, key: Callable[[Any], str] = lambda row: row.prompt
) -> tuple[list, list]:
    """Split rows into training and validation rows by a hash of the prompt.

    A prompt is on one side only, and stays there when rows are added. Each side gets at least one
    prompt, whatever the hash says.

    Args:
        rows: at least two different prompts.
        valid_fraction: expected share of the validation rows, between 0 and 1.
        key: the prompt of a row, or what stands for it.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must lie between 0 and 1, got {valid_fraction}")
    shares = {text: hash_share(text) for text in map(key, rows)}
    if len(shares) < 2:
        raise ValueError(
            f"{len(shares)} different prompt(s) cannot be split into training and validation rows; "
            "give at least 2"
        )
    ranked = sorted(shares, key=shares.get)
    cut = sum(share < valid_fraction for share in shares.values())
    valid = set(ranked[: min(max(cut, 1), len(ranked) - 1)])
    train_rows = [row for row in rows if key(row) not in valid]
    return train_rows, [row for row in rows if key(row) in valid]


def data_files(data: str | Path) -> tuple[str, list[Path], list[Path]]:
    """The name of a data set, and its files to train on and to measure on."""
    path = Path(data)
    if path.is_file():
        return path.stem, [path], []
    if path.is_dir():
        return path.resolve().name, *_files_in(path)
    if not HUB_NAME.fullmatch(str(data)) or path.suffix in SUFFIXES:
        raise FileNotFoundError(
            f"{data} is not a file, nor a folder, nor the name of a data set of the Hub (org/name)"
        )
    return str(data).split("/")[1].split("@")[0], *_files_in(_downloaded(str(data)))


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=["*.jsonl", "*.parquet"],
        )
    except Exception as error:  # those of the network have no class in common
        raise FileNotFoundError(
            f"{name} is neither a file nor a folder here, and as a data set of the Hub it could "
            f"not be had: {type(error).__name__}: {error}"
        ) from error
    return Path(folder)


def _files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    found: dict[str | None, list[Path]] = {}
    for file in sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file()):
        found.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    if not found:
        raise FileNotFoundError(f"{folder} holds no {', '.join(SUFFIXES)} file")
    train = found.get("train") or found.get(None)
    if not train:
        raise FileNotFoundError(f"{folder} holds no file to train on, such as train.jsonl")
    valid = found.get("valid") or found.get("test") or []
    if left := [f.name for files in found.values() for f in files if f not in [*train, *valid]]:
        logger.warning("%s: left out are %s", folder, ", ".join(left))
    return train, valid


def _split_of(path: Path) -> str | None:
    """What a file is for, as the first word of its name says, or that of a folder it is in."""
    for part in reversed(path.parts):
        word = re.split(r"[^a-z]", part.lower())[0]
        for split, words in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
            if word in words:
                return split
    return None


def _check_columns(columns: Mapping[str, str]) -> None:
    if not any(columns.keys() <= set(keys) for keys in FORMS.values()):
        raise ValueError(
            f"columns may rename text, prompt and completion, or messages, got {sorted(columns)}"
        )


def _row(record: Record, columns: Mapping[str, str]) -> Row:
    try:
        if record.error:
            raise ValueError(record.error)
        if isinstance(record.value, str) and not columns:
            return Row("text", record.value, record.where, record.line)
        return Row(*_form_and_content(record.value, columns), record.where, record.line)
    except ValueError as error:
        raise _error(record.where, record.line, error) from None


def _error(where: str, line: str, reason: object) -> ValueError:
    return ValueError(f"{where}: {reason}\n  the line: {line}\n  {EXPECTED}")


def _form_and_content(row: Any, columns: Mapping[str, str]) -> tuple[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {reprlib.repr(row)}")
    form = _form(columns) or _form(row)
    if form is None:
        raise ValueError(f"no key of a known form; there are {sorted(row)}")
    values = []
    for name in FORMS[form]:
        key = columns.get(name, name)
        if key not in row:
            raise ValueError(f"the key {key!r} is missing; there are {sorted(row)}")
        values.append(_messages(row[key]) if form == "messages" else _string(row[key], key))
    return form, tuple(values) if form == "prompt" else values[0]


def _form(keys: Mapping[str, Any]) -> str | None:
    if "messages" in keys:
        return "messages"
    if "prompt" in keys or "completion" in keys:
        return "prompt"
    return "text" if "text" in keys else None


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string, got {reprlib.repr(value)}")
    if not value:
        raise ValueError(f"{key} is empty")
    return value


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of some, got {reprlib.repr(value)}")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {number} must be an object of role and content, got "
                f"{reprlib.repr(message)}"
            )
        if not isinstance(message.get("content"), str):
            raise ValueError(f"the content of message {number} must be a string")
        messages.append({"role": message["role"], "content": message["content"]})
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no message is the assistant's")
    return messages


def _only_form(rows: Sequence[Row]) -> str:
    for row in rows:
        if row.form != rows[0].form:
            raise row.error(
                f"a row of {' and '.join(FORMS[row.form])} among rows of "
                f"{' and '.join(FORMS[rows[0].form])}; a data set has one form"
            )
    return rows[0].form


def _without(train: list[Row], valid: list[Row]) -> list[Row]:
    """Rows to train on that are not there to be measured on as well."""
    measured = {row.key for row in valid}
    kept = [row for row in train if row.key not in measured]
    if not kept:
        raise ValueError("every row to train on is also one to measure on")
    if left := len(train) - len(kept):
        logger.warning("left out are %d rows to train on, which are also measured on", left)
    return kept
