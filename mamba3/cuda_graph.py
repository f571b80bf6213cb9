"""Recording CUDA graphs, so that one that fails leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def recorded(device: torch.device, **options) -> Iterator[torch.cuda.CUDAGraph]:
    """The CUDA graph of what is launched inside a `with` block, on a device.

    Args:
        device: of everything that is launched.
        options: of `torch.cuda.graph`.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        # After a recording that fails, the generator would go on believing that there is one, and
        # refuse to draw another number.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                yield graph
        except BaseException:
            generator.graphsafe_set_state(before)
            raise
