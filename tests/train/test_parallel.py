"""Runs under torchrun against the run of one process."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from mamba3.train import train
from mamba3.train.checkpoint import Checkpoints
from mamba3.train.parallel import ranks_of

# Twenty steps of an optimizer make float32's rounding larger.
TOLERANCE = 1e-3


def device_of(ranks):
    """One GPU a rank, or the CPU."""
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def torchrun(recipe, out, *options, ranks=2, background=False):
    """`mamba3 train` on several ranks; what they printed, or the process."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--standalone", "-m", "mamba3", "train", str(recipe), "--out", str(out)]
    command += ["--set", f"train.device={device_of(ranks)}", *options]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **streams)
    if background:
        return process
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


def assert_near(out, whole, read_metrics):
    lines, expected = (read_metrics(folder, training=True) for folder in (out, whole))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * TOLERANCE)
    weights, others = (load_file(folder / "model.safetensors") for folder in (out, whole))
    for name, weight in weights.items():
        assert (weight - others[name]).norm() < 10 * TOLERANCE * others[name].norm(), name


@pytest.mark.parametrize("parallel", ["ddp", "allreduce", "fsdp", "sharded"])
def test_ranks_share_a_run(make_recipe, tmp_path, read_metrics, parallel):
    """7 rows in 2 parts on 2 ranks; then half of them, resumed by one process."""
    changes = {
        "optim.name": "hybrid", "optim.lr": 2e-3, "data.batch_size": 7, "step.accumulate": 2,
        "step.parallel": parallel,
    }  # fmt: skip
    recipe, path = make_recipe(changes), tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    whole, out, shorter = (tmp_path / name for name in ("whole", "ranks", "shorter"))
    train(recipe, whole, progress=False)
    output = torchrun(path, out)
    assert output.count("20 steps, last loss") == 1
    assert_near(out, whole, read_metrics)
    assert Checkpoints(out).load().step == 20
    torchrun(path, shorter, "--set", "train.steps=10")
    train(recipe, shorter, resume=True, progress=False)
    assert_near(shorter, whole, read_metrics)


def test_a_signal_ends_all_ranks_with_one_state(make_recipe, tmp_path, read_metrics):
    path, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe = make_recipe({"train.steps": 100_000, "train.save_every": 5, "data.stages": [2]})
    path.write_text(recipe.to_yaml())
    process = torchrun(path, out, background=True)
    deadline = time.monotonic() + 100
    while not (out / "model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    step = Checkpoints(out).load().step
    assert step >= 5
    assert read_metrics(out)[-1]["step"] == step
    assert f"stopped by SIGTERM after step {step}" in output


def test_a_rank_that_dies_ends_the_run(make_recipe, tmp_path, read_metrics):
    """The others end by themselves, soon; what was saved is whole, and the run goes on."""
    recipe, path, out = make_recipe(), tmp_path / "recipe.yaml", tmp_path / "out"
    path.write_text(recipe.to_yaml())
    (tmp_path / "dies.py").write_text(f"""
import os, signal, sys
import torch
from mamba3.cli import program
from mamba3.train import loop

def learning_rate(index, optim, original=loop.learning_rate):
    if index == 12 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(index, optim)

torch.set_num_threads(1)
loop.learning_rate = learning_rate
sys.argv[1:] = ["train", {str(path)!r}, "--out", {str(out)!r}]
sys.argv += ["--set", "train.device={device_of(2)}"]
raise SystemExit(program())
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, tmp_path / "dies.py"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert time.monotonic() - began < 60
    assert Checkpoints(out).load().step in (5, 10)
    train(recipe, tmp_path / "whole", progress=False)
    train(recipe, out, resume=True, progress=False)
    assert_near(out, tmp_path / "whole", read_metrics)


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        ("return 3", 3, ""),
        ("return None", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("raise LookupError", 1, "LookupError\n"),
    ],
)
def test_a_rank_leaves_before_python_is_torn_down(outcome, code, told):
    """Which can abort it; a process alone goes the usual way."""
    program = f"""
import atexit, sys
from mamba3.leave import leave_after

class Late:
    def __del__(self):
        print("torn down")

def main():
    atexit.register(print, "done at exit")
    print("done", end=" ")
    {outcome}

late = Late()
sys.exit(leave_after(main))
"""
    end = "done done at exit\n"
    for ranks, printed in {1: end + "torn down\n", 2: end}.items():
        environment = {**os.environ, "WORLD_SIZE": str(ranks)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (code, printed)
        assert done.stderr.endswith(told)
        assert bool(done.stderr) == bool(told)


def test_a_batch_that_is_too_small_is_an_error(make_recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(make_recipe({"data.batch_size": 1}).to_yaml())
    process = torchrun(path, tmp_path / "out", background=True)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "a batch of 1 rows cannot be shared by 2 ranks" in output


def test_ranks_without_a_gpu_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with (
        pytest.raises(RuntimeError, match=r"4 ranks .* 3 GPUs: start --nproc-per-node=3"),
        ranks_of("cuda"),
    ):
        pass
