"""The command line: `mamba3 ...`, the same as `python -m mamba3 ...`.

What each command takes and does is in `mamba3.commands`.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
import warnings
from importlib import metadata

from mamba3 import __version__
from mamba3.commands import (
    chat,
    convert,
    curriculum,
    doctor,
    evaluate,
    finetune,
    generate,
    info,
    list_models,
    plot,
    profile,
    push,
    quickstart,
    solve,
    tokenize,
    train,
)
from mamba3.leave import leave_after

COMMANDS = (
    quickstart,
    solve,
    generate,
    chat,
    train,
    curriculum,
    plot,
    profile,
    finetune,
    tokenize,
    evaluate,
    convert,
    info,
    list_models,
    push,
    doctor,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0, 2 after an error, 130 after Ctrl-C, 141 if nobody reads the output, and
        128 + the signal's number after training that a signal stopped, with its state saved: 130 or
        143.
    """
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="mamba3: %(message)s")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            args.run(args)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print("mamba3: interrupted", file=sys.stderr)
            return 130
        # What the library raises for its users; other errors are faults and keep their traceback.
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                return 141
            if args.debug:
                raise
            print(f"mamba3: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
    return 0


def program() -> int:
    """What the program `mamba3` runs: `main`, for the arguments of the process."""
    return leave_after(main)


def _nobody_reads() -> bool:
    """Whether standard output was closed, as by `mamba3 list | head`; the rest goes nowhere."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` of its result is the function of the command given."""
    parser = argparse.ArgumentParser(
        prog="mamba3",
        description="Mamba-3 for PyTorch: generate, train, fine-tune, evaluate.",
        epilog="start with:\n  mamba3 quickstart",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"mamba3 {__version__} (torch {metadata.version('torch')})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return parser


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"mamba3: warning: {message}", file=sys.stderr)
