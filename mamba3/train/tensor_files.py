"""The tensors of a state in files of torch.distributed.checkpoint, at any number of ranks.

The steps of its `save` and `load` are made one by one: between those of `save` ranks exchange what
they choose, on a thread of their choice, and in those of `load` none waits for another. The import
of it takes a second, so this module is imported where it is used.

`.metadata` is a pickle, which can run code: load no state of someone whom you do not trust.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    SavePlan,
)


class TensorWriter:
    """Writes tensors into a folder: all ranks plan, the first shares out, all write, it finishes.

    Args:
        folder: to write to.
        tensors: by name. Of a DTensor a rank writes what it has; other tensors that several ranks
            have are written by one of them.
        first: whether this is the rank that shares out.

    Attributes:
        parts: what this rank has of the tensors; what is written is what is there by then.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], first: bool):
        self.folder, self._planner = folder, _SavePlanner()
        self._planner.set_up_planner(dict(tensors), is_coordinator=first)
        self._plan = self._planner.create_local_plan()
        # Nothing is copied ahead: it would be by CUDA, even if all tensors are on the host.
        self._writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._writer.set_up_storage_writer(first)
        self.parts = {name: _local(t) for name, t in tensors.items()}

    @property
    def parts(self) -> dict[str, Tensor]:
        return self._planner.state_dict

    @parts.setter
    def parts(self, parts: dict[str, Tensor]) -> None:
        self._planner.state_dict = parts

    def plan(self) -> SavePlan:
        """What this rank could write; the folder is made."""
        return self._writer.prepare_local_plan(self._plan)

    def share_out(self, plans: list[SavePlan]) -> list[tuple[SavePlan, Any]]:
        """What each rank is to write, and what the first needs to finish, from all plans."""
        plans, metadata = self._planner.create_global_plan(plans)
        return [(plan, metadata) for plan in self._writer.prepare_global_plan(plans)]

    def write(self, plan: SavePlan) -> tuple[list, set[str]]:
        """Write this rank's share; what the first needs of it to finish, and the files' names."""
        results = self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        return results, {result.storage_data.relative_path for result in results}

    def finish(self, metadata: Any, results: Sequence[list]) -> str:
        """Write the file that says where everything is; its name."""
        self._writer.finish(metadata, list(results))
        return ".metadata"


class _SavePlanner(DefaultSavePlanner):
    """Plans by tensors as they are spread; by then `state_dict` has this rank's parts of them."""

    def lookup_object(self, index: Any) -> Tensor:
        return self.state_dict[index.fqn]


def saved_tensors(folder: str | Path) -> dict[str, Tensor]:
    """What a folder holds, as tensors of the meta device."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(of.size, dtype=of.properties.dtype, device="meta")
        for name, of in saved.items()
    }


def read_into(folder: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors of a folder into those given, which may be spread in another way."""
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a state's folder, whole, by names such as "model.lm_head.weight"."""
    tensors = {name: torch.empty_like(t, device="cpu") for name, t in saved_tensors(folder).items()}
    read_into(folder, tensors)
    return tensors


def _local(t: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    t = t.detach()
    return t.to_local() if hasattr(t, "to_local") else t
