"""How many of torch's threads a model is worth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Below this, threads spend their time waiting for each other; on a busy machine, minutes of it.
PARAMETERS_WORTH_A_THREAD = 1_000_000


def worthwhile_threads(model: torch.nn.Module) -> int:
    """One thread for a model of under a million parameters, else as many as torch would take."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 1 if parameters < PARAMETERS_WORTH_A_THREAD else torch.get_num_threads()


@contextlib.contextmanager
def limited_threads(n: int) -> Iterator[None]:
    """Run torch on `n` threads inside a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
