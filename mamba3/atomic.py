"""Files that are either the old ones or the new ones, never something between."""

from __future__ import annotations

import os
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
