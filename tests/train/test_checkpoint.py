"""States of a run: exact, whole or not there, found damaged, loaded by any number of ranks."""

import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import DEVICE, assert_same, randomise
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mamba3 import Mamba3Config, Mamba3LM, ops
from mamba3.optim import ANVIL, HybridOptimizer, Sharded
from mamba3.train import checkpoint
from mamba3.train.checkpoint import Checkpoints
from mamba3.train.parallel import Ranks
from mamba3.train.step import TrainStep
from mamba3.train.tensor_files import read_tensors

STATE = {"loss": 0.1 + 0.2, "best": {"step": 3, "exact_match": 1 / 3}, "recipe": {"a": [1, None]}}
# Rows that no number of ranks divides, blocks that straddle shards, and vectors of 3 elements.
CONFIG = Mamba3Config(
    vocab_size=21, d_model=9, n_layer=2, d_state=6, headdim=6, d_intermediate=7,
    is_mimo=True, mimo_rank=2, pad_vocab_size_multiple=1, mlp_multiple=1,
)  # fmt: skip


def made(seed=0, *, device=DEVICE, mesh=None, precision="float32", **options):
    """A step of a small model with random weights."""
    model = randomise(Mamba3LM(CONFIG, device=device), seed)
    half = precision == "bf16-weights"
    model = model.to(torch.bfloat16) if half else model
    if mesh is not None:
        for block in model.backbone.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = HybridOptimizer(model, 0.02, **ANVIL, extra_bits=half, **options)
    return TrainStep(model, optimizer, precision=precision)


def trained(seed=0, steps=2, **options):
    """The same after some steps, its optimizer's state being no longer zero."""
    step = made(seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(21, (2, 5), generator=generator).to(step.device)
        step.model.zero_grad()
        with ops.use_backend("torch"):
            step.model(ids, labels=ids, return_logits=False).loss.backward()
        step.optimizer.step()
    return step


def values(step):
    """All that a step holds, copied: tensors, and the rest as text."""
    leaves = dict(checkpoint._leaves(step.state_dict()))
    tensors = {name: t.clone() for name, t in leaves.items() if isinstance(t, torch.Tensor)}
    return tensors, json.dumps({name: v for name, v in leaves.items() if name not in tensors})


def assert_equal(a, b):
    (tensors, plain), (others, other_plain) = values(a), values(b)
    assert_same(tensors, others)
    assert plain == other_plain


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def saved(folder, *steps, **options):
    """Checkpoints of a run, and what was trained when each of its states was saved."""
    checkpoints = Checkpoints(folder, **options)
    every = [trained(seed=number, steps=number % 3 + 1) for number in steps]
    for number, step in zip(steps, every, strict=True):
        checkpoints.save(step, step=number, **STATE)
    checkpoints.finish()
    return checkpoints, every


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("precision", ["float32", "fp16", "bf16-weights"])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, precision, background):
    step = trained(precision=precision)
    if step.scaler is not None:
        step.scaler.update(torch.tensor(False, device=step.device))
    torch.manual_seed(5)
    torch.rand(3)
    checkpoints = Checkpoints(tmp_path, background=background)
    checkpoints.save(step, step=7, **STATE, tokens=2**40, up=None)
    drawn = torch.rand(4), torch.rand(4, device=DEVICE)
    checkpoints.finish()
    checkpoints, other = Checkpoints(tmp_path), made(1, precision=precision)
    state = checkpoints.load()
    assert (state.step, state.loss, state.best, state.recipe) == (7, *STATE.values())
    assert (state.world, state.facts) == (1, {"tokens": 2**40, "up": None})
    torch.manual_seed(6)
    checkpoints.restore(state, other)
    assert_equal(other, step)
    assert torch.equal(torch.rand(4), drawn[0])
    assert torch.equal(torch.rand(4, device=DEVICE), drawn[1])
    if precision == "bf16-weights":
        low = [t for name, t in values(other)[0].items() if name.endswith("low")]
        assert any(t.count_nonzero() for t in low)


def test_a_loss_that_is_not_finite_or_none_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(made(), step=0, **STATE | {"loss": None})
    assert checkpoints.load().loss is None
    checkpoints.save(made(), step=1, **STATE | {"loss": float("nan")})
    assert checkpoints.load().loss != checkpoints.load().loss


