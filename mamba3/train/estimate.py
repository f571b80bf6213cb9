"""estimate: the GPU memory of a training run before it starts, on any machine.

A step is rehearsed on the meta device, see `rehearsal`; so the peak is that of the model, the
recomputation and the optimizer as they are, not of formulas about them. A GPU is not needed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from mamba3 import hub, zoo
from mamba3.config import Mamba3Config
from mamba3.data.problems import Batch
from mamba3.models.lm import Mamba3LM
from mamba3.train.config import WHOLE, OptimRecipe, Recipe, StepRecipe
from mamba3.train.loop import make_step
from mamba3.train.rehearsal import CUBLAS_BYTES, Account, Storage, rehearse
from mamba3.train.step_cache import CachedStep

# Batches at the start of a run, and at its end, whose longest is taken where lengths vary: problems
# that grow are longest at the end.
BATCHES = 8


class Estimate(NamedTuple):
    """Bytes on a GPU at the moment of a step when there are most, by what they are.

    Fields:
        weights: parameters.
        optimizer: the optimizer's state.
        gradients: of parameters.
        copies: parameters in half precision, for products.
        kept: what the forward pass keeps for the backward pass.
        workspace: what a phase needs for itself alone: logits, recomputed activations, gradients
            of activations, cuBLAS.
        phase: which one that is: "forward", "backward", "clipping" or "optimizer".
        rows, length: of the batch that this rank computes.
        recorded: what recorded steps hold from then on, of all but weights and optimizer; 0 where
            steps are not recorded.
    """

    weights: int
    optimizer: int
    gradients: int
    copies: int
    kept: int
    workspace: int
    phase: str
    rows: int
    length: int
    recorded: int

    @property
    def total(self) -> int:
        """The peak: what `torch.cuda.max_memory_allocated` is to say."""
        return sum(self[:6])

    def __str__(self) -> str:
        names = {
            "weights": "weights",
            "optimizer": "optimizer state",
            "gradients": "gradients",
            "copies": "half-precision copies of weights",
            "kept": "kept for the backward pass",
            "workspace": f"workspace ({self.phase})",
            "total": f"total, {self.rows} x {self.length} tokens",
        }
        unit, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        lines = [f"{names[of]:34} {getattr(self, of) / unit:9.2f} {name}" for of in names]
        if self.recorded:
            lines.append(
                f"Recorded steps hold {self.recorded / unit:.2f} {name} of it from then on; what "
                "is not recorded (steps of a new length, evaluations) takes its own besides."
            )
        return "\n".join(lines)


def estimate(recipe: Recipe, world: int = 1) -> Estimate:
    """Tell the peak of a recipe's steps on a GPU, which need not be there; not of evaluations.

    Args:
        recipe: of the run. Where the lengths of its batches vary, the longest of the first few and
            the last few is taken.
        world: number of ranks, of which every one has a GPU.

    Raises:
        OSError, ValueError: the recipe's files cannot be used, or as `estimate_step`.
    """
    config, rows, length = _facts(recipe)
    return estimate_step(config, rows, length, recipe.optim, recipe.step, world=world)


def estimate_step(
    config: Mamba3Config,
    rows: int,
    length: int,
    optim: OptimRecipe,
    how: StepRecipe,
    *,
    world: int = 1,
) -> Estimate:
    """Tell the peak of a step on a GPU, which need not be there.

    It is that of the kernels where Triton is installed, else of the torch backend. A compiled model
    is taken for one that is not.

    Args:
        config: the model's.
        rows, length: of the whole batch.
        optim, how: as of a recipe.
        world: ranks that share the rows; their weights and state are whole (ddp, allreduce).

    Raises:
        ValueError: fewer rows than ranks; ranks that share weights or state (fsdp, sharded).
    """
    if rows < world:
        raise ValueError(f"{rows} rows cannot be shared by {world} ranks")
    if world > 1 and how.parallel not in WHOLE:
        raise ValueError(
            f"there is no estimate for step.parallel={how.parallel} on {world} ranks; that for "
            "ddp, which spreads nothing, is more"
        )
    # Nothing could be compiled for meta.
    how = dataclasses.replace(how, compile=False)
    account = rehearse(
        lambda: make_step(Mamba3LM(config, device="meta"), optim, how),
        _parts(rows, length, how.accumulate, world),
        buckets=world > 1,
    )
    return _estimate(account, -(-rows // world), length, how.cache_steps)


def rows_that_fit(recipe: Recipe, memory: int, world: int = 1) -> int:
    """Tell how large a recipe's data.batch_size may be; 0 if not even a row a rank fits.

    Args:
        recipe, world: as of `estimate`.
        memory: bytes of one GPU that steps may take; leave some of it out for CUDA itself and for
            the gaps between tensors.
    """
    config, _, length = _facts(recipe)

    def fits(rows: int) -> bool:
        found = estimate_step(config, rows * world, length, recipe.optim, recipe.step, world=world)
        return found.total <= memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * world


def measured(recipe: Recipe, steps: int = 4) -> int:
    """Make a recipe's steps on this machine's GPU, which are not kept, and return their peak."""
    config, rows, length = _facts(recipe)
    return measure_step(config, rows, length, recipe.optim, recipe.step, steps)


def measure_step(
    config: Mamba3Config,
    rows: int,
    length: int,
    optim: OptimRecipe,
    how: StepRecipe,
    steps: int = 4,
) -> int:
    """Make steps on random tokens on this machine's GPU, and return the peak of memory in bytes.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("only a GPU can be measured, and there is none: see estimate_step")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make_step(Mamba3LM(config, device="cuda"), optim, how)
    make = CachedStep(step) if how.cache_steps else step
    step.model.train()
    for _ in range(steps):
        ids = torch.randint(config.vocab_size, (rows, length))
        make(Batch(ids, ids, ids.numel()))
    return torch.cuda.max_memory_allocated() - before


