"""What a run is about to do, in a few lines, before its first step."""

from __future__ import annotations

from mamba3.ops.dispatch import explain
from mamba3.train.config import OPTIMIZERS, Recipe
from mamba3.train.step import TrainStep
from mamba3.train.tasks import Task


def start_panel(recipe: Recipe, task: Task, step: TrainStep, start: int) -> str:
    """A line each on model, data, step, optimizer and device.

    Args:
        recipe: of the run.
        task: its data.
        step: with the model, the optimizer and the ranks.
        start: steps made before.
    """
    config, how = step.model.config, recipe.step
    parameters = sum(p.numel() for p in step.model.parameters())
    ranks = step.ranks.world
    shared = f", {ranks} ranks ({how.parallel})" if ranks > 1 else ""
    parts = f", {how.accumulate} parts each" if how.accumulate > 1 else ""
    again = "" if how.recompute == "none" else f", {how.recompute} recomputation"
    matrices, others = (
        sum(p.numel for p in step.optimizer.engine.pieces if p.rule == rule)
        for rule in ("muon", "adamw")
    )
    split = f": {matrices:,} parameters by Muon, {others:,} by AdamW" if matrices else ""
    lines = {
        "model": f"{config.form}, {config.n_layer} layers of width {config.d_model}, "
        f"{parameters:,} parameters",
        "data": f"{task.about}{shared}{parts}",
        "steps": f"{start + 1} to {recipe.train.steps}, {how.precision}{again}",
        "optimizer": f"{OPTIMIZERS[recipe.optim.name]}{split}; lr {recipe.optim.lr:g}, decay "
        f"{recipe.optim.weight_decay:g}",
        "device": f"{step.device}; {explain(step.device)}",
    }
    return "\n".join(f"{name:9}  {text}" for name, text in lines.items())
