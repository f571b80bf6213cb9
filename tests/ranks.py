"""Processes that work together, as torchrun starts them."""

import os
import sys

from torch import multiprocessing


def spawn(work, arguments, ranks):
    """Call ``work(rank, *arguments)`` in a process for each rank; raises what one of them does."""
    multiprocessing.spawn(_leave_after, (work, arguments), nprocs=ranks)


def _leave_after(rank, work, arguments):
    """Work, and leave by `os._exit`, as `mamba3.leave` does and for its reason."""
    work(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
