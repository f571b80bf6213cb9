"""Dataclasses from plain values, as JSON and YAML have them: strict, with errors that help."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Container, Iterable
from typing import Any


def from_mapping(cls, mapping: dict[str, Any], *, where: str):
    """Build a dataclass from a mapping; an unknown or missing key is an error that helps.

    Args:
        cls: a keyword-only dataclass.
        mapping: its values.
        where: what the mapping is, for the message.
    """
    if not isinstance(mapping, dict):
        raise TypeError(f"{where} must be a mapping of keys to values, got {mapping!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    check_keys(mapping, fields, where=where)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in mapping
    ]
    if missing:
        raise TypeError(f"{where} lacks {', '.join(missing)}")
    return cls(**mapping)


def check_keys(keys: Iterable[Any], known: Iterable[str], *, where: str) -> None:
    """Raise a TypeError that names the first unknown key and the known one nearest to it."""
    known = sorted(known)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise TypeError(f"{where} has no key {key!r}; the nearest is {near[0]!r}")


def coerce(value: Any, annotation: str, name: str) -> Any:
    """Check `value` against a field's annotation; numbers are converted where nothing is lost.

    YAML 1.1 reads 1e-4 as a string and 1.0 as a float, so a float field takes "1e-4" and an int
    field takes 1.0.

    Args:
        value: what was given.
        annotation: of the field, a string: int, float, bool or str, with "| None" at will. A value
            of any other annotation is returned as it is.
        name: of the field, for the message.

    Raises:
        TypeError: the value is not of that type, or would lose by the conversion.
    """
    kind, *others = (part.strip() for part in annotation.split("|"))
    if kind not in ("bool", "str", "float", "int") or (value is None and "None" in others):
        return value
    if kind in ("bool", "str"):
        if isinstance(value, bool if kind == "bool" else str):
            return value
    elif not isinstance(value, bool):
        try:
            number = float(value)
            if kind == "float" and not math.isnan(number):
                return number
            if kind == "int" and number.is_integer():
                return value if isinstance(value, int) else int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{name} must be {annotation}, got {value!r}")


def coerce_sizes(config: Any, *, may_be_zero: Container[str] = ()) -> None:
    """Coerce the fields of a frozen dataclass in place; its numbers must be positive and finite.

    Args:
        config: the dataclass.
        may_be_zero: fields that may be 0.

    Raises:
        TypeError, ValueError: as said; the message names the field.
    """
    for field in dataclasses.fields(config):
        name = field.name
        value = coerce(getattr(config, name), field.type, name)
        object.__setattr__(config, name, value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (value == 0 and name in may_be_zero):
            continue
        if not (value > 0 and math.isfinite(value)):
            bound = "0 or more" if name in may_be_zero else "more than 0"
            raise ValueError(f"{name} must be {bound} and finite, got {value}")
