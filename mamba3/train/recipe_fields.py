"""Checks of the fields of a recipe's groups, which are frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mamba3.fields import coerce


def coerce_fields(recipe) -> None:
    """Convert values to their fields' types, in place; a TypeError names one that cannot be."""
    for f in dataclasses.fields(recipe):
        object.__setattr__(recipe, f.name, coerce(getattr(recipe, f.name), f.type, f.name))


def check_at_least(recipe, least: int, *names: str) -> None:
    """Raise a ValueError that names the first of the fields below `least`."""
    for name in names:
        if not getattr(recipe, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(recipe, name)}")


def check_one_of(recipe, **choices: Iterable[str]) -> None:
    """Raise a ValueError that names the first field whose value is none of its choices."""
    for name, known in choices.items():
        if getattr(recipe, name) not in known:
            raise ValueError(
                f"{name} must be one of {', '.join(known)}, got {getattr(recipe, name)!r}"
            )
