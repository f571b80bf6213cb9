"""Parameters that are DTensors, as FSDP2 (`fully_shard`) makes them: every process has some rows.

A process keeps the state of its own rows and steps them. Only the update of a matrix, which no rows
of it tell, is brought together: at its owner, who orthogonalises it and sends the rows back.

    code        meaning
    spans       first and past-the-last row of a piece on every rank, in the order of ranks
    homes       the same, with all rows at the owner
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .banks import MuonBank
from .orthogonalize import product_dtype
from .param_groups import Piece
from .pieces import Gradients, Member, Numbers, Options, is_dtensor, wide

Spans = Sequence[tuple[int, int]]

# State that every process has whole: that of a matrix's lanes, and counts.
WHOLE = ("lanes", "step")


class Shards(NamedTuple):
    """The processes over which a parameter's rows are spread, and which of them this one is."""

    group: dist.ProcessGroup | None
    rank: int
    world: int

    @classmethod
    def of(cls, parameter: DTensor, name: str = "a parameter") -> Shards:
        """Those of a parameter; a ValueError for placements that are not by rows."""
        mesh, placements = parameter.device_mesh, parameter.placements
        dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        if len(dims) > 1 or any(not _by_rows(placements[dim]) for dim in dims):
            raise ValueError(
                f"{name} has the placements {tuple(placements)}: expected Shard(0) on at most one "
                "dimension of the mesh and Replicate on the others, as fully_shard(model) makes "
                "them by default"
            )
        if not dims:
            return cls(None, 0, 1)
        return cls(mesh.get_group(dims[0]), mesh.get_local_rank(dims[0]), mesh.size(dims[0]))

    def chunks(self, rows: int) -> Spans:
        """The rows of every rank, as Shard(0) spreads them."""
        size = -(-rows // self.world)
        return [(min(r * size, rows), min((r + 1) * size, rows)) for r in range(self.world)]

    def spans(self, piece: Piece, rows: int) -> Spans:
        """A piece's rows on every rank, counted from its first one; the parameter has `rows`."""
        if not piece.label:
            return self.chunks(rows)
        inside = [(max(a, piece.start), min(b, piece.stop)) for a, b in self.chunks(rows)]
        return [(a - piece.start, b - piece.start) if a < b else (0, 0) for a, b in inside]


def _by_rows(placement: Any) -> bool:
    return type(placement) is Shard and placement.dim == 0


def local_rows(piece: Piece, t: DTensor, placements: Sequence[Any]) -> Tensor:
    """A piece's rows on this process, as a view; t is the parameter, or of its shape.

    A gradient with other placements than the parameter's is brought to these first.
    """
    if t.placements != placements:
        t = t.redistribute(placements=placements)
    local = t.to_local()
    if not piece.label:
        return local
    shards = Shards.of(t, piece.name)
    first, last = shards.chunks(len(t))[shards.rank]
    start, stop = max(first, piece.start), min(last, piece.stop)
    return local[start - first : max(start, stop) - first]


def move(
    tensors: Sequence[Tensor], sources: Sequence[Spans], targets: Sequence[Spans], shards: Shards
) -> list[Tensor]:
    """Give rows of several tensors to the ranks that are to have them, in one all-to-all.

    Args:
        tensors: this rank's rows of each, all of one dtype.
        sources: which rows of each every rank has; no two ranks the same.
        targets: which rows every rank is to have.

    Returns:
        This rank's rows by `targets`.
    """
    if shards.world == 1:
        return list(tensors)
    me, ranks, places = shards.rank, range(shards.world), range(len(tensors))
    outgoing = [
        [
            _rows(tensors[i], sources[i][me], targets[i][rank]).reshape(-1)
            for i in places
            if _overlap(sources[i][me], targets[i][rank])
        ]
        for rank in ranks
    ]
    counts = [
        [_overlap(sources[i][rank], targets[i][me]) * _row(tensors[i]) for i in places]
        for rank in ranks
    ]
    flat = torch.cat([tensors[0].new_empty(0), *itertools.chain(*outgoing)])
    leaving = [sum(t.numel() for t in those) for those in outgoing]
    arrived = _exchange(flat, leaving, [sum(those) for those in counts], shards)
    parts = arrived.split([count for those in counts for count in those])
    # The rows of a tensor come in the order of the ranks, which is theirs.
    return [torch.cat(parts[i :: len(tensors)]).reshape(-1, *tensors[i].shape[1:]) for i in places]


def _exchange(flat: Tensor, leaving: list[int], arriving: list[int], shards: Shards) -> Tensor:
    """One after the other, so many elements for every rank, and so many from every rank."""
    arrived = flat.new_empty(sum(arriving))
    size = flat.element_size()
    # As bytes: neither gloo nor NCCL takes int16.
    dist.all_to_all_single(
        arrived.view(torch.uint8),
        flat.view(torch.uint8),
        [size * count for count in arriving],
        [size * count for count in leaving],
        group=shards.group,
    )
    return arrived


def _row(t: Tensor) -> int:
    """Elements of a row."""
    return math.prod(t.shape[1:])


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    """How many rows two spans share."""
    return max(min(a[1], b[1]) - max(a[0], b[0]), 0)


def _rows(t: Tensor, have: tuple[int, int], want: tuple[int, int]) -> Tensor:
    """Of the rows that t has, those of a span that it shares."""
    first = max(have[0], want[0]) - have[0]
    return t[first : first + _overlap(have, want)]


class ShardedBank(MuonBank):
    """Matrices of one kind whose parameters are DTensors.

    Their rows on this process, and those of the state, stand one below the other, (R, n). Matrix k
    is orthogonalised by rank k modulo the number of ranks. Lanes are on every process.

    Args:
        members: the matrices.
        options: of the optimizer.
    """

    def __init__(self, members: Sequence[Member], options: Options):
        self.members, self.options = list(members), options
        self.shards = Shards.of(members[0].parameter)
        self.shape = (len(members), *members[0].piece.shape)
        self.spans = [self.shards.spans(m.piece, len(m.parameter)) for m in members]
        weights = [member.weight for member in members]
        self.counts = [len(weight) for weight in weights]
        self.ends = [0, *itertools.accumulate(self.counts)]
        like = {"device": weights[0].device, "dtype": wide(weights[0].dtype)}
        rows = (self.ends[-1], self.shape[2])
        self.fast = torch.zeros(rows, **like)
        self.slow = None if options.rails is None else torch.zeros(rows, **like)
        lanes = (len(members), max(self.shape[1:]))
        self.lanes = None if options.equalize is None else torch.zeros(lanes, **like)
        bits = {"device": like["device"], "dtype": torch.int16}
        self.low = torch.zeros(rows, **bits) if options.extra_bits else None
        repeats = torch.tensor(self.counts, device=like["device"])
        self.lr_mul, self.decay_mul, self.follows, self.own_decay = (
            t[:, 0].repeat_interleave(repeats, 0) for t in self.factors(like)
        )

    @property
    def skips(self) -> bool:
        """Rows of several heights are in no kernel's reach."""
        return False

    @property
    def limit(self) -> int:
        """How many matrices are worked on at a time, by all processes together."""
        return self.shards.world * super().limit

    def states(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """Every member with its state by name, as views of this process's rows."""
        named = {"momentum": self.fast, "slow": self.slow, "low": self.low}
        named = {name: t.split(self.counts) for name, t in named.items() if t is not None}
        if self.lanes is not None:
            named["lanes"] = self.lanes.unbind()
        for i, member in enumerate(self.members):
            yield member, {name: those[i] for name, those in named.items()}

    def step(self, gradients: Gradients, numbers: Numbers) -> None:
        """Update the matrices that have a gradient, which are the same ones on every process."""
        for part, grads in self.parts(gradients):
            rows = slice(self.ends[part.start], self.ends[part.stop])
            u = self.together(part, self.average(rows, torch.cat(grads), numbers))
            weights = [member.weight for member in self.members[part]]
            w = self.changed(rows, torch.cat(weights), u, numbers)
            torch._foreach_copy_(weights, list(w.split(self.counts[part])))

    def together(self, part: slice, u: Tensor) -> Tensor:
        """The rows here of the orthogonal updates of u, which their matrices' owners work out."""
        spans, homes = self.spans[part], self._homes(part, self.shape[1])
        dtype = product_dtype(u, self.options.dtype)
        # The products round u to bfloat16 first of all, unless its rows are scaled before.
        early = dtype == torch.bfloat16 and not self.options.row_equalize
        sent = (u.to(dtype) if early else u).split(self.counts[part])
        whole = [t for t in move(sent, spans, homes, self.shards) if len(t)]
        done = u.new_empty(0, *self.shape[1:], dtype=dtype if self.lanes is None else u.dtype)
        if whole:
            first = part.start + (self.shards.rank - part.start) % self.shards.world
            mine = slice(first, part.stop, self.shards.world)
            done = self.equalized(mine, self.orthogonal(torch.stack(whole)))
        none, own = done.new_empty(0, self.shape[2]), iter(done)
        rows = [next(own) if home[self.shards.rank][1] else none for home in homes]
        if self.lanes is None:
            return torch.cat(move(rows, homes, spans, self.shards))
        # Owners' lanes go with the rows, to all.
        lanes = self.lanes[part]
        count, size = lanes.shape
        sources = [*homes, *self._homes(part, size)]
        targets = [*spans, *[[(0, size)] * self.shards.world] * count]
        moved = move([*rows, *lanes], sources, targets, self.shards)
        lanes.copy_(torch.stack(moved[count:]))
        return torch.cat(moved[:count])

    def _homes(self, part: slice, rows: int) -> list[Spans]:
        """Spans that have all rows at the owner."""
        ranks = range(self.shards.world)
        return [
            [(0, rows if k % self.shards.world == rank else 0) for rank in ranks]
            for k in range(part.start, part.stop)
        ]


def spread_state(
    parameter: DTensor, pieces: Iterable[Piece], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A parameter's state as DTensors with its mesh and placements, which checkpoints can hold.

    The rows of a block are spread as if it was a parameter of its own. Every process calls it.
    """
    shards, spread = Shards.of(parameter), dict(state)
    for key, piece in _keys_of_rows(pieces, state):
        t = state[key]
        if piece.label:
            spans = shards.spans(piece, len(parameter))
            (t,) = move([t], [spans], [shards.chunks(piece.shape[0])], shards)
        spread[key] = DTensor.from_local(
            t,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=torch.Size(piece.shape),
            stride=torch.empty(piece.shape, device="meta").stride(),
        )
    return spread


def local_state(
    parameter: DTensor, pieces: Iterable[Piece], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """The rows on this process of a parameter's saved state, which is of DTensors or whole tensors.

    Every process calls it, with tensors of the same kinds.
    """
    shards, own = Shards.of(parameter), dict(saved)
    for key, piece in _keys_of_rows(pieces, saved):
        value, spans = saved[key], shards.spans(piece, len(parameter))
        if tuple(value.shape) != piece.shape:
            raise ValueError(
                f"the state {key} of {piece.name} has shape {tuple(value.shape)}, expected "
                f"{piece.shape}"
            )
        if not isinstance(value, DTensor):
            first, last = spans[shards.rank]
            own[key] = value[first:last]
            continue
        t = value.to(parameter.device)
        if t.placements != parameter.placements or t.device_mesh != parameter.device_mesh:
            t = t.redistribute(parameter.device_mesh, parameter.placements)
        own[key] = t.to_local()
        if piece.label:
            (own[key],) = move([own[key]], [shards.chunks(len(value))], [spans], shards)
    return own


def _keys_of_rows(pieces: Iterable[Piece], state: Mapping[str, Any]) -> Iterator[tuple[str, Piece]]:
    """The keys of state that has a piece's rows, with the piece."""
    by_label = {piece.label: piece for piece in pieces}
    for key in state:
        label, _, name = key.rpartition(".")
        if name not in WHOLE and label in by_label:
            yield key, by_label[label]


def everywhere(finite: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Whether something is true on every process of these parameters' meshes."""
    spread = [p for p in parameters if is_dtensor(p)]
    agreed = finite.to(spread[0].device, torch.float32)
    # In the order of the parameters, which is the same on every process.
    for mesh in dict.fromkeys(p.device_mesh for p in spread):
        for dim in range(mesh.ndim):
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=mesh.get_group(dim))
    return agreed > 0
