"""Progress bars: on standard error, and quiet where that is a file."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(show: bool, **options: Any) -> tqdm:
    """A bar with the options of tqdm; in a log file, where every refresh is a line, few of them."""
    every = 0.1 if sys.stderr.isatty() else 10
    return tqdm(file=sys.stderr, disable=not show, mininterval=every, **options)
