"""AsyncBatches: batches made ahead by worker processes, and copied to the GPU while it works.

A stream gives batch i as a function of i, so workers only share out numbers: which of them made a
batch, and how many there are, changes nothing. The number of the next batch is all there is to
save, and all that is needed when a worker dies.

A stream that draws several batches at once says how many, by `batches_at_once`: a worker makes them
all, and they travel together, so that what each costs on the way does not count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mamba3.data.groups import Failure, Group, each
from mamba3.data.problems import Batch


class AsyncBatches:
    """An endless iterator over the batches of a stream, made ahead of time.

    Rank r of `world` gets the batches numbered index * world + r, index = start, start + 1, ...:
    every number goes to one rank, whatever the number of workers. What an iterator has taken from
    its stream and not given yet is lost with it, so go on from `index`. An error ends it.

    Args:
        batches: the stream; what it gives is a tensor, or tuples of such. With workers it must be
            picklable: it is sent to each.
        start: index of the first batch, here and on every other rank.
        workers: processes that make batches; 0 makes each in this process when it is asked for.
        prefetch: batches that each worker keeps ready, or times as many as it makes at once.
        rank, world: number of this process, and of processes that share the stream.
        device: where batches go. To a GPU they are copied one ahead, from pinned memory, on a
            stream of its own; the stream that is current at `next` waits for the copy.

    Raises:
        ValueError: a number out of range.
        TypeError: the stream cannot be sent to a worker.
        RuntimeError: from `next`, with the batch's number: the stream raised an error, or workers
            died twice with no batch in between. After one death they are started again, with a
            warning.

    Example:
        >>> from mamba3.data.arithmetic import CurriculumStream, tokenizer
        >>> stream = CurriculumStream([1], tokenizer(), batch_size=4, seed=0)
        >>> with AsyncBatches(stream, start=7, workers=0) as batches:
        ...     batch = next(batches)
        >>> batches.index
        8
    """

    def __init__(
        self,
        batches: Callable[[int], Batch],
        start: int = 0,
        *,
        workers: int,
        prefetch: int = 2,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ):
        for name, value, least in (
            ("start", start, 0),
            ("workers", workers, 0),
            ("prefetch", prefetch, 1),
            ("world", world, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must lie between 0 and world - 1 = {world - 1}, got {rank}")
        if workers:
            _check_sendable(batches)
        self.index = start
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._made = _Made(batches)
        self._at_once = getattr(batches, "batches_at_once", 1) if workers else 1
        self._ready: deque[Batch | Failure] = deque()
        self._workers, self._prefetch = workers, prefetch
        self._rank, self._world = rank, world
        self._fetched = start
        self._died_at: int | None = None
        self._waited = 0.0
        self._ahead = _Ahead(self.device) if self.device.type == "cuda" else None
        self._iterator: Iterator | None = self._start()

    def __iter__(self) -> AsyncBatches:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise RuntimeError(f"this iterator has ended; make another from index {self.index}")
        began = time.perf_counter()
        try:
            batch = self._next()
        except BaseException:
            self.close()
            raise
        self._waited += time.perf_counter() - began
        self.index += 1
        return batch

    def waited_s(self) -> float:
        """Seconds spent in `next` since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """End the workers; there are no more batches."""
        self._iterator = None  # a DataLoader's iterator ends its workers when it is dropped
        self._ready.clear()
        if self._ahead is not None:
            self._ahead.drop()

    def __enter__(self) -> AsyncBatches:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _next(self) -> Batch:
        if not self._ready:
            group = self._ahead(self._fetch) if self._ahead is not None else self._fetch()
            self._ready.extend(each(group, Tensor, lambda t: t.to(self.device)).batches())
        batch = self._ready.popleft()
        if isinstance(batch, Failure):
            number = self._number(self.index)
            raise RuntimeError(f"batch {number} could not be made: {batch.error}") from (
                RuntimeError(f"where it was made:\n{batch.trace}")
            )
        return batch

    def _number(self, index: int) -> int:
        return index * self._world + self._rank

    def _fetch(self) -> Group:
        """The next batches in order, by new workers if one has died."""
        while True:
            try:
                group = next(self._iterator)
            # The stream's own errors come as a `Failure`; what is raised is the workers' end.
            except Exception as error:
                cause = str(error)
            else:
                self._fetched += group.count
                return each(group, np.ndarray, torch.from_numpy)
            self._start_again(cause)

    def _start_again(self, cause: str) -> None:
        number = self._number(self._fetched)
        if self._died_at == number:
            ahead = self._number(self._fetched + self._workers * self._prefetch * self._at_once)
            raise RuntimeError(
                f"data workers died twice at batch {number}, or while they made those after it up "
                f"to {ahead}: {cause}. Is the memory full, or /dev/shm? workers=0 shows an error "
                "of the stream itself"
            )
        self._died_at = number
        warnings.warn(
            f"a data worker died ({cause}); workers are started again at batch {number}, and no "
            "batch is lost",
            RuntimeWarning,
            stacklevel=5,
        )
        self._iterator = None
        self._iterator = self._start()

    def _start(self) -> Iterator:
        """Begin to make batches from the one that is fetched next."""
        processes = {}
        if self._workers:
            processes = {
                "prefetch_factor": self._prefetch,
                "multiprocessing_context": _context(),
                "worker_init_fn": _begin_worker,
            }
        loader = DataLoader(
            self._made,
            batch_size=None,
            sampler=_groups(self._number(self._fetched), self._world, self._at_once),
            num_workers=self._workers,
            collate_fn=_as_it_is,
            # Otherwise it draws from the generator that the model's randomness comes from.
            generator=torch.Generator(),
            **processes,
        )
        iterator = iter(loader)
        if self._workers:
            _widen(iterator._worker_result_queue._reader)
        return iterator


