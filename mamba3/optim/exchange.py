"""What ranks exchange in a step of the sharded optimizer: one class for each kind of label.

A slot launches a reduction of local gradients, gives a member's averaged one, and drops its
buffers:

    launch(found, agreed)    averaged()    gradient(member)    drop()    launched    members

    code        meaning                                                 shape
    found       a rank's own gradients, or None, by the id of a member
    buffer      a bank's gradients, then its weights                    (ranks * each, m, n)
    mine        the rows of this rank, in place                         (each, m, n)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops.recording import capturing
from .banks import MuonBank
from .pieces import Gradients, Member, Numbers, Options

Found = Mapping[int, Tensor | None]


class Ranks(NamedTuple):
    """A process group seen from a rank; collectives return what is to be waited for."""

    group: Any
    rank: int
    world: int

    def share(self, count: int) -> tuple[int, slice]:
        """How many of `count` rows each rank has, padding included; those of this rank."""
        each = -(-count // self.world)
        return each, slice(self.rank * each, (self.rank + 1) * each)

    def padded(self, t: Tensor) -> Tensor:
        """This rank's rows of t, with zeros for padding."""
        each, rows = self.share(len(t))
        t = t[rows]
        return t if len(t) == each else torch.cat([t, t.new_zeros(each - len(t), *t.shape[1:])])

    def sum(self, t: Tensor) -> dist.Work:
        """Sums of all ranks, in place."""
        return dist.all_reduce(t, dist.ReduceOp.SUM, self.group, async_op=True)

    def mean(self, t: Tensor) -> Mean:
        """Means of all ranks, in place."""
        return Mean(dist.all_reduce(t, self._adds, self.group, async_op=True), t, self)

    def largest(self, t: Tensor) -> dist.Work:
        """The largest of all ranks, in place."""
        return dist.all_reduce(t, dist.ReduceOp.MAX, self.group, async_op=True)

    def mean_rows(self, mine: Tensor, buffer: Tensor) -> Mean:
        """Means of all ranks' buffers, of each the rows of the rank that has them."""
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Mean(call(mine, buffer, self._adds, self.group, async_op=True), mine, self)

    def gather_rows(self, buffer: Tensor, mine: Tensor) -> dist.Work:
        """All ranks' rows, as bytes: gloo does not know every dtype."""
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        byte = torch.uint8
        return call(buffer.view(byte), mine.view(byte), group=self.group, async_op=True)

    @property
    def divides(self) -> bool:
        """Whether the backend makes means, not sums alone."""
        return dist.get_backend(self.group) == "nccl"

    @property
    def _adds(self) -> Any:
        return dist.ReduceOp.AVG if self.divides else dist.ReduceOp.SUM


class Mean:
    """A mean that is on its way, to a tensor."""

    def __init__(self, work: dist.Work, t: Tensor, ranks: Ranks):
        self._work, self._t, self._ranks = work, t, ranks

    def wait(self) -> None:
        """Have what comes next wait for it; only once."""
        self._work.wait()
        if not self._ranks.divides:
            self._t.div_(self._ranks.world)


# Elements that a tensor's place in a buffer is rounded up to, so that all begin at 256 bytes.
ALIGNED = 128


