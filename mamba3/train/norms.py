"""GroupNorms: how long gradients, updates and weights are, by what trains them.

    matrices    what Muon trains
    decayed     what AdamW trains, with weight decay
    undecayed   what AdamW trains without: norms, biases, embeddings and the like

A norm is that of all elements of a group together. It stays on the device: nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from mamba3.optim import HybridOptimizer
from mamba3.optim.param_groups import Piece
from mamba3.optim.pieces import Member, is_dtensor, own_gradient, wide


class GroupNorms:
    """Measures a step: `before()`, the step, `after()`.

    In between it holds a copy of the weights. Gradients are what the step left in `grad`, clipped
    if it clips. A step that is replayed from a CUDA graph may leave those of another one there:
    make the step as it is. With `Sharded` in place of DDP they are those of this rank alone.

    Args:
        optimizer: of the parameters. Where these are DTensors, all ranks measure the same steps,
            and norms are those of the whole.

    Raises:
        ValueError: DTensors that are spread over several groups of processes.
    """

    def __init__(self, optimizer: HybridOptimizer):
        groups: dict[str, list[Member]] = {"matrices": [], "decayed": [], "undecayed": []}
        for piece in optimizer.engine.pieces:
            if piece.lr_mul:
                parameter = optimizer.engine.parameters[piece.name]
                groups[_group(piece)].append(Member(piece, parameter))
        self._members = {name: members for name, members in groups.items() if members}
        parameters = optimizer.engine.parameters.values()
        self._dtype = reduce(torch.promote_types, (wide(p.dtype) for p in parameters))
        self._processes = _processes([p for p in parameters if is_dtensor(p)])
        self._before: dict[str, list[Tensor]] | None = None

    @torch.no_grad()
    def before(self) -> None:
        """Copy the weights, right before a step."""
        self._before = {
            name: [member.weight.clone() for member in members]
            for name, members in self._members.items()
        }

    @torch.no_grad()
    def after(self) -> dict[str, Tensor]:
        """The norms of the step that was made since.

        Returns:
            Tensors of no dimension, float32 (float64 if a weight is), by names such as
            "grad_norm/matrices", "update_norm/decayed" and "weight_norm/undecayed", for groups
            that have parameters. The update is what the step changed the weights by, as the model
            has them; the weights are those after it.

        Raises:
            RuntimeError: `before()` was not called.
        """
        if self._before is None:
            raise RuntimeError("after() measures a step: call before() ahead of it")
        before, self._before = self._before, None
        squares = {}
        for name, members in self._members.items():
            weights, updates = [member.weight for member in members], before[name]
            torch._foreach_sub_(updates, weights)
            gradients = [own_gradient(member) for member in members]
            squares[f"grad_norm/{name}"] = self._squares(members, gradients)
            squares[f"update_norm/{name}"] = self._squares(members, updates)
            squares[f"weight_norm/{name}"] = self._squares(members, weights)
        spread, whole = torch.stack(list(squares.values())).T.contiguous()
        if self._processes is not None:
            dist.all_reduce(spread, group=self._processes)
        return dict(zip(squares, (spread + whole).sqrt().unbind(), strict=True))

    def _squares(self, members: Sequence[Member], tensors: Sequence[Tensor | None]) -> Tensor:
        """Sums of squares, (2,): of what is spread over processes, and of what each has whole."""
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for member, t in zip(members, tensors, strict=True):
            if t is not None and t.numel():
                sides[not _is_spread(member.parameter)].append(t)
        none = torch.zeros((), dtype=self._dtype, device=members[0].parameter.device)
        return torch.stack([
            torch.stack(torch._foreach_norm(those, 2, self._dtype)).square().sum()
            if those else none
            for those in sides
        ])  # fmt: skip


def _group(piece: Piece) -> str:
    if piece.rule == "muon":
        return "matrices"
    return "decayed" if piece.weight_decay is None or piece.weight_decay else "undecayed"


def _is_spread(parameter: Tensor) -> bool:
    return is_dtensor(parameter) and not all(p.is_replicate() for p in parameter.placements)


def _processes(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """Those that DTensors are spread over; None where there is but one."""
    if not parameters:
        return None
    from mamba3.optim.dtensor import Shards

    groups = {Shards.of(p).group for p in parameters if _is_spread(p)}
    if len(groups) > 1:
        raise ValueError(
            "norms need all parameters to be spread over the same processes, and these are over "
            f"{len(groups)} groups of them: spread the model by fully_shard with one mesh"
        )
    return groups.pop() if groups else None