def _groups(number: int, world: int, at_once: int) -> Iterator[range]:
    """Numbers of a rank's batches from one on, together where they are made at once."""
    while True:
        end = (number // at_once + 1) * at_once
        numbers = range(number, end, world)
        yield numbers
        number += len(numbers) * world


class _Made(Dataset):
    """Batches of a stream, or why there are no more."""

    def __init__(self, batches: Callable[[int], Batch]):
        self.batches = batches

    def __getitem__(self, numbers: range) -> Group:
        made = []
        for number in numbers:
            made.append(self._one(number))
            if isinstance(made[-1], Failure):
                break
        return Group.of(made)

    def _one(self, number: int) -> Batch | Failure:
        try:
            batch = self.batches(number)
            # Arrays travel by value. A tensor would by shared memory, which takes longer for each
            # than most batches take to be made.
            return each(batch, Tensor, Tensor.numpy) if get_worker_info() else batch
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


class _Ahead:
    """Gives groups of batches on a GPU and copies the next while the caller uses the last."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._next: tuple[Group, torch.cuda.Event] | None = None

    def __call__(self, fetch: Callable[[], Group]) -> Group:
        group, copied = self._next or self._copy(fetch())
        torch.cuda.current_stream(self._device).wait_event(copied)
        self._next = None if group.failed else self._copy(fetch())
        return group

    def drop(self) -> None:
        """Give the next group up."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._next = None

    def _copy(self, group: Group) -> tuple[Group, torch.cuda.Event]:
        caller = torch.cuda.current_stream(self._device)

        def copied(t: Tensor) -> Tensor:
            # Taken on the caller's stream, so that its order decides when the memory is used again.
            with torch.cuda.stream(caller):
                copy = torch.empty_like(t, device=self._device)
            # Pinned here, not by a thread of the DataLoader: CUDA calls of another thread would
            # break the capture of a graph in this one.
            pinned = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            # By this thread alone: to wake those of torch takes milliseconds, and the copy 0.1.
            np.copyto(_bytes(pinned), _bytes(t.contiguous()))
            return copy.copy_(pinned, non_blocking=True)

        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            moved = each(group, Tensor, copied)
        return moved, self._stream.record_event()


def _bytes(t: Tensor) -> np.ndarray:
    """A dense tensor's memory; numpy does not know every dtype."""
    return t.reshape(-1).view(torch.uint8).numpy()


def _widen(reader: Connection) -> None:
    """Let a pipe hold a megabyte, where that can be, in place of 64 kB.

    What does not fit waits in the worker until this process reads, and then each of the two waits
    for the other again and again.
    """
    # Not on every system; or it is more than this user may have.
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)


def _as_it_is(batch: Any) -> Any:
    return batch


def _context():
    """How to start workers: not by a fork of this process, whose CUDA and threads do not survive.

    They are forked from a server that has imported this module and done nothing else. As they are
    not children of this process, their deaths show in `next` alone, not as a signal in mid-step.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _check_sendable(batches: Callable[[int], Batch]) -> None:
    try:
        pickle.Pickler(_Nowhere()).dump(batches)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"this stream of batches cannot be sent to worker processes: {error}. Make it of "
            "classes and functions that a module holds by name, or pass workers=0"
        ) from error


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def _begin_worker(worker: int) -> None:
    # Ctrl-C is for the main process, which may want more batches before it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The DataLoader's own watch is over the parent, which here is the server, not that process.
    threading.Thread(target=_end_with_main, daemon=True).start()


def _end_with_main() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
