"""Kernels compile for GPUs, and ask for no more shared memory than small ones have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
KERNELS = {
    "maps_kernel", "weights_kernel", "phase_kernel", "states_kernel", "carry_kernel",
    "outputs_kernel", "inputs_kernel", "readouts_kernel", "later_kernel", "sums_kernel",
}  # fmt: skip


def run(*arguments):
    """What the script prints, line by line; without the interpreter, which compiles nothing."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_lengths_and_batches_share_their_compiled_kernels():
    once = run("forms", 24)
    assert run("forms", *range(24, 72), 2, 16, 2048) == once
    assert once == ["13"]


# 99 KB is what a program may ask for on consumer GPUs of compute capability 8.6, 8.9 and 12.
@pytest.mark.parametrize(
    ("capability", "form"),
    [
        (90, "siso"), (90, "mimo"), (90, "siso-float32"), (90, "siso-N256"), (90, "mimo-odd"),
        (80, "siso-float32"), (80, "mimo"), (90, "siso-small"), (90, "siso-N64"), (90, "mimo-P32"),
    ],
)  # fmt: skip
def test_compiles_within_shared_memory(capability, form):
    found = [json.loads(line) for line in run(capability, form)]
    assert {one["kernel"] for one in found} == KERNELS
    assert not any(one["unguarded"] or one["unset"] for one in found), found
    assert max(one["shared"] for one in found) <= 99 * 1024, found


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("form", ["loss", "loss-float32", "loss-odd"])
def test_loss_compiles_within_shared_memory(capability, form):
    found = [json.loads(line) for line in run(capability, form)]
    assert [one["kernel"] for one in found] == ["cross_entropy_kernel"] * 2
    assert max(one["shared"] for one in found) <= 99 * 1024, found


@pytest.mark.parametrize(
    ("capability", "form"), [(80, "mamba-float32"), (90, "mamba"), (90, "mamba-wide")]
)
def test_mamba_compiles_within_shared_memory(capability, form):
    found = [json.loads(line) for line in run(capability, form)]
    names = ["maps_kernel", "ends_kernel", "forward_kernel"]
    names += ["ends_kernel", "backward_kernel", "map_gradients_kernel"]
    names += ["forward_kernel", "ends_kernel", "backward_kernel", "ends_kernel"]
    assert [one["kernel"] for one in found] == [*names, "step_kernel", "step_kernel"]
    assert not any(one["unset"] for one in found), found
    assert max(one["shared"] for one in found) <= 99 * 1024, found
    # The convolution's threads exchange nothing, so that none can be ahead of another.
    assert [one["shared"] for one in found[6:10]] == [0] * 4, found


@pytest.mark.parametrize("capability", [80, 90])
def test_updates_compile_within_shared_memory(capability):
    lines = run(capability, "updates", "updates-bits", "updates-odd")
    found = [json.loads(line) for line in lines]
    names = ["_momentum_kernel", "_scale_kernel"]
    names += 2 * ["_lanes_kernel", "_apply_kernel", "_apply_kernel"]
    assert [one["kernel"] for one in found] == 3 * names
    assert max(one["shared"] for one in found) <= 99 * 1024, found


@pytest.mark.parametrize("capability", [80, 90])
def test_adamw_compiles_within_shared_memory(capability):
    found = [json.loads(line) for line in run(capability, "adamw", "adamw-bits", "adamw-every")]
    assert [one["kernel"] for one in found] == 4 * ["_numbers_kernel", "_adamw_kernel"]
    assert max(one["shared"] for one in found) <= 99 * 1024, found
