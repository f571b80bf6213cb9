"""The end of a process that is one of several ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable


def leave_after(main: Callable[[], int | None]) -> int:
    """Call a program's main function, for ``sys.exit(leave_after(main))``.

    One of several ranks does not tear Python down, but leaves once all is done that is to be done
    at exit. Threads of gloo can still hold tensors then, and one that lets go of a tensor while
    Python is torn down aborts the process: a run that ended well would end in SIGABRT
    (pytorch/pytorch#190489).

    Args:
        main: returns the exit code; None is 0.

    Returns:
        The exit code.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:  # which torchrun sets
        return main() or 0
    code = 1  # after an error, which keeps its traceback

    def leave() -> None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # before all else is, and so done after all else
    try:
        code = main() or 0
    except SystemExit as left:  # with a number, None, or what Python then prints
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
    return code
