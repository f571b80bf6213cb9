"""Decoding from a recorded step: a model's kernels for one token, replayed as one CUDA graph.

A step is hundreds of short kernels, and a GPU runs them faster than Python launches them. Recorded
once for a batch size, all of them start by a single call.

`Decoder` is what `generate` uses: it replays where that is known to be the same as calling the
model, and calls the model elsewhere. A model's last recording is kept, outside of the model, until
another takes its place or the model is freed.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .cuda_graph import record
from .ops import backend

if TYPE_CHECKING:
    from .models.lm import LMState, Mamba3LM

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)

# Recording takes about as long as this many steps; fewer than that are not worth one.
WORTHWHILE = 16


def record_cuda(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Record a function as a CUDA graph, after it has run twice; see `cuda_graph.record`."""
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):  # which is left in any case, also where recording fails
            for _ in range(2):  # what is made at first use, as compiled kernels, is not recorded
                function()
            return record(function, device, stream=stream)
    finally:
        current.wait_stream(stream)


# How to record, by the type of the device. Elsewhere models are called.
RECORDERS: dict[str, Callable] = {"cuda": record_cuda}


class DecodeGraph:
    """The step of a model for a fixed batch, recorded, with a state of its own.

    Args:
        model: the language model; it is not referred to afterwards, but for its weights' addresses.
        state: of the batch that is to be decoded; only its sizes and dtypes matter.
        record: as `record_cuda`.
    """

    def __init__(self, model: Mamba3LM, state: LMState, record: Callable):
        self.key = _key(model, state)
        with torch.inference_mode():
            self._ids = torch.zeros(state.batch_size, dtype=torch.int64, device=_device(state))
            self._state = state._replace(
                layers=tuple(type(layer)(*map(_buffer_like, layer)) for layer in state.layers)
            )
            ids, own = self._ids, self._state
            self._replay = record(lambda: model.step(ids, own, inplace=True)[0], ids.device)

    @torch.inference_mode()
    def load(self, state: LMState) -> None:
        """Go on from this state, which is copied."""
        for own, given in zip(self._state.layers, state.layers, strict=True):
            for mine, theirs in zip(own, given, strict=True):
                mine.copy_(theirs)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Read one token a sequence, (B,) int; the logits (B, V) last until the next call."""
        self._ids.copy_(ids)
        return self._replay()


class Decoder:
    """Feeds tokens to a model one by one, by a recorded step where there can be one.

    Use it under `contextlib.closing`, which hands the recording on to the next decoder.

    Args:
        model: the language model.
        state: where to go on from; it is not changed.
        steps: the most calls that will be made.
    """

    def __init__(self, model: Mamba3LM, state: LMState, steps: int):
        self._model, self._state, self._steps = model, state, steps
        self._graph: DecodeGraph | None = None
        self._started = False

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Read one token a sequence, (B,) int; the logits (B, V) last until the next call."""
        if not self._started:
            self._started = True
            self._graph = _take(self._model, self._state, self._steps)
            if self._graph is not None:
                self._graph.load(self._state)
                self._state = None
        if self._graph is not None:
            return self._graph.step(ids)
        logits, self._state = self._model.step(ids, self._state)
        return logits

    def close(self) -> None:
        """Keep the recording for the next decoder."""
        if self._graph is not None:
            _kept[self._model], self._graph = self._graph, None


# A recording that is in use is not here: two decoders at a time never share one.
_kept: weakref.WeakKeyDictionary[Mamba3LM, DecodeGraph] = weakref.WeakKeyDictionary()
_failed: weakref.WeakKeyDictionary[Mamba3LM, tuple] = weakref.WeakKeyDictionary()


def forget(model: Mamba3LM) -> None:
    """Free a model's recording, which holds a state of its last batch; the next call records."""
    _kept.pop(model, None)
    _failed.pop(model, None)


def _take(model: Mamba3LM, state: LMState, steps: int) -> DecodeGraph | None:
    """A recording to use for `steps` steps, kept or new; None where the model is to be called."""
    record = RECORDERS.get(_device(state).type)
    if record is None:
        return None
    if reason := obstacle(model):
        _warn_once(f"decoding without a CUDA graph, which would be faster: {reason}")
        return None
    key, kept = _key(model, state), _kept.pop(model, None)
    if kept is not None and kept.key == key:
        return kept
    if steps < WORTHWHILE or _failed.get(model) == key:
        if kept is not None:
            _kept.setdefault(model, kept)
        return None
    kept = None  # the new one may need its memory
    try:
        return DecodeGraph(model, state, record)
    except Exception as error:  # whatever it is, calling the model works, or says what is wrong
        _failed[model] = key
        _warn_once(
            f"decoding without a CUDA graph, which would be faster: recording one for a batch of "
            f"{state.batch_size} failed with {type(error).__name__}: {error}"
        )
        return None


def obstacle(model: Mamba3LM) -> str | None:
    """Why a recorded step might differ from the model's own later on; None if nothing speaks so.

    A recording knows the weights' addresses, so it sees changes of their values, but not what
    Python code does: hooks, adapters that are switched on and off, dropout.
    """
    for name, module in model.named_modules():
        name, kind = name or "the model", type(module)
        ours = kind.__module__.partition(".")[0] == __package__
        if not ours and kind not in (nn.Linear, nn.Conv1d, nn.Embedding, nn.ModuleList):
            return f"{name} is a {kind.__qualname__}, which may do something else at every call"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has forward hooks"
        if not vars(module).keys().isdisjoint(("forward", "step")):
            return f"a method of {name} was replaced"
    devices = {t.device for t in _tensors(model)}
    if len(devices) > 1:
        return f"the model is spread over {', '.join(sorted(map(str, devices)))}"
    if torch.is_autocast_enabled(devices.pop().type):
        return "torch.autocast is on, which keeps casts of the weights; cast the model instead"
    return None


def _key(model: Mamba3LM, state: LMState) -> tuple:
    """What a recording depends on; another one is needed where any of it differs."""
    device, matmul = _device(state), torch.backends.cuda.matmul
    return (
        [(t.data_ptr(), t.dtype, t.shape) for t in _tensors(model)],
        [(t.dtype, t.shape) for layer in state.layers for t in layer],
        backend(device),
        # Reading the older setting is an error once the newer one was set.
        matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        # Decoders on two streams must not share buffers, even one after the other.
        torch.cuda.current_stream(device) if device.type == "cuda" else None,
    )


def _buffer_like(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device)


def _tensors(model: Mamba3LM) -> Iterator[Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


def _device(state: LMState) -> torch.device:
    return state.layers[0].h.device