def _facts(recipe: Recipe) -> tuple[Mamba3Config, int, int]:
    """The model of a recipe, and rows and length of its longest batches."""
    from mamba3.train.tasks import task_of

    data, model = recipe.data, recipe.model
    knows_vocabulary = model is None or "vocab_size" in model
    task = None if data.length and knows_vocabulary else task_of(recipe)
    if model is None:
        config = hub.read_config(zoo.resolve(recipe.train.init_from))
    else:
        config = recipe.architecture(model["vocab_size"] if task is None else task.vocab_size)
    length = data.length
    if length is None:
        stream, run = task.stream(), range(recipe.train.steps)
        length = max(stream(i).input_ids.shape[1] for i in (*run[:BATCHES], *run[-BATCHES:]))
    return config, data.batch_size, length


def _parts(rows: int, length: int, accumulate: int, world: int) -> list[tuple[int, int]]:
    """Shapes of the parts of the first rank, which has most."""
    mine = torch.empty(rows, 0, device="meta").tensor_split(world)[0].tensor_split(accumulate)
    return [(len(part), length) for part in mine if len(part)]


def _estimate(account: Account, rows: int, length: int, recorded: bool) -> Estimate:
    sizes = dict.fromkeys(Estimate._fields[:6], 0)
    for storage in account.at_peak:
        sizes[_kind(storage)] += storage.nbytes
    sizes["workspace"] += CUBLAS_BYTES
    of_steps = sum(sizes.values()) - sizes["weights"] - sizes["optimizer"]
    return Estimate(
        **sizes,
        phase=account.peak_phase,
        rows=rows,
        length=length,
        recorded=of_steps if recorded else 0,
    )


def _kind(storage: Storage) -> str:
    """The field of an `Estimate` that a storage counts for."""
    made_in = {"model": "weights", "optimizer state": "optimizer"}
    if storage.is_gradient:
        return "gradients"
    if storage.is_copy:
        return "copies"
    if storage.phase == "forward" and "forward" in storage.outlived:
        return "kept"
    return made_in.get(storage.phase, "workspace")