def test_what_is_written_later_is_the_state_of_the_moment(tmp_path, monkeypatch):
    go = threading.Event()

    def write_data(self, plan, planner, original=dcp.FileSystemWriter.write_data):
        assert go.wait(60)
        return original(self, plan, planner)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_data)
    checkpoints, step = Checkpoints(tmp_path), trained(seed=1)
    recipe = {"a": [1]}
    for number in (1, 2):  # the second into the copies of the first
        expected, expected_rng = values(step), torch.get_rng_state()
        go.clear()
        checkpoints.save(step, step=number, **STATE | {"recipe": recipe})
        with torch.no_grad():
            for t in dict(checkpoint._leaves(step.state_dict())).values():
                if isinstance(t, torch.Tensor):
                    t.add_(1)
        step.optimizer.param_groups[0]["lr"] = 9.0
        recipe["a"].append(number)
        torch.rand(3)
        assert not (tmp_path / "checkpoints" / f"step-0000000{number}").exists()
        go.set()
        state = checkpoints.load()
        assert (state.step, state.recipe) == (number, {"a": [1, 1][:number]})
        tensors = read_tensors(state.folder)
        assert torch.equal(tensors.pop("rng.0.cpu"), expected_rng)
        tensors.pop("rng.0.cuda", None)
        assert_same(tensors, {name: t.cpu() for name, t in expected[0].items()})
        assert json.dumps(state.plain) == expected[1]


