"""Which implementation an op runs on: reference, torch or triton.

The choice is the process's, never the model's: the environment variable MAMBA3_BACKEND or
`use_backend`, else the best that is available. `explain` says which one it is and why.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

BACKENDS = ("reference", "torch", "triton")

_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("backend", default=None)


def backend() -> str:
    """Name of the implementation that ops run on now.

    Raises:
        ValueError: MAMBA3_BACKEND or `use_backend` names none of `BACKENDS`.
        RuntimeError: the one asked for is not available, with the remedy.
    """
    return _choose()[0]


def explain() -> str:
    """One sentence: which backend is in use, and why."""
    name, reason = _choose()
    return f"{name}: {reason}"


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run ops on one backend inside a `with` block.

    Args:
        name: "reference" (sequential, the ground truth), "torch" (chunked, any device) or
            "triton".
    """
    _check(name, "use_backend")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def _choose() -> tuple[str, str]:
    if (name := _override.get()) is not None:
        return name, "asked for with mamba3.ops.use_backend"
    if name := os.environ.get("MAMBA3_BACKEND"):
        _check(name, "MAMBA3_BACKEND")
        return name, "asked for with the environment variable MAMBA3_BACKEND"
    return "torch", "the chunked torch path is the fastest one of this version, on every device"


def _check(name: str, source: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}, expected one of {', '.join(BACKENDS)}")
    if name == "triton":
        raise RuntimeError(
            f"{source} asks for the triton backend, which this version does not have yet; "
            "use 'torch', which runs on GPUs too"
        )
