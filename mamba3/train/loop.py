"""The training loop, the only one: curriculum runs and fine-tunes both go through `fit`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from mamba3.data.loader import AsyncBatches
from mamba3.data.problems import Batch
from mamba3.optim import ANVIL, HybridOptimizer, Replicated
from mamba3.progress import progress_bar
from mamba3.train.config import OptimRecipe, StepRecipe
from mamba3.train.log import MetricsLog
from mamba3.train.parallel import Ranks
from mamba3.train.readings import Readings
from mamba3.train.step import TrainStep
from mamba3.train.step_cache import CachedStep

# What each name of a recipe's optimizer stands for.
_OPTIMIZERS = {"adamw": {"overrides": {"*": "adamw"}}, "hybrid": {}, "anvil": ANVIL}


def make_optimizer(model: nn.Module, optim: OptimRecipe, **options) -> HybridOptimizer:
    """The recipe's optimizer over the model's parameters, which say what decays."""
    return HybridOptimizer(
        model,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        **_OPTIMIZERS[optim.name],
        **options,
    )


def learning_rate(index: int, optim: OptimRecipe) -> float:
    """The learning rate of step `index`, counted from 0: a function of the index alone."""
    if index < optim.warmup_steps:
        return optim.lr * (index + 1) / optim.warmup_steps
    if optim.decay_steps is None:
        return optim.lr
    done = (index - optim.warmup_steps) / (optim.decay_steps - optim.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(done, 1))) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


def make_step(
    model: nn.Module, optim: OptimRecipe, how: StepRecipe, ranks: Ranks | None = None
) -> TrainStep:
    """The recipe's step, with its optimizer; weights become bfloat16 if the recipe says so."""
    model.backbone.recompute = None if how.recompute == "none" else how.recompute
    half = how.precision == "bf16-weights"
    model = model.to(torch.bfloat16) if half else model
    shared = Replicated() if ranks is not None and ranks.world > 1 else None
    return TrainStep(
        model,
        make_optimizer(model, optim, extra_bits=half, distributed=shared),
        precision=how.precision,
        grad_clip=optim.grad_clip,
        accumulate=how.accumulate,
        ranks=ranks,
    )


def fit(
    step: TrainStep,
    batches: Callable[[int], Batch],
    optim: OptimRecipe,
    how: StepRecipe,
    *,
    steps: int,
    log: MetricsLog,
    start: int = 0,
    workers: int = 0,
    due: Callable[[int], bool] | None = None,
    after_step: Callable[[int, float], None] | None = None,
    stop: Callable[[int], bool] | None = None,
    progress: bool = True,
) -> float | None:
    """Make optimizer steps number start+1 to `steps`.

    Args:
        step: of `make_step`; its model is left in evaluation mode.
        batches: gives batch `index`; step n is made on batch n - 1.
        optim: the learning rate over the steps.
        how: whether steps are recorded, and what is not finite skipped.
        steps: number of steps when done.
        log: gets one line a step: loss, lr, grad_norm, tokens_per_s, data_wait_s.
        start: number of steps made before.
        workers: processes that make batches ahead; 0 makes them here, between the steps.
        due: steps after which `after_step` is to be called; None is the last alone.
        after_step: called with the number of steps made and the last loss, the log being up to
            date.
        stop: asked after every step, by its number, whether to end there; `after_step` is then
            called.
        progress: show a bar on standard error.

    Returns:
        The last loss; None if there was no step to make.

    Raises:
        RuntimeError: loss or gradient is NaN or infinite, unless such steps are to be skipped; no
            weight has been changed by that step.
    """
    make, model = CachedStep(step) if how.cache_steps else step, step.model
    # On the host, where a step counts its tokens without a wait; it takes the batch over itself.
    data = AsyncBatches(batches, start, workers=workers)
    with data, progress_bar(progress, total=steps, initial=start, unit="step") as bar:
        readings = Readings(log, bar, how.nonfinite)
        model.train()
        for index in range(start, steps):
            lr = learning_rate(index, optim)
            for group in step.optimizer.param_groups:
                group["lr"] = lr
            batch = next(data)
            output = make(batch)
            readings.add(
                index + 1, output, lr=lr, tokens=batch.n_tokens, data_wait_s=data.waited_s()
            )
            stops = stop is not None and stop(index + 1)
            if stops or index + 1 == steps or (due is not None and due(index + 1)):
                loss = readings.finish()
                model.eval()
                if after_step is not None:
                    after_step(index + 1, loss)
                model.train()
            if stops:
                break
        model.eval()
    return readings.loss
