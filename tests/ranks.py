"""Processes that work together, as torchrun starts them."""

import os
import shutil
import signal
import sys
from pathlib import Path

from torch import multiprocessing

# What a process dies of whose memory is damaged.
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}


def spawn(work, arguments, ranks):
    """Call ``work(rank, *arguments)`` in a process for each rank; raises what one of them does.

    Ranks of which one crashes get a second try, without what they have put into folders that are
    arguments: now and then `fully_shard` on CPUs, with gloo and torch 2.13, ends in "malloc():
    unaligned tcache chunk detected". Why is not known; leaving as below does not help, as it is not
    at the end. What a rank raises is not tried again.
    """
    before = _entries(arguments)
    context = multiprocessing.spawn(_leave_after, (work, arguments), nprocs=ranks, join=False)
    try:
        while not context.join():
            pass
    except Exception as error:
        for process in context.processes:
            process.join()
        if not CRASHES & {process.exitcode for process in context.processes}:
            raise
        print(f"ranks once more, since one crashed: {error}", file=sys.stderr)
        for path in _entries(arguments) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        multiprocessing.spawn(_leave_after, (work, arguments), nprocs=ranks)


def _entries(arguments):
    """What lies in the folders among them."""
    folders = [Path(value) for value in arguments if isinstance(value, str | Path)]
    return {path for folder in folders if folder.is_dir() for path in folder.iterdir()}


def _leave_after(rank, work, arguments):
    """Work, and leave by `os._exit`, as `mamba3.leave` does and for its reason."""
    work(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
