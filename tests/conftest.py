"""Fixtures that several test files share."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

# Triton reads this when a kernel is defined: without a GPU, kernels are tested in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


class Shell(NamedTuple):
    """Runs bash commands in a folder, with this environment's `mamba3` first on the path."""

    folder: Path

    def __call__(self, command: str) -> subprocess.CompletedProcess:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},  # as in one_thread
            capture_output=True,
            text=True,
            check=False,
        )


class Quickstart(NamedTuple):
    """One run of `mamba3 quickstart`: where, what it printed, how long it took."""

    shell: Shell
    done: subprocess.CompletedProcess
    seconds: float


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests are tiny: threads gain nothing, and on a busy machine wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shell_in():
    """Makes a `Shell` of a folder."""
    return Shell


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("quickstart"))
    began = time.perf_counter()
    done = shell("mamba3 quickstart")
    return Quickstart(shell, done, time.perf_counter() - began)
