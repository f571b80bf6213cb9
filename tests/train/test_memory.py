import os
import subprocess
import sys

import pytest
import torch

from mamba3.train import memory
from mamba3.train.memory import AllocationGuard, HostReport, Report, report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def set_up(environment, device="cuda"):
    """What `configure` returns in a process of its own, since settings are the process's."""
    clean = {k: v for k, v in os.environ.items() if k not in memory.VARIABLES}
    code = f"from mamba3.train import memory; print(memory.configure({device!r}))"
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_allocator_takes_the_settings_of_a_gpu():
    growing = sys.platform == "linux" and torch.version.hip is None
    assert set_up({}) == (memory.GROWING if growing else memory.ROUNDED)


@pytest.mark.parametrize("settings", [memory.GROWING, memory.ROUNDED])
def test_settings_reach_the_allocator_by_the_newest_way_there_is(monkeypatch, settings):
    told = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    memory._apply(settings)
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    memory._apply(settings)
    assert told == [settings, settings]


@pytest.mark.parametrize("variable", memory.VARIABLES)
def test_the_users_settings_stay(monkeypatch, variable):
    monkeypatch.setattr(memory, "_apply", lambda settings: pytest.fail(settings))
    monkeypatch.setenv(variable, "max_split_size_mb:512")
    assert memory.configure("cuda") is None


def test_a_cpu_has_nothing_to_set_up(monkeypatch):
    for variable in memory.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(memory, "_apply", lambda settings: pytest.fail(settings))
    assert memory.configure(torch.device("cpu")) is None


@pytest.fixture
def stats(monkeypatch):
    """What the allocator of a GPU says, to be changed."""
    values = {
        "allocated_bytes.all.current": 6_000_000_000,
        "allocated_bytes.all.peak": 9_000_000_000,
        "reserved_bytes.all.current": 8_000_000_000,
        "inactive_split_bytes.all.current": 500_000_000,
        "num_device_alloc": 40,
        "num_device_free": 3,
        "num_alloc_retries": 1,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: values)
    return values


def test_a_step_that_takes_memory_anew_is_named_with_the_remedy(stats):
    guard = AllocationGuard("cuda")
    guard.start()
    guard.check(7, new=False)
    stats["num_device_alloc"] += 2
    with pytest.raises(
        RuntimeError, match=r"step 8 took memory from the GPU 2 times.*data\.length"
    ):
        guard.check(8, new=False)


def test_new_steps_and_what_is_between_steps_may_take_memory(stats):
    guard = AllocationGuard("cuda")
    guard.start()
    stats["num_device_alloc"] += 5
    guard.check(1, new=True)
    stats["num_device_alloc"] += 1  # an evaluation
    guard.start()
    guard.check(2, new=False)


def test_the_report_of_a_gpu(stats):
    found = report("cuda")
    assert found == Report(6_000_000_000, 9_000_000_000, 8_000_000_000, 500_000_000, 40, 3, 1)
    assert found.fragmentation == 0.25
    text = str(found)
    for part in ("6.00 GB allocated", "9.00 GB at most", "8.00 GB reserved", "25.0%", "40 times"):
        assert part in text


def test_a_gpu_that_holds_nothing_is_not_fragmented():
    assert Report(0, 0, 0, 0, 0, 0, 0).fragmentation == 0


def test_the_report_of_a_cpu():
    size = 200_000_000
    before = report("cpu")
    assert isinstance(before, HostReport)
    held = torch.ones(before.peak // 4 + size // 4)
    assert report("cpu").peak > held.nbytes
    assert "GB resident at most" in str(report("cpu"))