def packed(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Tensors in one buffer, and views of it; what is between them is not written."""
    buffer = tensors[0].new_empty(sum(_places(tensors)), dtype=dtype)
    views = unpacked(buffer, tensors)
    torch._foreach_copy_(views, list(tensors))
    return buffer, views


def unpacked(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer, of these tensors' shapes, as `packed` has placed them."""
    parts = zip(buffer.split(_places(tensors)), tensors, strict=True)
    return [part[: t.numel()].view(t.shape) for part, t in parts]


def _places(tensors: Iterable[Tensor]) -> list[int]:
    """Elements of a buffer that each takes."""
    return [-(-t.numel() // ALIGNED) * ALIGNED for t in tensors]


class Agreed(NamedTuple):
    """What the hosts of all ranks know of a step.

    Fields:
        present: ids of the members of which some rank has a gradient.
        rows: the rows that some rank has of a sparse table, by the id of its member.
    """

    present: frozenset[int]
    rows: Mapping[int, Tensor]


class Question:
    """Asks all ranks, in one reduction of bytes, what they have.

    Args:
        members: all of them.
        found: this rank's gradients.
        finite: whether these are, of no dimension; None does not ask.
        tables: the members that are sparse tables.
        before: the question of the step before, whose answer is taken where steps are recorded, and
            the host cannot wait for one. The ranks are asked all the same, so that those that
            record and those that do not, or not yet, launch the same.

    Raises:
        RuntimeError: this step is recorded, and the one before was no such step.
    """

    def __init__(
        self, members: Sequence[Member], found: Found, finite: Tensor | None,
        tables: Sequence[Member], ranks: Ranks, before: Question | None = None,
    ):  # fmt: skip
        device, byte = members[0].weight.device, torch.uint8
        self._members, self._tables = members, tables
        self._here = [found[id(m)] is not None for m in members]
        same = before is not None and before._here == self._here
        if capturing(device):
            if not same or tables:
                raise RuntimeError(
                    "a sharded step can be recorded after one that ran with the same gradients, "
                    "and without `sparse`"
                )
            self.answer = before.answer
        # Copies from the host cannot be recorded.
        self._facts = before._facts if same else torch.tensor(self._here, dtype=byte, device=device)
        bad = torch.zeros(1, device=device) if finite is None else ~finite.reshape(1)
        asked = [self._facts, bad.to(device, byte)]
        for member in tables:
            grad = found[id(member)]
            if grad is None:
                asked.append(torch.zeros(len(member.weight), dtype=byte, device=device))
            else:
                asked.append(grad.ne(0).flatten(1).any(1).to(byte))  # NaN is not zero
        self._bytes = torch.cat(asked)
        self._work = ranks.largest(self._bytes)

    @property
    def finite(self) -> Tensor:
        """Whether all gradients are, on all ranks; of no dimension, on the device."""
        return self._reduced[len(self._members)] == 0

    @cached_property
    def answer(self) -> Agreed:
        """Waited for by the host, which is to know whom to step."""
        lengths = [len(self._members), 1, *map(_rows, self._tables)]
        here, _, *masks = self._reduced.split(lengths)
        pairs = zip(self._members, here.tolist(), strict=True)
        rows = {id(m): mask.bool() for m, mask in zip(self._tables, masks, strict=True)}
        return Agreed(frozenset(id(m) for m, yes in pairs if yes), rows)

    @cached_property
    def _reduced(self) -> Tensor:
        self._work.wait()
        return self._bytes


def _rows(member: Member) -> int:
    return len(member.weight)


class Flat:
    """Small gradients: one all-reduce for each dtype and device."""

    def __init__(self, members: Sequence[Member], ranks: Ranks):
        self.members, self._ranks = list(members), ranks
        self._sent: list[tuple[list[Member], list[Tensor], Mean]] = []
        self._averaged: dict[int, Tensor] = {}
        self.launched = False

    def launch(self, found: Found, question: Question) -> None:
        """Only what some rank has."""
        self.launched = True
        kinds: dict[tuple, list[Member]] = {}
        for member in self.members:
            if id(member) in question.answer.present:
                weight = member.weight
                kinds.setdefault((weight.dtype, weight.device), []).append(member)
        for members in kinds.values():
            gradients = [_gradient_or_zeros(m, found) for m in members]
            buffer, views = packed(gradients, gradients[0].dtype)
            self._sent.append((members, views, self._ranks.mean(buffer)))

    def averaged(self) -> list[Tensor]:
        """What all ranks have the same of."""
        for members, views, work in self._sent:
            work.wait()
            self._averaged.update(zip(map(id, members), views, strict=True))
        self._sent.clear()
        return list(self._averaged.values())

    def gradient(self, member: Member) -> Tensor:
        """A member's averaged gradient."""
        self.averaged()
        return self._averaged[id(member)]

    def drop(self) -> None:
        """Forget the gradients."""
        for _, _, work in self._sent:
            work.wait()
        self._sent.clear()
        self._averaged.clear()
        self.launched = False


class Rows:
    """A table's gradient, of which the rows that some rank has are exchanged."""

    def __init__(self, member: Member, ranks: Ranks):
        self.members, self._ranks = [member], ranks
        self._sent: tuple[Tensor, Tensor, Mean] | None = None
        self._averaged: Tensor | None = None
        self.launched = False

    def launch(self, found: Found, question: Question) -> None:
        """Rows by their numbers, which are the same on every rank."""
        self.launched = True
        (member,) = self.members
        mask = question.answer.rows[id(member)]
        if id(member) in question.answer.present:
            ids = mask.nonzero().squeeze(1)
            rows = _gradient_or_zeros(member, found)[ids]
            self._sent = ids, rows, self._ranks.mean(rows)

    def averaged(self) -> list[Tensor]:
        """What all ranks have the same of."""
        if self._sent is not None:
            ids, rows, work = self._sent
            work.wait()
            self._averaged = rows.new_zeros(self.members[0].weight.shape)
            self._averaged[ids] = rows
            self._sent = None
        return [] if self._averaged is None else [self._averaged]

    def gradient(self, member: Member) -> Tensor:
        """The averaged gradient, of the table's shape."""
        self.averaged()
        return self._averaged

    def drop(self) -> None:
        """Forget the gradient."""
        if self._sent is not None:
            self._sent[2].wait()
        self._sent = self._averaged = None
        self.launched = False


class BankShare:
    """A bank of which this rank steps a share, and has the state of that alone.

    The matrices are those of one process, in their order, with zeros after them up to a multiple of
    the number of ranks.
    """

    def __init__(self, members: Sequence[Member], options: Options, ranks: Ranks):
        self.members, self._ranks = list(members), ranks
        each, self.mine = ranks.share(len(members))
        piece, weight = members[0].piece, members[0].weight
        padding = Member(replace(piece, label=""), torch.zeros_like(weight))
        padded = [*members, *[padding] * (each * ranks.world - len(members))]
        self._bank = MuonBank(padded[self.mine], options)
        self.shape = (len(padded), *weight.shape)
        self.gather = Gather(self.members, self.mine)
        self.arrived: set[int] = set()
        self._buffer: Tensor | None = None
        self._work: Mean | None = None

    @property
    def device(self) -> torch.device:
        """Where the matrices are."""
        return self._bank.device

    @property
    def skips(self) -> bool:
        """Whether steps heed `Numbers.skip`."""
        return self._bank.skips

    @property
    def own(self) -> list[Member]:
        """The matrices of this rank."""
        return self.members[self.mine]

    @property
    def launched(self) -> bool:
        """Whether gradients are on their way, or here."""
        return self._buffer is not None

    @property
    def complete(self) -> bool:
        """Whether all gradients of a backward have arrived."""
        return self.arrived == {id(member.parameter) for member in self.members}

    def launch(self, found: Found, question: Question | None = None) -> None:
        """Average all ranks' gradients, each rank its share."""
        weight = self.members[0].weight
        self._buffer = weight.new_empty(self.shape)
        grads = [found[id(member)] for member in self.members]
        rows = list(self._buffer.unbind())
        present = [i for i, grad in enumerate(grads) if grad is not None]
        absent = [row for i, row in enumerate(rows) if i not in present]
        if absent:
            torch._foreach_zero_(absent)
        if present:
            torch._foreach_copy_([rows[i] for i in present], [grads[i] for i in present])
        self._work = self._ranks.mean_rows(self._buffer[self.mine], self._buffer)

    def averaged(self) -> Tensor:
        """The gradients of this rank's share, and zeros for padding."""
        self._settle()
        return self._buffer[self.mine]

    def gradient(self, member: Member) -> Tensor:
        """A member's averaged gradient; the member is one of this rank's."""
        self.averaged()
        return self._buffer[self._place[id(member)]]

    @cached_property
    def _place(self) -> dict[int, int]:
        return {id(member): i for i, member in enumerate(self.members)}

    def step(self, gradients: Gradients, numbers: Numbers) -> None:
        """Step this rank's share, and launch the gather of the weights."""
        self._bank.step(gradients, numbers)
        self._settle()
        buffer, self._buffer = self._buffer, None
        mine = buffer[self.mine]
        weights = [member.weight for member in self.own]
        if weights:
            torch._foreach_copy_(list(mine[: len(weights)].unbind()), weights)
        self.gather.launch(buffer, self._ranks.gather_rows(buffer, mine))
        self.arrived.clear()

    def drop(self) -> None:
        """Forget the gradients."""
        self._settle()
        self._buffer = None
        self.arrived.clear()

    def _settle(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    # state

    def states(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """This rank's members with their state by name."""
        for (_, state), member in zip(self._bank.states(), self.own, strict=False):
            yield member, state

    def gathered(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """All members with their state, which all ranks must ask for."""
        states = [state for _, state in self._bank.states()]
        whole = {}
        for name, tensor in states[0].items():
            mine = torch.stack([state[name] for state in states])
            whole[name] = mine.new_empty(self.shape[0], *tensor.shape)
            self._ranks.gather_rows(whole[name], mine).wait()
        for i, member in enumerate(self.members):
            yield member, {name: tensor[i].clone() for name, tensor in whole.items()}

    def elsewhere(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """Other ranks' members, with tensors of the meta device for their state."""
        _, state = next(self._bank.states())
        own = set(map(id, self.own))
        for member in self.members:
            if id(member) not in own:
                yield (
                    member,
                    {name: torch.empty_like(t, device="meta") for name, t in state.items()},
                )


class Gather:
    """Weights on their way from the ranks that stepped them; knows nothing of the bank's state."""

    def __init__(self, members: Sequence[Member], mine: slice):
        self._others = [*enumerate(members)]
        del self._others[mine]
        self._sent: tuple[Tensor, dist.Work] | None = None

    def before_reads(self, module: nn.Module) -> None:
        """Have the module that owns weights wait for them."""
        module.register_forward_pre_hook(self.finish)
        module.register_state_dict_pre_hook(self.finish)
        module.register_load_state_dict_pre_hook(self.finish)

    def launch(self, buffer: Tensor, work: dist.Work) -> None:
        """`buffer` will have the weights, once `work` is done."""
        self._sent = buffer, work

    @torch.no_grad()
    def finish(self, *_: Any) -> None:
        """Wait, and write other ranks' matrices; takes what hooks of modules are called with."""
        if self._sent is None:
            return
        buffer, work = self._sent
        self._sent = None
        work.wait()
        if self._others:
            weights = [member.weight for _, member in self._others]
            torch._foreach_copy_(weights, [buffer[i] for i, _ in self._others])


def _gradient_or_zeros(member: Member, found: Found) -> Tensor:
    grad = found[id(member)]
    return torch.zeros_like(member.weight) if grad is None else grad.to(member.weight.dtype)
