"""Files and folders that are either the old ones or the new ones, never something between."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO


def replace_file(path: str | Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file beside its place, then move it there in one step.

    Args:
        path: the file to make or to replace; its folder must exist.
        write: writes the content to the open binary file it is given.

    Raises:
        OSError: writing failed, for instance on a full disk; what stood at `path` is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: str | Path, text: str) -> None:
    """`replace_file` for a string, as UTF-8."""
    replace_file(path, lambda file: file.write(text.encode("utf-8")))


def replace_folder(temporary: str | Path, path: str | Path) -> None:
    """Move a folder whose files are complete and on the disk to its place, in one step.

    Args:
        temporary: the folder as it was written, beside `path`.
        path: where it belongs; a folder that stands there goes.

    Raises:
        OSError: it cannot be moved.
    """
    temporary, path = Path(temporary), Path(path)
    _sync_folder(temporary)
    if path.exists():
        remove_folder(path)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def remove_folder(path: str | Path) -> None:
    """Remove a folder, of which no part is ever seen: it is renamed to .NAME.old.tmp first."""
    path = Path(path)
    going = path.with_name(f".{path.name}.old.tmp")
    shutil.rmtree(going, ignore_errors=True)
    os.replace(path, going)
    shutil.rmtree(going, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    """Have the names in a folder written to the disk."""
    if os.name == "nt":  # it does so by itself, and opens no folder
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
