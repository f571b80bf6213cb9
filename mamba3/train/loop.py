"""The training loop, the only one: curriculum runs and fine-tunes both go through `fit`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from tqdm import tqdm

from mamba3.data.problems import Batch
from mamba3.optim import ANVIL, HybridOptimizer, param_groups
from mamba3.train.config import OptimRecipe
from mamba3.train.log import MetricsLog


def make_optimizer(model, optim: OptimRecipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over the model's parameters, which say what decays."""
    numbers = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    if optim.name == "adamw":
        device = next(model.parameters()).device.type
        groups = param_groups(model, optim.weight_decay)
        return torch.optim.AdamW(groups, fused=device in ("cpu", "cuda"), **numbers)
    numbers |= {"weight_decay": optim.weight_decay, "momentum": optim.momentum}
    return HybridOptimizer(model, **numbers, **(ANVIL if optim.name == "anvil" else {}))


def learning_rate(index: int, optim: OptimRecipe) -> float:
    """The learning rate of step `index`, counted from 0: a function of the index alone."""
    if index < optim.warmup_steps:
        return optim.lr * (index + 1) / optim.warmup_steps
    if optim.decay_steps is None:
        return optim.lr
    done = (index - optim.warmup_steps) / (optim.decay_steps - optim.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(done, 1))) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


def fit(
    model,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], Batch],
    optim: OptimRecipe,
    *,
    steps: int,
    log: MetricsLog,
    start: int = 0,
    after_step: Callable[[int, float], None] | None = None,
    progress: bool = True,
) -> None:
    """Make optimizer steps number start+1 to `steps`.

    Args:
        model: a `Mamba3LM`; it is left in evaluation mode.
        optimizer: of `make_optimizer`.
        batches: gives batch `index`; step n is made on batch n - 1.
        optim: learning rate and clipping.
        steps: number of steps when done.
        log: gets one line a step: loss, lr, grad_norm, tokens_per_s.
        start: number of steps made before.
        after_step: called with the number of steps made and the last loss.
        progress: show a bar on standard error.

    Raises:
        RuntimeError: loss or gradient is NaN or infinite; no weight has been changed by that step.
    """
    # In a log file every refresh is a line of its own.
    every = 0.1 if sys.stderr.isatty() else 10
    with tqdm(
        total=steps,
        initial=start,
        unit="step",
        file=sys.stderr,
        disable=not progress,
        mininterval=every,
    ) as bar:
        for index in range(start, steps):
            lr = learning_rate(index, optim)
            model.train()
            result = _step(model, optimizer, batches(index), index, lr, optim.grad_clip)
            model.eval()
            log.write(
                index + 1,
                loss=result.loss,
                lr=lr,
                grad_norm=result.grad_norm,
                tokens_per_s=result.tokens_per_s,
            )
            bar.set_postfix_str(
                f"loss {result.loss:.4f}, lr {lr:.1e}, {result.tokens_per_s:,.0f} tokens/s",
                refresh=False,
            )
            bar.update()
            if after_step is not None:
                after_step(index + 1, result.loss)


class _StepResult(NamedTuple):
    loss: float
    grad_norm: float
    tokens_per_s: float


def _step(model, optimizer, batch: Batch, index: int, lr: float, grad_clip: float) -> _StepResult:
    began = time.perf_counter()
    device = next(model.parameters()).device
    loss = model(batch.input_ids.to(device), labels=batch.labels.to(device)).loss
    _check_finite("loss", loss.item(), index)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    _check_finite("gradient norm", norm.item(), index)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return _StepResult(loss.item(), norm.item(), batch.n_tokens / (time.perf_counter() - began))


def _check_finite(what: str, value: float, index: int) -> None:
    if not math.isfinite(value):
        raise RuntimeError(
            f"the {what} is {value} at step {index + 1} (batch {index}); training stopped before "
            "that step changed the weights, and the last checkpoint stays. Try a smaller optim.lr "
            "or optim.grad_clip"
        )
