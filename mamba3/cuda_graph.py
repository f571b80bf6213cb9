"""Recording CUDA graphs, so that one that fails leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mamba3.ops.recording import keeping


def record(
    function: Callable[[], Any],
    device: torch.device,
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> Callable[[], Any]:
    """Record a function's work as a CUDA graph, without doing it.

    Args:
        function: launches kernels on the current stream, and waits for none of them.
        device: of its tensors.
        pool: memory that recordings share, of which only one runs at a time; None is its own.
        stream: what to record on; None is one of its own.

    Returns:
        What does the work, on the same addresses; it returns what `function` did when it was
        recorded, with new values in it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        # After a recording that fails, the generator would go on believing that there is one, and
        # refuse to draw another number.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            with (
                keeping() as kept,
                torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                output = function()
        except BaseException:
            generator.graphsafe_set_state(before)
            raise

    return _Replay(graph, output, kept)


class _Replay:
    """Does recorded work; `kept` is what it reads that no one else may hold any longer."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Any, kept: list[Any]):
        self._graph, self._output, self._kept = graph, output, kept

    def __call__(self) -> Any:
        self._graph.replay()
        return self._output
