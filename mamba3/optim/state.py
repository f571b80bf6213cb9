"""Saved states against an optimizer's own: what fits is paired, what does not is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from .pieces import Member


def named(member: Member, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A piece's state by the names that it has in its parameter's."""
    label = member.piece.label
    return {f"{label}.{name}" if label else name: t for name, t in state.items()}


def check_groups(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError if saved parameter groups are not those of an optimizer."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}"
        )
    for theirs, mine in zip(saved, own, strict=True):
        if "param_names" not in theirs:
            continue
        for name, expected in zip(theirs["param_names"], mine["param_names"], strict=True):
            if name != expected:
                raise ValueError(
                    f"the state is of {name} where this optimizer has {expected}: the model's "
                    "parameters or their order differ"
                )


def matching(
    saved: Mapping[str, Any], own: Mapping[str, Tensor], name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a parameter's state and its saved value; a ValueError where they do not fit."""
    if saved.keys() != own.keys():
        raise ValueError(
            f"the state of {name} has {sorted(saved)}, this optimizer has {sorted(own)}: it was "
            "made with other options, or another layout of the parameter"
        )
    for key, tensor in own.items():
        if saved[key].shape != tensor.shape:
            raise ValueError(
                f"the state {key} of {name} has shape {tuple(saved[key].shape)}, expected "
                f"{tuple(tensor.shape)}"
            )
        yield tensor, saved[key]
