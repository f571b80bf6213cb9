"""Batches made ahead: the same ones in the same order, whatever makes them and whatever dies."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from compare import DEVICE
from number_streams import Deadly, Failing, Numbers, Wide

from mamba3.data import loader
from mamba3.data.arithmetic import CurriculumStream, tokenizer
from mamba3.data.loader import AsyncBatches
from mamba3.train.parts import RankParts, split

START, COUNT = 5, 9
STREAMS = {
    "curriculum": CurriculumStream([1, 2, 3], tokenizer(), batch_size=4, seed=3),
    "facts": CurriculumStream([2], tokenizer(), batch_size=3, seed=4),
}


def numbers(batches, count):
    return [int(next(batches).input_ids[0, 0]) for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_order_and_content(name, workers):
    stream = STREAMS[name]
    with AsyncBatches(stream, START, workers=workers, device=DEVICE) as batches:
        got = [next(batches) for _ in range(COUNT)]
        assert batches.index == START + COUNT
    for index, batch in enumerate(got, START):
        expected = stream(index)
        assert batch.input_ids.device.type == DEVICE
        assert torch.equal(batch.input_ids.cpu(), expected.input_ids), index
        assert torch.equal(batch.labels.cpu(), expected.labels), index
        assert batch.n_tokens == expected.n_tokens
        assert batch.seq_idx is None


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_of_batches_go_to_the_device_whole(workers):
    """Tuples in tuples; "meta" stands for a GPU where there is none."""
    stream, device = STREAMS["curriculum"], "cuda" if DEVICE == "cuda" else "meta"
    with AsyncBatches(RankParts(stream, 0, 1, 2), workers=workers, device=device) as batches:
        got = [next(batches) for _ in range(3)]
    for index, (parts, n_tokens) in enumerate(got):
        expected = split(stream(index), accumulate=2)
        assert n_tokens == expected.n_tokens
        for part, other in zip(parts, expected.parts, strict=True):
            assert part.cu_seqlens is None
            for t, wanted in zip(part.tensors, other.tensors, strict=True):
                assert t.device.type == device
                assert t.shape == wanted.shape
                if device == "cuda":
                    assert torch.equal(t.cpu(), wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_the_numbers_out(workers):
    found = []
    for rank in range(3):
        with AsyncBatches(Numbers(), 2, workers=workers, rank=rank, world=3) as batches:
            found.append(numbers(batches, 4))
    assert found == [[6, 9, 12, 15], [7, 10, 13, 16], [8, 11, 14, 17]]


@pytest.mark.parametrize(("start", "rank", "world"), [(0, 0, 1), (5, 0, 1), (2, 1, 3)])
def test_batches_that_are_made_at_once_keep_their_order(start, rank, world):
    stream = Numbers(at_once=4)
    options = {"rank": rank, "world": world, "device": DEVICE}
    with AsyncBatches(stream, start, workers=2, **options) as batches:
        got = numbers(batches, 3)
        assert batches.index == start + 3
    with AsyncBatches(stream, batches.index, workers=1, **options) as batches:
        got += numbers(batches, 7)
    assert got == [(start + i) * world + rank for i in range(10)]


def test_whatever_travels_together_stays_as_it_is():
    """Values of many types, and a batch of another shape among those made at once."""
    with AsyncBatches(Wide(at_once=4), workers=1, device=DEVICE) as batches:
        for index in range(12):
            got, expected = next(batches), Wide()(index)
            assert got[1][1:] == expected[1][1:]
            for t, wanted in zip(tensors(got), tensors(expected), strict=True):
                assert t.dtype == wanted.dtype
                assert t.device.type == DEVICE
                assert torch.equal(t.cpu(), wanted)


@pytest.mark.parametrize(("workers", "at_once"), [(0, 1), (1, 1), (1, 3)])
def test_what_is_twice_in_a_batch_travels_once(workers, at_once):
    """Ids that are their own labels."""
    with AsyncBatches(Numbers(at_once=at_once), workers=workers, device=DEVICE) as batches:
        for index in range(4):
            batch = next(batches)
            assert batch.input_ids.data_ptr() == batch.labels.data_ptr()
            assert batch.input_ids.tolist() == [[index] * 3] * 2
            assert batch.input_ids.dtype == torch.int64


def tensors(batch):
    return [t for item in batch for t in (item if isinstance(item, tuple) else [item])
            if isinstance(t, torch.Tensor)]  # fmt: skip


def test_going_on_from_the_index():
    with AsyncBatches(Numbers(), workers=1, rank=1, world=2, device=DEVICE) as batches:
        first = numbers(batches, 3)
    with AsyncBatches(
        Numbers(), batches.index, workers=2, rank=1, world=2, device=DEVICE
    ) as batches:
        assert first + numbers(batches, 3) == [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize(
    "t",
    [
        torch.tensor(3.5),
        torch.arange(6.0).view(2, 3).bfloat16(),
        torch.tensor([True, False]),
        torch.zeros(0, 3, dtype=torch.long),
    ],
    ids=str,
)
def test_memory_of_any_dtype_is_copied(t):
    copy = torch.full(t.shape, 1, dtype=t.dtype)
    np.copyto(loader._bytes(copy), loader._bytes(t))
    assert torch.equal(copy, t)


def test_copies_keep_out_of_the_callers_way():
    """On a GPU each batch is read long after it was given, while later ones are copied."""
    size = 2000 if DEVICE == "cuda" else 20
    with AsyncBatches(Numbers(), workers=0, device=DEVICE) as batches:
        load = torch.randn(size, size, device=DEVICE)
        sums = []
        for _ in range(20):
            batch = next(batches)
            for _ in range(20):
                load = (load @ load).clamp(-1, 1)
            sums.append(batch.input_ids.sum())
            del batch
    assert [int(total) for total in sums] == [6 * i for i in range(20)]


def test_a_killed_worker_loses_nothing_of_what_is_made_at_once():
    with AsyncBatches(Numbers(0.02, at_once=4), 1, workers=2, device=DEVICE) as batches:
        got = numbers(batches, 2)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match=r"started again at batch \d+, and no"):
            got += numbers(batches, 40)
    assert got == list(range(1, 43))


def test_a_killed_worker_loses_nothing():
    with AsyncBatches(Numbers(), workers=2, device=DEVICE) as batches:
        got = numbers(batches, 3)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        time.sleep(0.3)  # its death raises nothing here
        # Four more were under way, and may be there: what it was to make next is 7 or 8, and one
        # more is on its way to a GPU.
        with pytest.warns(RuntimeWarning, match="started again at batch [3-9], and no"):
            got += numbers(batches, 8)
        got += numbers(batches, 5)
    assert got == list(range(len(got)))


def test_a_batch_that_kills_its_workers_is_named():
    batches = AsyncBatches(Deadly(), workers=1, prefetch=1)
    assert numbers(batches, 4) == [0, 1, 2, 3]
    with (
        pytest.warns(RuntimeWarning, match="again at batch 4"),
        pytest.raises(RuntimeError, match="died twice at batch 4"),
    ):
        next(batches)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("workers", "at_once"), [(0, 1), (2, 1), (2, 5), (1, 6)])
def test_an_error_of_the_stream_has_the_batchs_number(workers, at_once):
    stream = Failing(at_once=at_once)
    with AsyncBatches(stream, workers=workers, rank=0, world=2, device=DEVICE) as batches:
        assert numbers(batches, 2) == [0, 2]
        with pytest.raises(RuntimeError, match="batch 4 could not be made: KeyError: 'no such row"):
            next(batches)
        with pytest.raises(RuntimeError, match="make another from index 2"):
            next(batches)


def test_where_an_error_was_made_is_told():
    with AsyncBatches(Failing(), 4, workers=1) as batches, pytest.raises(RuntimeError) as raised:
        next(batches)
    assert 'raise KeyError("no such row")' in str(raised.value.__cause__)


def test_waited_time():
    with AsyncBatches(Numbers(0.2), workers=0) as batches:
        numbers(batches, 2)
        assert 0.4 <= batches.waited_s() < 2
        assert batches.waited_s() == 0
    with AsyncBatches(Numbers(0.4), workers=1) as batches:
        next(batches)
        assert batches.waited_s() >= 0.3
        time.sleep(2)
        numbers(batches, 2)  # by now they are made
        assert batches.waited_s() < 0.4


def test_the_callers_random_numbers_stay():
    before = torch.get_rng_state()
    for workers in (0, 1):
        with AsyncBatches(Numbers(), workers=workers) as batches:
            next(batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_end_with_the_iterator():
    for end in (AsyncBatches.close, lambda batches: None):
        batches = AsyncBatches(Numbers(), workers=2)
        next(batches)
        assert len(multiprocessing.active_children()) == 2
        end(batches)
        del batches
        assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"prefetch": 0}, "prefetch must be at least 1, got 0"),
        ({"start": -1}, "start must be at least 0"),
        ({"world": 0}, "world must be at least 1"),
        ({"rank": 2, "world": 2}, "rank must lie between 0 and world - 1 = 1, got 2"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        AsyncBatches(Numbers(), **{"workers": 0, **options})


def test_a_stream_that_cannot_be_sent():
    with pytest.raises(TypeError, match=r"cannot be sent to worker processes: .*lambda"):
        AsyncBatches(lambda index: Numbers()(index), workers=1)
    with AsyncBatches(lambda index: Numbers()(index), workers=0) as batches:
        assert numbers(batches, 2) == [0, 1]


# Processes of their own

SCRIPT = """
import multiprocessing, signal, sys
from mamba3.data.loader import AsyncBatches
from mamba3.data.arithmetic import CurriculumStream, tokenizer

def main():
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append(True))
    stream = CurriculumStream([1], tokenizer(), batch_size=2, seed=0)
    with AsyncBatches(stream, workers=2) as batches:
        for _ in range(8 * stream.batches_at_once):  # of each worker, some
            next(batches)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        while not stop:
            next(batches)
        for _ in range(50):
            next(batches)

if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def running(tmp_path):
    """A process that takes batches until it is interrupted, and the ids of its workers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    try:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2, process.stderr.read()
        yield process, workers
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def ended(pids, seconds):
    """Whether processes come to their end in this time."""
    command = ["ps", "-o", "stat=", "-p", ",".join(map(str, pids))]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        states = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        if all(state.startswith("Z") for state in states.split()):
            return True
        time.sleep(0.1)
    return False


def test_ctrl_c_leaves_the_workers_to_the_main_process(tmp_path):
    with running(tmp_path) as (process, workers):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=30)
    assert errors == ""
    assert process.returncode == 0
    assert ended(workers, 5)


def test_workers_end_when_the_main_process_is_killed(tmp_path):
    with running(tmp_path) as (process, workers):
        assert not ended(workers, 0.5)
        process.kill()
        assert ended(workers, 10)
