"""Which implementation an op runs on: reference, torch or triton.

The choice is the process's, never the model's: the environment variable MAMBA3_BACKEND or
`use_backend`, else the best that the tensors' device has. `explain` says which one it is and why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator

import torch
from torch import Tensor

BACKENDS = ("reference", "torch", "triton")

# One of the process, not of a thread: autograd recomputes blocks on threads of its own.
_override: str | None = None


def backend(device: torch.device | str | None = None) -> str:
    """Name of the implementation that ops on a device run on now.

    Args:
        device: of the tensors; None is a GPU where there is one, else the CPU.

    Raises:
        ValueError: MAMBA3_BACKEND or `use_backend` names none of `BACKENDS`.
        RuntimeError: the one asked for is not available, with the remedy.
    """
    return _choose(_device(device))[0]


def explain(device: torch.device | str | None = None) -> str:
    """One sentence: which backend is in use on a device, and why; `device` as in `backend`."""
    return ": ".join(_choose(_device(device)))


def requested() -> str | None:
    """Name of the backend that `use_backend`, else MAMBA3_BACKEND, asks for; None if neither does.

    Raises:
        ValueError: MAMBA3_BACKEND names none of `BACKENDS`.
        RuntimeError: it names triton, which is not installed.
    """
    name = _override
    if name is None and (name := os.environ.get("MAMBA3_BACKEND")):
        _check(name, "MAMBA3_BACKEND")
    return name or None


def on_kernels(*tensors: Tensor | None) -> bool:
    """Whether an op of these tensors runs on Triton's kernels, which compute in float32."""
    dtypes = [t.dtype for t in tensors if t is not None]
    return torch.float64 not in dtypes and backend(tensors[0].device) == "triton"


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run ops on one backend inside a `with` block, whichever thread calls them.

    Args:
        name: "reference" (sequential, the ground truth), "torch" (chunked, any device) or
            "triton" (kernels for GPUs; on a CPU only under Triton's interpreter).
    """
    global _override
    _check(name, "use_backend")
    before, _override = _override, name
    try:
        yield
    finally:
        _override = before


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def available(device: torch.device | str) -> list[str]:
    """The backends that can run on a device: Triton's on GPUs, or where it is interpreted."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    runs_triton = _has_triton() and (torch.device(device).type == "cuda" or interpreted)
    return [name for name in BACKENDS if name != "triton" or runs_triton]


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(default_device() if device is None else device)


def _choose(device: torch.device) -> tuple[str, str]:
    name = requested()
    source = "mamba3.ops.use_backend" if _override else "the environment variable MAMBA3_BACKEND"
    if name == "triton" and "triton" not in available(device):
        raise RuntimeError(
            f"{source} asks for the triton backend, but the tensors are on {device.type}: move "
            "them to a GPU, use 'torch', or set TRITON_INTERPRET=1 to run the kernels, slowly, in "
            "Triton's interpreter"
        )
    if name is not None:
        return name, f"asked for with {source}"
    if device.type == "cuda" and "triton" in available(device):
        return "triton", f"the tensors are on a GPU ({device.type}) and Triton is installed"
    if device.type == "cuda":
        return "torch", "Triton, which has kernels for this GPU, is not installed"
    return "torch", f"the chunked torch path is the fastest one on {device.type}"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check(name: str, source: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}, expected one of {', '.join(BACKENDS)}")
    if name == "triton" and not _has_triton():
        raise RuntimeError(
            f"{source} asks for the triton backend, but Triton is not installed: "
            "python -m pip install triton (Linux), or use 'torch'"
        )
