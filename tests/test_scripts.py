"""Developers' scripts, as far as this machine can run them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is for machines without a GPU")
def test_bench_gpu_says_what_it_needs():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_gpu.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "bench_gpu.py needs a CUDA or ROCm GPU, and found none"
