"""first_nonfinite: where a loss or a gradient that is NaN or infinite came from."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mamba3.data.problems import Batch, scored_tokens
from mamba3.models.lm import IGNORE
from mamba3.optim.pieces import local
from mamba3.train.precision import autocast
from mamba3.train.step import TrainStep


def first_nonfinite(train_step: TrainStep, batch: Batch) -> str | None:
    """Name the first tensor that is not finite when a batch is gone through once more.

    In this order: weights; what goes into modules and comes out of them, as the forward pass comes
    by; the loss; gradients of parameters, as the backward pass comes by. A batch that no loss can
    be had of is said before all. The host waits at every module. Weights, gradients, random numbers
    and modes are left as they were.

    Args:
        train_step: whose step it was. Its weights should be those that the step began with; it has
            left them alone itself.
        batch: of the step, whole. A rank looks at its own rows; where weights are spread over
            ranks, all of them must call this.

    Returns:
        Such as "output of backbone.layers.3.mixer (2 of 4096 values)". None if all is finite this
        time, as it may be where later steps have changed the weights.
    """
    model, scaler = train_step.model, train_step.scaler
    if (found := _in_batch(batch, model)) is not None:
        return found
    # All of it is gone through, whatever is found: other ranks may wait for this one in it.
    findings = [_first("weight", itertools.chain(model.named_parameters(), model.named_buffers()))]
    devices = [train_step.device] if train_step.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _own_gradients(model):
        parts = train_step.parts(batch)
        for i, part in enumerate(parts):
            where = f" in part {i + 1} of {len(parts)}" if len(parts) > 1 else ""
            with _watched(model) as in_modules, autocast(train_step.precision, train_step.device):
                loss = model(**part.inputs, return_logits=False).loss
            in_loss = _first("loss", [("", loss)])
            loss = loss * part.share * train_step.ranks.world
            in_gradients = _backward(model, loss if scaler is None else scaler.scaled(loss))
            if in_gradients is not None and scaler is not None:
                in_gradients += (
                    f" of the loss times {scaler.scale.item():g}, which in float16 overflows now "
                    "and then: the step is left out, and the factor halved"
                )
            findings += [found and found + where for found in (*in_modules, in_loss, in_gradients)]
    return next(filter(None, findings), None)


def _in_batch(batch: Batch, model: nn.Module) -> str | None:
    """What is wrong with a batch."""
    if not scored_tokens(batch.labels, batch.seq_idx):
        return "batch: no token of it is scored, and the mean of none is nan"
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None:
        return None
    labels = batch.labels[batch.labels != IGNORE]
    for name, ids in (("input_ids", batch.input_ids), ("labels", labels)):
        wrong = ids[(ids < 0) | (ids >= size)]
        if len(wrong):
            return f"batch: {name} hold {wrong[0]}, and the model knows tokens from 0 to {size - 1}"
    return None


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """A list that gets the first tensor which is not finite among modules' inputs and outputs.

    The hooks are those of all modules there are: a module that had one of its own might be run in
    another way, as the head is.
    """
    names = {module: name for name, module in model.named_modules() if module is not model}
    found: list[str] = []

    def look(what: str, module: nn.Module, value: Any) -> None:
        if module in names and not found:
            tensors = (("", t) for t in _tensors(value))
            if (first := _first(f"{what} of {names[module]}", tensors)) is not None:
                found.append(first)

    handles = (
        register_module_forward_pre_hook(lambda module, args: look("input", module, args)),
        register_module_forward_hook(lambda module, _, output: look("output", module, output)),
    )
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _backward(model: nn.Module, loss: Tensor) -> str | None:
    """Go backward; the first parameter whose gradient is not finite."""
    arrived: dict[str, str | None] = {}

    def look(name: str, gradient: Tensor) -> None:
        arrived[name] = _first("gradient of", [(name, gradient)])

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    handles = [
        p.register_hook(lambda gradient, name=name: look(name, gradient))
        for name, p in trained.items()
    ]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    # Where weights are spread, gradients come by other ways than the parameters' own.
    for name, p in reversed(trained.items()):
        if name not in arrived and p.grad is not None:
            look(name, p.grad)
    return next(filter(None, arrived.values()), None)


@contextlib.contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Gradients that are made here go, and those from before come back."""
    before = [(p, p.grad) for p in model.parameters()]
    try:
        model.zero_grad(set_to_none=True)
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient


def _first(what: str, named: Iterable[tuple[str, Tensor]]) -> str | None:
    """What to call the first of some tensors that is not finite, and how much of it is not."""
    for name, t in named:
        finite = local(t.detach()).isfinite()
        if not finite.all():
            bad = finite.numel() - int(finite.sum())
            return f"{what} {name}".rstrip() + f" ({bad} of {finite.numel()} values)"
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
