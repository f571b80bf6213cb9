"""Developers' scripts, as far as this machine can run them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is for machines without a GPU")
@pytest.mark.parametrize(
    "script", ["bench_gpu.py", "bench_mamba.py", "bench_optimizer.py", "bench_training.py"]
)
def test_a_benchmark_of_a_gpu_says_what_it_needs(script):
    done = subprocess.run(
        [sys.executable, SCRIPTS / script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == f"{script} needs a CUDA or ROCm GPU, and found none"


def test_the_share_of_communication_that_is_hidden(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_ranks

    def kernel(name, start, stop):
        return {"cat": "kernel", "name": name, "ts": start, "dur": stop - start}

    events = [
        kernel("ncclA", 0, 4000), kernel("ncclB", 3000, 6000), kernel("ncclC", 8000, 10000),
        kernel("mm", 1000, 2000), kernel("mm", 1500, 2500), kernel("add", 5000, 9000),
        {"cat": "cpu", "name": "nccl", "ts": 0, "dur": 1e6},
    ]  # fmt: skip
    milliseconds, share = bench_ranks.overlap(events)
    assert milliseconds == 8
    assert share == pytest.approx((1.5 + 1 + 1) / 8)


def test_bench_gpu_compares_with_ours_of_the_same_shape(monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_gpu

    names = ("form", "batch", "length", "by", "forward_ms", "both_ms", "extra_mb")
    rows = [
        ("SISO", 1, 64, "mamba3", 1.0, 2.0, 100.0),
        ("SISO", 1, 64, "peer", 1.5, 8.0, 400.0),
        ("SISO", 2, 64, "mamba3", 1.0, 4.0, 200.0),
        ("SISO", 2, 64, "peer", 1.5, 4.0, 200.0),
        ("SISO", 2, 64, "published", 1.5, None, None),
    ]
    rows = [dict(zip(names, row, strict=True)) for row in rows]
    bench_gpu.print_scan(rows, {"SISO": {"output": 1e-3, "gradient of x": 2e-3}})
    printed = capsys.readouterr().out
    assert "SISO against float64: output 1.0e-03, gradient of x 2.0e-03" in printed
    assert "SISO: peer takes 2.00 times our time, 2.00 times our memory" in printed
    assert "published takes" not in printed
