"""MetricsLog: metrics.jsonl, one JSON object a line.

Training lines hold `step` and `loss` (floats are written so that they read back to the same bits),
evaluation lines `step` and `exact_match`. `step` is the number of optimizer steps made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mamba3.atomic import replace_file

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to a metrics file.

    Args:
        path: the file; made if needed. None writes nothing.
        last_step: lines of later steps, and a last line that was cut off, are dropped first. A run
            that continues from a checkpoint gives the checkpoint's step, a new one 0.
    """

    def __init__(self, path: str | Path | None, *, last_step: int):
        self.path = None if path is None else Path(path)
        if self.path is None:
            return
        kept = []
        if self.path.exists():
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _is_up_to(line, last_step)]
        replace_file(self.path, lambda file: file.writelines(kept))

    def write(self, step: int, **values: Any) -> None:
        """Append one line."""
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def _is_up_to(line: bytes, last_step: int) -> bool:
    try:
        return json.loads(line)["step"] <= last_step
    except (ValueError, KeyError, TypeError):
        return False
