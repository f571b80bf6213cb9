"""Which parameters get weight decay: the model says, by name, and each is in one group."""

from __future__ import annotations

from typing import Any

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW by the rules of the model.

    Args:
        model: has `no_weight_decay_names()`, full names of the parameters that get no decay.
        weight_decay: of all others.

    Returns:
        At most two groups, with and without decay; parameters that need no gradient are in none.

    Raises:
        ValueError: a name of `no_weight_decay_names()` that no parameter has, as when the model is
            wrapped; or no parameter needs a gradient.
    """
    marked = model.no_weight_decay_names()
    every = dict(model.named_parameters(remove_duplicate=False))
    if unknown := sorted(marked - set(every)):
        raise ValueError(
            f"no_weight_decay_names() names {', '.join(unknown)}, which the model does not have; "
            "give the model itself, not a wrapper that renames its parameters"
        )
    # By identity, so that a tied weight that is marked under one of its names is marked.
    exempt = {id(every[name]) for name in marked}
    groups = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[id(parameter) in exempt]["params"].append(parameter)
    check_groups(model, groups)
    return [group for group in groups if group["params"]]


def check_groups(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Raise a ValueError that names every trainable parameter that is not in exactly one group."""
    times: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            times[id(parameter)] = times.get(id(parameter), 0) + 1
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("no parameter of the model needs a gradient: there is nothing to train")
    wrong = [f"{n} ({times.get(id(p), 0)})" for n, p in trainable.items() if times.get(id(p)) != 1]
    if wrong:
        raise ValueError(
            "every trainable parameter must be in exactly one optimizer group; the number of "
            f"groups is wrong for {', '.join(wrong)}"
        )
