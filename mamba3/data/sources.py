"""Texts of a corpus, read one after another from plain text, JSONL and Parquet files.

suffix      a document
.jsonl      the string under a key of the object on a line
.parquet    the string in a column of a row; needs pyarrow
any other   the whole file, or a line of it; UTF-8
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".jsonl", ".parquet", ".txt")


class Text(NamedTuple):
    """A document of a corpus.

    text: None if it cannot be used; `error` then says why.
    where: file and line, for messages.
    n_bytes: its share of the file, for progress.
    """

    text: str | None
    where: str
    n_bytes: float = 0.0
    error: str = ""


def source_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files to read: those given and, in place of a folder, those in it, sorted by path.

    Args:
        paths: files of any suffix, and folders, of which the files of `SUFFIXES` are taken.

    Raises:
        FileNotFoundError: nothing there, or a folder without such files.
    """
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; expected a file of texts, or a folder")
        files = [path]
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
            if not files:
                raise FileNotFoundError(f"the folder {path} holds no {', '.join(SUFFIXES)} file")
        found += files
    return found


def read_texts(
    files: Sequence[Path], *, field: str = "text", lines: bool = False
) -> Iterator[Text]:
    """Read the documents of files, in order; those that cannot be used come with an error.

    Args:
        files: of `source_files`.
        field: key of the JSONL objects, or column of the Parquet files, that holds the text.
        lines: in plain text a line is a document, instead of a file; blank lines are none.

    Raises:
        ValueError: a Parquet file that is damaged or has no such column.
        RuntimeError: there is a Parquet file, and pyarrow is not installed.
    """
    for path in files:
        if path.suffix == ".parquet":
            yield from _rows(path, field)
        elif path.suffix == ".jsonl":
            yield from _lines(path, lambda line: _field(line, field))
        elif lines:
            yield from (text for text in _lines(path, _without_end) if text.text != "")
        else:
            yield _text(str(path), path.read_bytes(), _whole)


def _lines(path: Path, parse: Callable[[str], str]) -> Iterator[Text]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            yield _text(f"{path}, line {number}", line, parse)


def _text(where: str, content: bytes, parse: Callable[[str], str]) -> Text:
    try:
        return Text(parse(content.decode("utf-8-sig")), where, len(content))
    except ValueError as error:
        return Text(None, where, len(content), str(error))


def _whole(content: str) -> str:
    if not content:
        raise ValueError("the file is empty")
    return content


def _without_end(line: str) -> str:
    line = line.rstrip("\r\n")
    return line if line.strip() else ""


def _field(line: str, field: str) -> str:
    if not line.strip():
        raise ValueError("the line is empty")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the key {field!r}, got {reprlib.repr(row)}")
    if field not in row:
        raise ValueError(f"the key {field!r} is missing; there are {sorted(row)}")
    return _nonempty_string(row[field], field)


def _nonempty_string(value, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, got {reprlib.repr(value)}")
    if not value:
        raise ValueError(f"{field} is empty")
    return value


def _rows(path: Path, field: str) -> Iterator[Text]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise RuntimeError(
            f"{path} needs pyarrow, which is not installed: python -m pip install 'mamba3[parquet]'"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise ValueError(f"there is no column {field!r}; there are {names}")
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _value(f"{path}, row {number}", share, value, field)
    # pyarrow's errors are among these, and do not name the file.
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read after row {number}: {error}") from error


def _value(where: str, n_bytes: float, value, field: str) -> Text:
    try:
        return Text(_nonempty_string(value, field), where, n_bytes)
    except ValueError as error:
        return Text(None, where, n_bytes, str(error))
