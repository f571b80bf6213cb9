"""Training on several processes, as torchrun starts them.

Every rank computes its rows of every batch; losses and gradients are those of the whole batch, so
that a run is the same, but for rounding, at any number of ranks. Rank 0 writes. What ranks share:

| name | weights | gradients | optimizer's state | orthogonalisation |
|---|---|---|---|---|
| ddp | whole | averaged by DistributedDataParallel | whole | shared out |
| allreduce | whole | added up at once, after the backward pass | whole | shared out |
| fsdp | spread by fully_shard | spread | spread | at a matrix's owner |
| sharded | whole | averaged by the optimizer | shared out | shared out |
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mamba3.hub import filled
from mamba3.models.lm import Mamba3LM
from mamba3.optim import Replicated, Sharded
from mamba3.optim.exchange import packed, unpacked
from mamba3.optim.orthogonalize import scaled
from mamba3.optim.pieces import by_dtype

# Steps after which ranks ask one another whether to stop, for which the host waits.
ASK_EVERY = 10


class Ranks(NamedTuple):
    """This process among those of a run."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all ranks to come here."""
        if self.world > 1:
            dist.barrier()

    def sum(self, t: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place; the host does not wait for it."""
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def largest(self, value: int, step: int, device: torch.device) -> int:
        """The largest of all ranks' numbers, asked in every `ASK_EVERY`th step; else 0."""
        if self.world == 1:
            return value
        if step % ASK_EVERY:
            return 0
        shared = torch.tensor(value, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)


def spread(model: nn.Module, ranks: Ranks, parallel: str) -> None:
    """Spread a model's weights over the ranks, if they are to be; before its optimizer is made."""
    if ranks.world > 1 and parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # By itself it takes a GPU that is there, also for a model on the CPU.
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (ranks.world,))
        for layer in model.backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def own_stream(device: torch.device, ranks: Ranks, parallel: str) -> torch.cuda.Stream | None:
    """The stream that steps run on; None is the current one.

    DistributedDataParallel keeps what accumulates gradients, and that keeps the stream it was made
    on. Were it the default one, steps could not be recorded; were it another one than the steps',
    every gradient would have two streams wait for each other.
    """
    if device.type != "cuda" or ranks.world == 1 or parallel != "ddp":
        return None
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on a stream, after what the current one has to do, and before what it will have."""
    if stream is None or (current := torch.cuda.current_stream(stream.device)) == stream:
        yield
        return
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class GradientSum:
    """Adds up all ranks' gradients, of each dtype in one exchange.

    DistributedDataParallel exchanges gradients while the backward pass makes others, which slows
    the kernels that run meanwhile; this begins after it, and sends half as much in bfloat16.

    Args:
        parameters: the same on all ranks, as are those of them that have gradients.
        dtype: to send gradients in; None is their own.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None):
        self.parameters, self.dtype = list(parameters), dtype
        self._sums: list[_Sums] = []

    def __call__(self) -> None:
        """Exchange gradients, and take them from the parameters; the host does not wait."""
        own = [p for p in self.parameters if p.grad is not None]
        self._sums = [
            _Sums(parameters, self.dtype or dtype) for dtype, parameters in by_dtype(own).items()
        ]

    @property
    def sums(self) -> list[Tensor]:
        """What has been added up and not been given to the parameters, as it was sent."""
        return [view for own in self._sums for view in own.views]

    def finish(self, factor: Tensor | None) -> None:
        """Give the parameters their sums, times a factor of no dimension, if there is one."""
        for own in self._sums:
            own.finish(factor)
        self._sums = []


class _Sums:
    """Gradients in one tensor, which all ranks add up."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype):
        self._parameters, self._dtype = parameters, parameters[0].dtype
        # What is between gradients is added up as well, and nobody reads it.
        self._buffer, self.views = packed([p.grad for p in parameters], dtype)
        for p in parameters:
            p.grad = None
        dist.all_reduce(self._buffer)

    def finish(self, factor: Tensor | None) -> None:
        buffer = self._buffer
        if factor is not None or buffer.dtype != self._dtype:
            factor = buffer.new_ones((), dtype=torch.float32) if factor is None else factor
            # As one matrix: a pass less than widening, and then scaling.
            buffer = scaled(buffer[None, None], factor.view(1, 1, 1), self._dtype)[0, 0]
        for p, view in zip(self._parameters, unpacked(buffer, self._parameters), strict=True):
            p.grad = view


def summing(model: nn.Module, ranks: Ranks, parallel: str, exchange: str) -> GradientSum | None:
    """What adds up gradients after the backward pass, if that is wanted; weights become rank 0's.

    Args:
        model: with all its weights.
        ranks: of this run.
        parallel: of a recipe.
        exchange: "float32", gradients as they are, or "bf16".
    """
    if ranks.world == 1 or parallel != "allreduce":
        return None
    for t in (*model.parameters(), *model.buffers()):
        dist.broadcast(t.detach(), 0)
    dtype = torch.bfloat16 if exchange == "bf16" else None
    return GradientSum((p for p in model.parameters() if p.requires_grad), dtype)


def averaging(forward: nn.Module, ranks: Ranks, parallel: str) -> nn.Module:
    """What computes the loss, with gradients that are averaged over ranks if they are to be."""
    if ranks.world == 1 or parallel != "ddp":
        return forward
    # Buckets are the gradients. With the usual 25 MB a step of 187M parameters on two GPUs takes a
    # percent longer.
    return DistributedDataParallel(forward, bucket_cap_mb=100, gradient_as_bucket_view=True)


def sharing(ranks: Ranks, parallel: str, max_norm: float | None) -> Replicated | Sharded | None:
    """What the optimizer shares out; `max_norm` is for the gradients that it averages itself."""
    if ranks.world == 1:
        return None
    sharded = Sharded(max_norm=math.inf if max_norm is None else max_norm)
    shares = {"ddp": Replicated(), "allreduce": Replicated(), "fsdp": None, "sharded": sharded}
    return shares[parallel]


def whole_model(model: nn.Module) -> nn.Module:
    """The model itself, or one with all its weights where they are spread; for all ranks to ask."""
    if not any(hasattr(p, "full_tensor") for p in model.parameters()):
        return model
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return filled(Mamba3LM(model.config, device="meta"), weights)


def whole(t: Tensor) -> Tensor:
    """A tensor from what all ranks have of it, which all of them must ask for."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@contextlib.contextmanager
def ranks_of(device: str) -> Iterator[Ranks]:
    """The ranks of this run: those that torchrun started, or this process alone.

    Args:
        device: "cpu", or "cuda", of which every rank takes one of its own.

    Raises:
        RuntimeError: there are fewer GPUs than ranks here.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    if device == "cuda":
        ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if ranks > gpus:
            raise RuntimeError(
                f"torchrun started {ranks} ranks on this machine, which has {gpus} GPUs: start "
                f"--nproc-per-node={gpus}, or train on the CPU with train.device=cpu"
            )
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", device_id=own)
    else:
        dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
