"""Memory of a GPU in training: settings of PyTorch's allocator, a guard on its steps, a report."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import torch

# Where the user may have said how the allocator is to work; all of it is then the user's.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Segments that grow in place: a batch longer than all before adds pages to what there is, where a
# fixed segment that is too short would be left as a gap.
GROWING = "expandable_segments:True"
# Where there are none: requests go up to an eighth of a power of two, so that batches of different
# lengths fit into the blocks of one another.
ROUNDED = "roundup_power2_divisions:8"


def configure(device: torch.device | str) -> str | None:
    """Set PyTorch's allocator up for training, before a run takes memory on its GPU.

    Args:
        device: of the run; on any but a GPU there is nothing to do.

    Returns:
        The settings; None where nothing was changed: no GPU, or an environment variable of
        `VARIABLES`, by which the user has settled it.
    """
    if torch.device(device).type != "cuda" or any(name in os.environ for name in VARIABLES):
        return None
    grows = sys.platform == "linux" and torch.version.hip is None
    settings = GROWING if grows else ROUNDED
    _apply(settings)
    return settings


def _apply(settings: str) -> None:
    # The first one is newer than torch 2.9, where the second one begins to warn. Environment
    # variables would come too late if anything has asked for the settings before.
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (apply or torch.cuda.memory._set_allocator_settings)(settings)


def requests_and_mallocs() -> tuple[int, int]:
    """Tensors that the current GPU's allocator was asked for until now, and calls of cudaMalloc."""
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["num_device_alloc"]


class AllocationGuard:
    """Sees to it that steps take no memory from the GPU anew once those of their kind were made.

    What the allocator has taken it keeps and hands out again. A step that needs more waits for the
    GPU to give it, and the run's memory grows.

    Args:
        device: of the run; on any but a GPU nothing is found.

    Example:
        >>> guard = AllocationGuard("cpu")
        >>> guard.start()
        >>> guard.check(1, new=True)
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._before = 0

    def start(self) -> None:
        """A step begins; what evaluations and checkpoints took before does not count."""
        self._before = self._taken()

    def check(self, step: int, *, new: bool) -> None:
        """A step is made.

        Args:
            step: its number, for the message.
            new: whether its structure is: it warms up, or is recorded, and may take memory.

        Raises:
            RuntimeError: it took memory, and is not new.
        """
        taken = self._taken() - self._before
        if new or not taken:
            return
        raise RuntimeError(
            f"step {step} took memory from the GPU {taken} times, though steps of its shape were "
            "made before. If batches differ in length, give them one (data.length, which packs or "
            "pads rows); have segments grow (unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, "
            "or set expandable_segments:True there); or set train.check_allocations to false"
        )

    def _taken(self) -> int:
        """Calls of cudaMalloc, and pages added to segments that grow."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self.device)["num_device_alloc"]


class Report(NamedTuple):
    """What a process holds on a GPU, in bytes and calls.

    Fields:
        allocated: in tensors.
        peak: the most that `allocated` has been.
        reserved: taken from the GPU: tensors, and what is kept for others.
        inactive_split: free parts of blocks of which another part is in use.
        device_allocs, device_frees: times that memory was taken from the GPU, and given back.
        retries: times that the GPU had none left, until all that was kept was given back.
    """

    allocated: int
    peak: int
    reserved: int
    inactive_split: int
    device_allocs: int
    device_frees: int
    retries: int

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is in no tensor."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0

    def __str__(self) -> str:
        return (
            f"{_gb(self.allocated)} allocated ({_gb(self.peak)} at most), {_gb(self.reserved)} "
            f"reserved, of which {self.fragmentation:.1%} in no tensor and "
            f"{_gb(self.inactive_split)} in parts of blocks; taken from the GPU "
            f"{self.device_allocs} times and given back {self.device_frees} times, "
            f"{self.retries} retries"
        )


class HostReport(NamedTuple):
    """What a process on a CPU holds.

    Fields:
        peak: the most memory that it has had in bytes; None where the system does not say.
    """

    peak: int | None

    def __str__(self) -> str:
        return "unknown" if self.peak is None else f"{_gb(self.peak)} resident at most"


def report(device: torch.device | str) -> Report | HostReport:
    """What this process holds on a device: a `Report` of a GPU, else a `HostReport`."""
    device = torch.device(device)
    if device.type != "cuda":
        return HostReport(_peak_resident())
    stats = torch.cuda.memory_stats(device)
    return Report(
        allocated=stats["allocated_bytes.all.current"],
        peak=stats["allocated_bytes.all.peak"],
        reserved=stats["reserved_bytes.all.current"],
        inactive_split=stats["inactive_split_bytes.all.current"],
        device_allocs=stats["num_device_alloc"],
        device_frees=stats["num_device_free"],
        retries=stats["num_alloc_retries"],
    )


def _peak_resident() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _gb(n: int) -> str:
    return f"{n / 1e9:.2f} GB"
