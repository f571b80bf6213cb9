"""The training loop, the only one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from mamba3.data.loader import AsyncBatches
from mamba3.data.problems import Batch
from mamba3.optim import ANVIL, HybridOptimizer, Sharded
from mamba3.progress import progress_bar
from mamba3.train.config import OptimRecipe, Recipe, StepRecipe
from mamba3.train.flops import mfu
from mamba3.train.log import MetricsLog
from mamba3.train.memory import AllocationGuard
from mamba3.train.nonfinite import first_nonfinite
from mamba3.train.norms import GroupNorms
from mamba3.train.parallel import (
    Ranks,
    averaging,
    on_stream,
    own_stream,
    sharing,
    spread,
    summing,
)
from mamba3.train.parts import RankParts
from mamba3.train.readings import NotFinite, Readings
from mamba3.train.spikes import SpikeDetector
from mamba3.train.step import TrainStep
from mamba3.train.step_cache import CachedStep

# What each name of a recipe's optimizer stands for.
_OPTIMIZERS = {"adamw": {"overrides": {"*": "adamw"}}, "hybrid": {}, "anvil": ANVIL}


def make_optimizer(model: nn.Module, optim: OptimRecipe, **options) -> HybridOptimizer:
    """The recipe's optimizer over the model's parameters, which say what decays."""
    named = _OPTIMIZERS[optim.name]
    if optim.preset is not None:
        named = named | {"preset": optim.preset}
    return HybridOptimizer(
        model,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        split=optim.split,
        **named,
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
    ranks = ranks or Ranks()
    model.backbone.recompute = None if how.recompute == "none" else how.recompute
    half = how.precision == "bf16-weights"
    model = model.to(torch.bfloat16) if half else model
    spread(model, ranks, how.parallel)
    shared = sharing(ranks, how.parallel, optim.grad_clip)
    forward = torch.compile(model) if how.compile else model
    stream = own_stream(next(model.parameters()).device, ranks, how.parallel)
    with on_stream(stream):
        forward = averaging(forward, ranks, how.parallel)
    return TrainStep(
        model,
        make_optimizer(model, optim, extra_bits=half, distributed=shared),
        precision=how.precision,
        grad_clip=optim.grad_clip,
        accumulate=how.accumulate,
        ranks=ranks,
        forward=forward,
        stream=stream,
        optimizer_clips=isinstance(shared, Sharded),
        exchange=summing(model, ranks, how.parallel, how.exchange),
    )


def _mfu_of_a_token(step: TrainStep, recipe: Recipe) -> float | None:
    """The share of the GPUs' arithmetic that a token a second makes use of; None where unknown."""
    return mfu(
        1.0,
        step.model.config,
        # Where lengths vary, all positions are taken to be predicted.
        recipe.data.length or 1 << 20,
        device=step.device,
        precision=recipe.step.precision,
        ranks=step.ranks.world,
    )


class Watch(Protocol):
    """Who looks on while steps are made."""

    def due(self, step: int) -> bool:
        """Whether `after_step` is to be called after this step."""
        ...

    def stops(self, step: int) -> bool:
        """Asked after every step: whether to end there, `after_step` being called."""
        ...

    def after_step(self, step: int, loss: float) -> None:
        """`step` steps are made, and the log is up to date; the model is in evaluation mode."""
        ...


def fit(
    step: TrainStep,
    batches: Callable[[int], Batch],
    recipe: Recipe,
    *,
    log: MetricsLog,
    watch: Watch,
    start: int = 0,
    skipped: int = 0,
    spikes: SpikeDetector | None = None,
    progress: bool = True,
) -> float | None:
    """Make optimizer steps number start+1 to `recipe.train.steps`.

    Args:
        step: of `make_step`; its model is left in evaluation mode.
        batches: gives batch `index`; step n is made on batch n - 1 + skipped.
        recipe: of the run.
        log: gets one line a step: loss, lr, grad_norm, tokens_per_s, data_wait_s.
        watch: evaluates, saves and stops.
        start: number of steps made before.
        skipped: batches that were left out before.
        spikes: the losses before, if jumps are looked for.
        progress: show a bar on standard error.

    Returns:
        The last loss; None if there was no step to make.

    Raises:
        NotFinite: loss or gradient is NaN or infinite, unless such steps are to be skipped; no
            weight has been changed by that step.
        Spike: the loss jumped.
    """
    steps, optim, how = recipe.train.steps, recipe.optim, recipe.step
    cached = CachedStep(step, records=how.cache_steps)
    every = recipe.train.norms_every
    norms = GroupNorms(step.optimizer) if every else None
    guard = AllocationGuard(step.device if recipe.train.check_allocations else "cpu")
    stream = RankParts(batches, *step.ranks, how.accumulate, skipped)
    workers = recipe.data.workers_on(step.device)
    data = AsyncBatches(stream, start, workers=workers, device=step.device)
    with data, progress_bar(progress, total=steps, initial=start, unit="step") as bar:
        readings = Readings(
            log, bar, how, skipped=skipped, spikes=spikes, mfu=_mfu_of_a_token(step, recipe)
        )
        step.model.train()
        for index in range(start, steps):
            lr = learning_rate(index, optim)
            for group in step.optimizer.param_groups:
                group["lr"] = lr
            parts, tokens = next(data)
            guard.start()
            if every and (index + 1) % every == 0:
                # Not by a recording, whose gradients may be those of another one by now.
                norms.before()
                output, found = step.make(parts), norms.after()
            else:
                output, found = cached.make(parts), {}
                guard.check(index + 1, new=cached.new)
            told = {"lr": lr, "tokens": tokens, "data_wait_s": data.waited_s()}
            try:
                readings.add(index + 1, output, **told, more=found)
                stops = watch.stops(index + 1)
                looks = stops or index + 1 == steps or watch.due(index + 1)
                loss = readings.finish() if looks else None
            except NotFinite as error:
                found = first_nonfinite(step, batches(error.batch))
                raise error.at(found) from None
            if looks:
                step.model.eval()
                watch.after_step(index + 1, loss)
                step.model.train()
            if stops:
                break
        step.model.eval()
    return readings.loss
