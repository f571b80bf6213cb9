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
from typing import Any, NamedTuple

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


class Record(NamedTuple):
    """A line of a JSONL file, a row of a Parquet file or a paragraph of a text.

    value: the object, or the paragraph; None if it cannot be read, and `error` then says why.
    where: file and line, for messages.
    line: how it stands there, shortened, for messages.
    """

    value: Any
    where: str
    line: str
    error: str = ""


def read_records(path: Path) -> Iterator[Record]:
    """Read what a file holds, in order: objects, or paragraphs of a text (any other suffix).

    Paragraphs are what blank lines part.

    Args:
        path: an existing file.

    Raises:
        ValueError: a Parquet file that is damaged.
        RuntimeError: it is a Parquet file, and pyarrow is not installed.
    """
    if path.suffix == ".parquet":
        for number, row in _parquet(path, None):
            yield Record(row, f"{path}, row {number}", reprlib.repr(row))
        return
    parts = _numbered_lines(path) if path.suffix == ".jsonl" else _paragraphs(path)
    parse = _object if path.suffix == ".jsonl" else str
    for number, content in parts:
        where, line = f"{path}, line {number}", _shortened(content)
        try:
            yield Record(parse(content.decode("utf-8-sig")), where, line)
        except UnicodeDecodeError as error:
            yield Record(None, where, line, f"not UTF-8: {error}")
        except ValueError as error:
            yield Record(None, where, line, str(error))


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        yield from enumerate(file, start=1)


def _paragraphs(path: Path) -> Iterator[tuple[int, bytes]]:
    """The number of its first line, and the paragraph."""
    start, lines = 0, []
    for number, line in _numbered_lines(path):
        if line.strip():
            start = start if lines else number
            lines.append(line)
        elif lines:
            yield start, b"".join(lines).rstrip()
            lines = []
    if lines:
        yield start, b"".join(lines).rstrip()


def _shortened(content: bytes) -> str:
    text = content[:200].decode("utf-8", errors="replace").strip()
    return text if len(content) <= 200 else f"{text} ..."


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


def _object(line: str) -> Any:
    if not line.strip():
        raise ValueError("the line is empty")
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _field(line: str, field: str) -> str:
    row = _object(line)
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
    share = None
    for number, row in _parquet(path, field):
        if share is None:
            share = path.stat().st_size / _parquet_length(path)
        yield _value(f"{path}, row {number}", share, row[field], field)


def _parquet_length(path: Path) -> int:
    from pyarrow import parquet

    return parquet.read_metadata(path).num_rows


def _parquet(path: Path, column: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows, numbered from 1, as objects of one column or of all."""
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
            if column is not None and column not in names:
                raise ValueError(f"there is no column {column!r}; there are {names}")
            columns = None if column is None else [column]
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    # pyarrow's errors are among these, and do not name the file.
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read after row {number}: {error}") from error


def _value(where: str, n_bytes: float, value, field: str) -> Text:
    try:
        return Text(_nonempty_string(value, field), where, n_bytes)
    except ValueError as error:
        return Text(None, where, n_bytes, str(error))
