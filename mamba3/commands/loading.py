"""Models for the commands that run one."""

from __future__ import annotations

from pathlib import Path


def load(folder: Path, device: str | None = None):
    """A model for this process, with no more threads than it is worth."""
    import torch

    from mamba3 import zoo
    from mamba3.threads import worthwhile_threads

    model = zoo.load_model(folder, device=device)
    torch.set_num_threads(worthwhile_threads(model))
    return model


def device_of(args) -> str:
    """The device asked for; a GPU if there is one."""
    from mamba3.ops.dispatch import default_device

    return args.device or default_device()
