"""state.json: what a saved state says of itself, written after all its other files.

It holds size and CRC-32 of every one of them, and a CRC-32 of what it says itself, so that a state
with a damaged, cut off or missing file is noticed before any of it is loaded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mamba3.atomic import replace_text

STATE_FILE = "state.json"
_BLOCK = 1 << 20


def file_facts(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return {"size": size, "crc32": crc}


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a folder's state.json; `content` is plain, and its "files" has `file_facts` by name."""
    whole = {"crc32": _crc32(content), "state": content}
    replace_text(folder / STATE_FILE, json.dumps(whole, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a folder's state.json.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    try:
        whole = json.loads((folder / STATE_FILE).read_bytes())
        intact = whole["crc32"] == _crc32(whole["state"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{STATE_FILE} cannot be read: {error}") from error
    if not intact:
        raise ValueError(f"{STATE_FILE} is not as it was written")
    return whole["state"]


def damage(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with the files of a folder that has a state.json; None if nothing is.

    Args:
        folder: to look at.
        share, shares: of so many, the share of the files whose contents are read.
    """
    try:
        files = read_manifest(folder)["files"]
        for i, (name, expected) in enumerate(sorted(files.items())):
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes, {expected['size']} were written"
            if i % shares == share and file_facts(folder / name) != expected:
                return f"{name} is not as it was written: its checksum differs"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _crc32(content: Mapping[str, Any]) -> int:
    # json gives back to the bit what it was given, so the text can be made anew.
    return zlib.crc32(json.dumps(content).encode())