def test_torch_reads_the_tensors_by_the_same_names(tmp_path):
    checkpoints, [step] = saved(tmp_path, 4)
    weights = {name: torch.zeros_like(t) for name, t in step.model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed"):
        dcp.load({"model": weights}, checkpoint_id=checkpoints.load().folder)
    assert_same(weights, step.model.state_dict())


def test_the_last_ones_are_kept_and_later_ones_go(tmp_path):
    checkpoints, _ = saved(tmp_path, 5, 10, 15, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000015"]
    again = trained(seed=8)
    checkpoints.save(again, step=15, **STATE)  # as after going back to 10
    checkpoints.save(again, step=12, **STATE)
    checkpoints.finish()
    assert names(tmp_path) == ["step-00000010", "step-00000012"]
    saved(tmp_path, 13, keep=1)
    assert names(tmp_path) == ["step-00000013"]


def test_a_state_is_replaced_by_one_of_the_same_step(tmp_path):
    checkpoints, _ = saved(tmp_path, 5)
    step = trained(seed=8)
    checkpoints.save(step, step=5, **STATE, again=True)
    state = checkpoints.load()
    assert state.facts == {"again": True}
    checkpoints.restore(state, other := made())
    assert_equal(other, step)
    assert names(tmp_path) == ["step-00000005"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


FILES = (".metadata", "__0_0.distcp", "state.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, cut, os.remove])
def test_a_damaged_state_falls_back_to_the_one_before(tmp_path, caplog, damage, name):
    checkpoints, (first, _) = saved(tmp_path, 5, 10)
    newest, before = (tmp_path / "checkpoints" / f"step-{step:08}" for step in (10, 5))
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        state = checkpoints.load()
    assert f"{newest} is damaged and cannot be resumed from: " in caplog.text
    assert name in caplog.text
    assert "; taking step-00000005" in caplog.text
    assert state.step == 5
    checkpoints.restore(state, other := made(3))
    assert_equal(other, first)
    damage(before / name)
    with pytest.raises(ValueError, match=r"step-00000005 is damaged"):
        checkpoints.load()


def test_where_there_is_no_run_the_remedy_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run to resume.*without resume"):
        Checkpoints(tmp_path / "nowhere").load()


def test_a_state_of_another_model_or_optimizer_is_refused(tmp_path):
    checkpoints, _ = saved(tmp_path, 5)
    state = checkpoints.load()
    model = Mamba3LM(CONFIG)
    plain = TrainStep(model, HybridOptimizer(model))
    before = values(plain)[0]
    with pytest.raises(ValueError, match=r"of another model or optimizer: optimizer\.state.*slow"):
        checkpoints.restore(state, plain)
    assert_same(values(plain)[0], before)
    with pytest.raises(ValueError, match=r"scaler\.scale.*expected: a plain value"):
        checkpoints.restore(state, made(precision="fp16"))
    with pytest.raises(ValueError, match=r"float32.*expected: .*bfloat16"):
        checkpoints.restore(state, made(precision="bf16-weights"))


def test_a_fact_that_is_not_plain_is_refused_at_once(tmp_path):
    checkpoints, _ = saved(tmp_path, 5)
    with pytest.raises(TypeError, match="Tensor is not JSON"):
        checkpoints.save(made(), step=6, **STATE, position=torch.ones(1))
    assert checkpoints.load().step == 5


def file_size(monkeypatch):
    """No file can grow beyond 20 kB, as if the disk was full in the middle of the tensors."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_space(monkeypatch):
    """The disk is full when the tensors are flushed to it."""

    def fsync(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    return monkeypatch.undo


def no_space_at_last(monkeypatch):
    """The disk is full when state.json is written."""

    def write_manifest(folder, content):
        assert len(list(folder.iterdir())) == 2
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", write_manifest)
    return monkeypatch.undo


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("fill", [file_size, no_space, no_space_at_last])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, fill, background):
    checkpoints, (_, last) = saved(tmp_path, 5, 10, background=background)
    step, message = trained(), r"step-00000015 could not be written \(is the disk full\?\)"
    free = fill(monkeypatch)
    try:
        if background:
            checkpoints.save(step, step=15, **STATE)
        with pytest.raises(OSError, match=message):
            # What failed in the background is raised by the save after it.
            checkpoints.save(step, step=20 if background else 15, **STATE)
    finally:
        free()
    assert names(tmp_path) == ["step-00000005", "step-00000010"]
    checkpoints.restore(checkpoints.load(), other := made())
    assert_equal(other, last)
    checkpoints.save(step, step=15, **STATE)
    checkpoints.finish()
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


KILLS = """
import os, random, signal, sys, time
from itertools import count
from pathlib import Path
import torch
from mamba3.train.checkpoint import Checkpoints
from mamba3.train.tensor_files import read_tensors

out, kills = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)

class Step:  # 2 MB that are all the number of the step
    device = torch.device("cpu")
    def state_dict(self):
        return {"model": {str(i): t for i, t in enumerate(self.tensors)}}
    def __init__(self):
        self.tensors = [torch.zeros(100_000, dtype=torch.int32) for _ in range(5)]

def save(first, done):
    checkpoints, step = Checkpoints(out), Step()
    for number in count(first):
        for t in step.tensors:
            t.fill_(number)
        checkpoints.save(step, step=number, loss=None, best={}, recipe={})
        if number > first:  # the one before is finished
            os.write(done, b"%d " % (number - 1))

delays, newest, left_over = random.Random(0), -1, 0
for _ in range(kills):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        save(newest + 1, write)
    os.close(write)
    if newest < 0:
        while not list(out.glob("checkpoints/step-*")):
            time.sleep(0.01)
    time.sleep(delays.uniform(0, 0.3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    known = max(map(int, os.read(read, 1 << 16).split()), default=newest)
    os.close(read)
    left_over += bool(list(out.glob("checkpoints/.*")))
    state = Checkpoints(out).load()
    assert state.step >= known, (state.step, known)
    tensors = read_tensors(state.folder)
    del tensors["rng.0.cpu"]
    assert len(tensors) == 5 and all((t == state.step).all() for t in tensors.values())
    newest = state.step
print(newest, left_over)
"""


def test_whenever_a_run_is_killed_its_last_state_is_whole(tmp_path):
    command = [sys.executable, "-c", KILLS, str(tmp_path), "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stderr
    newest, left_over = map(int, done.stdout.split())
    assert newest > 0
    assert left_over > 2  # else nothing was killed while it wrote


def test_what_killed_runs_left_over_is_cleared(tmp_path):
    checkpoints, _ = saved(tmp_path, 5)
    left = [tmp_path / "checkpoints" / f".step-{what}.tmp" for what in ("00000005.old", "00000006")]

    def leave():
        for folder in left:
            folder.mkdir()
            (folder / ".metadata").write_text("x")

    leave()
    checkpoints.restore(checkpoints.load(), made())
    assert names(tmp_path) == ["step-00000005"]
    leave()
    saved(tmp_path, 6)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


# two ranks


def work(rank, folder):
    """One of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh, ranks = init_device_mesh("cpu", (2,)), Ranks(rank, 2)
    for name, precision, options in SPREAD:
        how = {"sharded": {"distributed": Sharded()}, "fsdp": {"mesh": mesh}}[name]
        check_alone(folder / f"alone-{precision}", folder / f"{name}-{precision}", ranks,
                    precision=precision, **how, **options)  # fmt: skip
    check_equal_ranks(folder / "equal", ranks)
    check_failure(folder / "equal", ranks)
    dist.destroy_process_group()


SPREAD = (
    ("fsdp", "float32", {}),
    ("fsdp", "bf16-weights", {}),
    ("sharded", "float32", {}),
)


def check_alone(source, target, ranks, **options):
    """Load what one process has saved, and save it again."""
    step = made(1, device="cpu", **options)
    checkpoints = Checkpoints(source, ranks)
    torch.manual_seed(ranks.rank)
    own, state = torch.get_rng_state(), checkpoints.load()
    checkpoints.restore(state, step)
    expected = read_tensors(state.folder)
    assert torch.equal(torch.get_rng_state(), own if ranks.rank else expected["rng.0.cpu"])
    for name, t in step.model.state_dict().items():
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        assert torch.equal(t, expected[f"model.{name}"]), name
    checkpoints = Checkpoints(target, ranks)
    checkpoints.save(step, step=state.step, **STATE)
    with torch.no_grad():
        for p in step.model.parameters():
            p.zero_()
    checkpoints.finish()


def check_equal_ranks(folder, ranks):
    """Both ranks have all: each tensor is written once; a fault in one's file is known to both."""
    step = trained(device="cpu")
    checkpoints = Checkpoints(folder, ranks)
    torch.manual_seed(ranks.rank)
    for number in (1, 2):
        own = torch.get_rng_state()
        checkpoints.save(step, step=number, **STATE)
    state = checkpoints.load()
    assert (state.step, state.world) == (2, 2)
    torch.rand(5)
    checkpoints.restore(state, other := made(1, device="cpu"))
    assert torch.equal(torch.get_rng_state(), own)
    assert_equal(other, step)
    assert_shared_out(state.folder)
    dist.barrier()
    if ranks.rank == 0:
        flip(state.folder / "__0_0.distcp")  # which the other one checks
    dist.barrier()
    assert checkpoints.load().step == 1


def assert_shared_out(folder):
    """Two ranks have written about the same, and nothing twice."""
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    assert sum(sizes) == sum(part.length for part in stored.values())
    assert min(sizes) > 0.3 * sum(sizes)


def check_failure(folder, ranks):
    """One rank fails to write, at whatever point: both are told, and none waits."""
    checkpoints, step = Checkpoints(folder, ranks), made(device="cpu")
    for method in ("prepare_local_plan", "write_data"):
        for failing in (0, 1):
            with pytest.MonkeyPatch.context() as patch:
                if ranks.rank == failing:
                    patch.setattr(dcp.FileSystemWriter, method, fail)
                checkpoints.save(step, step=3, **STATE)
                with pytest.raises(OSError, match=r"step-00000003 could not .*No space") as error:
                    checkpoints.finish()
            if ranks.rank != failing:
                assert f"rank {failing}: OSError" in str(error.value)
            dist.barrier()
            assert names(folder) == ["step-00000001", "step-00000002"]
            dist.barrier()
    checkpoints.save(step, step=3, **STATE)
    checkpoints.finish()
    assert checkpoints.load().step == 3


def fail(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_ranks_share_states_with_one_process(tmp_path):
    """Saved by one process, loaded and saved by two, and loaded by one: nothing but moved."""
    for precision in ("float32", "bf16-weights"):
        step = trained(device="cpu", precision=precision)
        Checkpoints(tmp_path / f"alone-{precision}", background=False).save(step, step=6, **STATE)
    spawn(work, (tmp_path,), 2)
    for name, precision, options in SPREAD:
        expected = Checkpoints(tmp_path / f"alone-{precision}").load()
        checkpoints = Checkpoints(tmp_path / f"{name}-{precision}")
        state = checkpoints.load()
        assert (state.step, state.world, state.plain) == (6, 2, expected.plain)
        first, other = (read_tensors(found.folder) for found in (expected, state))
        del first["rng.0.cpu"], other["rng.0.cpu"], other["rng.1.cpu"]
        assert_same(other, first)
        one = trained(device="cpu", precision=precision)
        checkpoints.restore(state, two := made(2, device="cpu", precision=precision, **options))
        assert_equal(two, one)
        assert_shared_out(state.folder)
