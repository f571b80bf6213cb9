"""Whether a form says all of a model."""

from __future__ import annotations

import dataclasses

from ..config import Mamba3Config

ROPE_FRACTIONS = (0.5, 1.0)  # those that mamba_ssm and fla have
# Not of the trained model: only how a new one is initialised, or written another way.
_NO_MATTER = {"angle_init_scale", "d_intermediate", "mlp_multiple"}


def check_rope_fraction(config: Mamba3Config, form: str) -> None:
    """Raise a ValueError if the form has no such rotation."""
    if config.rope_fraction not in ROPE_FRACTIONS:
        raise ValueError(
            f"{form} has a rope_fraction of 0.5 or 1.0, and this model's is {config.rope_fraction}"
        )


def check_expressed(config: Mamba3Config, read: Mamba3Config, form: str) -> None:
    """Raise a ValueError where a model would come back as another.

    Args:
        config: the model's.
        read: what comes back of the form.
        form: its name.
    """
    lost = [
        f"{name} {value} (it would be {theirs})"
        for name, value, theirs in _differences(config, read)
        if name not in _NO_MATTER
    ]
    if config.mlp_width != read.mlp_width:
        lost.append(f"an MLP of width {config.mlp_width} (it would be {read.mlp_width})")
    if lost:
        raise ValueError(f"the form {form} cannot express this model's {', '.join(lost)}")


def _differences(config: Mamba3Config, read: Mamba3Config):
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(read, field.name)
        if ours != theirs:
            yield field.name, ours, theirs
