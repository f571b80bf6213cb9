"""The hybrid optimizer on many ranks: work shared out next to DDP, or gradients and state too.

Two modes. `Replicated`: DDP averages the gradients, all state is on every rank, and only the
orthogonalisation is shared out. `Sharded`: the optimizer averages the gradients itself; a rank has
the state of its share of every bank of matrices, and steps that alone:

    local gradients --reduce-scatter--> a share's --step--> its weights --all-gather--> parameters

These are the bytes of an all-reduce, for 1/N of the work and of the state. AdamW's pieces are
small: they are stepped by every rank, after one all-reduce for each dtype. A label names what is
exchanged at a time: a bank, "adamw", a sparse table.

Every rank launches the same collectives in the same order, whatever gradients it has.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .adamw import AdamWList
from .banks import MuonBank, make_bank
from .exchange import BankShare, Flat, Found, Question, Ranks, Rows
from .pieces import Gradients, Member, Numbers, Options, is_dtensor, norms, own_gradient

# The label of AdamW's pieces that are no sparse tables.
SMALL = "adamw"

# What is stepped, with the number of its parameter group.
Works = Sequence[tuple[int, Any]]


@dataclass(frozen=True)
class Replicated:
    """Next to DDP: gradients and state are the same on every rank, orthogonalisations are shared.

    Args:
        group: process group; None is the default one.

    State is as in one process, on every rank. Updates travel in the dtype of the
    orthogonalisation, those of one part of a bank while the next is worked on.
    """

    group: Any = None


@dataclass(frozen=True)
class Sharded:
    """In place of DDP: every rank has gradients of its own batch, and state of its share.

    Args:
        group: process group; None is the default one.
        scatter_order: labels in the order in which reductions are launched; None is large banks
            first, then "adamw" and the sparse tables.
        work_order: labels in the order in which they are waited for, stepped, and their gathers
            launched; None is the order of the reductions, so that none is waited for longer than
            it must be (2 H200s: 46 ms a step, 50 with small banks first).
        deferred: banks whose gathers the next forward waits for, in place of `step()`.
        sparse: embeddings whose gradients are zero but for a few rows: only rows that some rank
            has are exchanged. Their step is that of any other.
        overlap: launch a bank's reduction in the backward, as soon as its gradients are there.
            For one backward a step, without clipping between them.
        max_norm: largest norm of all averaged gradients together; larger ones are scaled down to
            it, as `clip_grad_norm_` would do. No bank is stepped before all have arrived.

    Labels are `HybridOptimizer.bank_labels`, "adamw", and the names in `sparse`. An order holds
    each of them once.

    The loss is the mean over a rank's batch: gradients are averaged over ranks, and one that a rank
    lacks counts as zero. Weights must be equal at the start. A step needs memory for a copy of the
    banks' gradients. `state_dict()` is to be called by all ranks; it is that of one process, and
    loads on any number of ranks.

    What is deferred is waited for by the forward of the modules that own the weights, by their
    `state_dict()` and `load_state_dict()`, and by `HybridOptimizer.wait()`, for those who read
    parameters otherwise, and before a compiled forward.
    """

    group: Any = None
    scatter_order: Sequence[str] | None = None
    work_order: Sequence[str] | None = None
    deferred: Sequence[str] = ()
    sparse: Sequence[str] = ()
    overlap: bool = False
    max_norm: float | None = None


def distribution(distributed: Replicated | Sharded | None, model: Any) -> Alone:
    """The mode for a setting.

    Raises:
        TypeError: it is no such setting.
        RuntimeError: there is no process group.
    """
    if distributed is None:
        return Alone()
    if not isinstance(distributed, Replicated | Sharded):
        raise TypeError(f"distributed is Replicated(), Sharded() or None, got {distributed!r}")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{type(distributed).__name__} needs a process group: start the script by "
            "`torchrun --nproc-per-node=N script.py`, and call "
            "torch.distributed.init_process_group() before the optimizer is made"
        )
    ranks = Ranks(
        distributed.group, dist.get_rank(distributed.group), dist.get_world_size(distributed.group)
    )
    if isinstance(distributed, Replicated):
        return Replicas(ranks)
    return Shares(ranks, distributed, model if isinstance(model, nn.Module) else None)


def bank_labels(banks: Iterable[Any]) -> list[str]:
    """A name for every bank, such as "24x2048x4096", and "24x2048x4096#2" for another one."""
    seen: Counter = Counter()
    labels = []
    for bank in banks:
        label = "x".join(map(str, (len(bank.members), *bank.members[0].piece.shape)))
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label}#{seen[label]}")
    return labels


class Alone:
    """One process: what the modes change.

    norm: of the averaged gradients, where the mode clips them.
    recordable: whether the host need not know what a step exchanges.
    clips: whether the mode clips the gradients, and so sees whether they are finite.
    """

    norm: Tensor | None = None
    recordable, clips = True, False

    def bank(self, members: Sequence[Member], options: Options) -> Any:
        """What steps these matrices."""
        return make_bank(members, options)

    def label(self, member: Member) -> str:
        """Of AdamW's pieces, those of one label are stepped together."""
        return SMALL

    def plan(self, works: Works) -> None:
        """Look at what there is to step; a ValueError where the setting does not fit it."""

    def begin(self, works: Works, local: Gradients, finite: Tensor | None) -> Tensor | None:
        """Take this rank's gradients up; whether all ranks' are finite, if it is known.

        `finite`: whether this rank's are; None if that is not asked, or for the mode to see.
        """
        return finite

    def gradients(self, local: Gradients) -> Gradients:
        """What to step with: this rank's gradients, or what has become of them."""
        return local

    def ordered(self, works: Works) -> Works:
        """In the order of their steps."""
        return works

    def end(self) -> None:
        """All have been stepped, or the step is left out."""

    def wait(self) -> None:
        """Bring parameters up to date."""

    def gathered(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """The state of the members of whom this rank may have none."""
        yield from ()

    def elsewhere(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """Members whose state is on other ranks, with tensors of the meta device in its place."""
        yield from ()


# next to DDP

# A gather, and what to do once it is done.
Pending = tuple[Any, Callable[[], None]]


class Replicas(Alone):
    """Of every part of a bank, each rank orthogonalises a share."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.pending: Pending | None = None

    def bank(self, members: Sequence[Member], options: Options) -> MuonBank:
        _check_plain(members)
        return ReplicatedBank(members, options, self)

    def end(self) -> None:
        self.push(None)

    def push(self, pending: Pending | None) -> None:
        """Finish what was launched before; by now the device has work to do meanwhile."""
        before, self.pending = self.pending, pending
        if before is not None:
            before[0].wait()
            before[1]()


class ReplicatedBank(MuonBank):
    """A bank whose orthogonal updates come from all ranks."""

    def __init__(self, members: Sequence[Member], options: Options, mode: Replicas):
        super().__init__(members, options)
        self.mode = mode

    @property
    def skips(self) -> bool:
        return self.on_kernels

    def step(self, gradients: Gradients, numbers: Numbers) -> None:
        for part, grads in self.parts(gradients):
            self.mode.push(self._launch(part, grads, numbers))

    def _launch(self, part: slice, grads: Sequence[Tensor], numbers: Numbers) -> Pending:
        ranks, count = self.mode.ranks, len(grads)
        u, norm = self.momentum_and_norm(part, grads, numbers)
        norm = None if norm is None else ranks.padded(norm)
        mine = self.orthogonal(ranks.padded(u), norm).contiguous()
        buffer = mine.new_empty(ranks.world * len(mine), *mine.shape[1:])

        def apply() -> None:
            self.finish(part, buffer[:count], numbers)

        return ranks.gather_rows(buffer, mine), apply


# in place of DDP


class Shares(Alone):
    """The schedule: labels, each with what is exchanged under it, and two orders of them."""

    def __init__(self, ranks: Ranks, setting: Sharded, model: nn.Module | None):
        self.ranks, self.setting = ranks, setting
        self.banks: dict[str, BankShare] = {}
        self.slots: dict[str, Any] = {}
        self.scatter_order: list[str] = []
        self.work_order: list[str] = []
        self._question: Question | None = None
        self._made: list[BankShare] = []
        self._planned = 0
        self._labels: dict[int, str] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        for module in () if model is None else model.modules():
            for parameter in module._parameters.values():
                self._owners.setdefault(id(parameter), []).append(module)

    def bank(self, members: Sequence[Member], options: Options) -> BankShare:
        _check_plain(members)
        share = BankShare(members, options, self.ranks)
        self._made.append(share)
        return share

    def label(self, member: Member) -> str:
        title = member.piece.title
        return title if title in self.setting.sparse else SMALL

    @property
    def recordable(self) -> bool:
        """Not where rows are counted, or where steps wait for what was launched before them."""
        return not (self.setting.sparse or self.setting.deferred)

    @property
    def clips(self) -> bool:
        return self.setting.max_norm is not None

    # the schedule

    def plan(self, works: Works) -> None:
        setting = self.setting
        small = [m for _, those in works if isinstance(those, AdamWList) for m in those.members]
        banks = dict(zip(bank_labels(self._made), self._made, strict=True))
        tables = {self.label(m): Rows(m, self.ranks) for m in small if self.label(m) != SMALL}
        rest = Flat([m for m in small if self.label(m) == SMALL], self.ranks)
        _check_sparse(setting.sparse, tables, small)
        self.slots = {**banks, SMALL: rest, **tables}
        large_first = sorted(banks, key=lambda label: -math.prod(banks[label].shape))
        others = [SMALL, *tables]
        self.scatter_order = self._order("scatter_order", [*large_first, *others])
        self.work_order = self._order("work_order", self.scatter_order)
        unknown = [label for label in setting.deferred if label not in banks]
        if unknown:
            raise ValueError(
                f"deferred: {', '.join(unknown)} is no bank; banks are {', '.join(banks)}"
            )
        for label, bank in banks.items():
            if label in self.banks:
                continue
            if label in setting.deferred:
                self._wait_before_reads(label, bank)
            if setting.overlap:
                self._launch_when_complete(bank)
        self.banks, self._planned = banks, len(works)
        self._labels = {id(m): label for label, slot in self.slots.items() for m in slot.members}
        self._check_equal([m for _, those in works for m in those.members])

    def _order(self, name: str, default: list[str]) -> list[str]:
        given = getattr(self.setting, name)
        if given is None:
            return default
        counts = Counter(given)
        faults = {
            "missing": [label for label in default if not counts[label]],
            "more than once": [label for label, count in counts.items() if count > 1],
            "unknown": [label for label in counts if label not in default],
        }
        found = [f"{what}: {', '.join(labels)}" for what, labels in faults.items() if labels]
        if found:
            raise ValueError(
                f"{name} must hold each label once; {'; '.join(found)}. The labels are "
                f"{', '.join(default)}"
            )
        return list(given)

    def _wait_before_reads(self, label: str, bank: BankShare) -> None:
        """Have the modules that own a bank's weights wait for its gather."""
        for member in bank.members:
            if id(member.parameter) not in self._owners:
                raise ValueError(
                    f"deferred: no module is known to own {member.piece.title}, of {label}: give "
                    "the optimizer the model, or leave the label out"
                )
            for module in self._owners.pop(id(member.parameter)):
                bank.gather.before_reads(module)

    def _check_equal(self, members: list[Member]) -> None:
        """Raise a ValueError where ranks have other weights: they would go on with these."""
        sums = torch.stack([m.weight.detach().sum(dtype=torch.float64) for m in members])
        ends = torch.stack([sums, -sums])
        self.ranks.largest(ends).wait()
        equal = torch.isclose(ends[0], -ends[1], equal_nan=True).tolist()
        if not all(equal):
            raise ValueError(
                f"the weights of {members[equal.index(False)].piece.title} differ between ranks: "
                "make the model with the same seed everywhere, or load one checkpoint"
            )

    # a step

    def begin(self, works: Works, local: Gradients, finite: Tensor | None) -> Tensor | None:
        self.wait()
        if len(works) != self._planned:
            self.plan(works)
        members = [m for _, those in works for m in those.members]
        found = {id(m): local(m) for m in members}
        order = self.scatter_order
        if self.setting.overlap:  # what the backward did not launch, in the order it would have
            banks = [label for label in order if label in self.banks]
            self._launch(banks, found)
            order = [label for label in order if label not in self.banks]
        tables = [m for slot in self.slots.values() if isinstance(slot, Rows) for m in slot.members]
        before = self._question
        self._question = Question(members, found, finite, tables, self.ranks, before)
        self._launch(order, found)
        if self.clips:
            self._clip(self.setting.max_norm)
            return torch.isfinite(self.norm)
        return None if finite is None else self._question.finite

    def _clip(self, max_norm: float) -> None:
        own = [bank.averaged() for bank in self.banks.values()]
        others = [slot for label, slot in self.slots.items() if label not in self.banks]
        shared = [t for slot in others for t in slot.averaged()]
        device = (own or shared)[0].device
        square = _square(own, device)
        self.ranks.sum(square).wait()
        self.norm = (square + _square(shared, device)).sqrt()
        torch._foreach_mul_([*own, *shared], (max_norm / (self.norm + 1e-6)).clamp(max=1.0))

    def gradients(self, local: Gradients) -> Gradients:
        return self._averaged

    def ordered(self, works: Works) -> Works:
        place = {label: i for i, label in enumerate(self.work_order)}
        return sorted(works, key=lambda work: place[self._labels[id(work[1].members[0])]])

    def end(self) -> None:
        for label in self.work_order:
            if label in self.banks and label not in self.setting.deferred:
                self.banks[label].gather.finish()
        for slot in self.slots.values():
            slot.drop()

    def wait(self) -> None:
        for bank in self.banks.values():
            bank.gather.finish()

    def _launch(self, labels: Iterable[str], found: Found) -> None:
        for label in labels:
            if not self.slots[label].launched:
                self.slots[label].launch(found, self._question)

    def _averaged(self, member: Member) -> Tensor | None:
        """A member's gradient, averaged; None where no rank has one."""
        if id(member) not in self._question.answer.present:
            return None
        return self.slots[self._labels[id(member)]].gradient(member)

    # reductions in the backward

    def _launch_when_complete(self, bank: BankShare) -> None:
        this = weakref.ref(self)  # parameters keep their hooks longer than optimizers live

        def arrived(parameter: Tensor) -> None:
            if (mode := this()) is not None:
                mode._arrived(bank_of(), parameter)

        bank_of = weakref.ref(bank)
        for parameter in {id(m.parameter): m.parameter for m in bank.members}.values():
            parameter.register_post_accumulate_grad_hook(arrived)

    @torch.no_grad()
    def _arrived(self, bank: BankShare, parameter: Tensor) -> None:
        if bank.launched:
            raise RuntimeError(
                "a gradient arrived after its reduction was launched: Sharded(overlap=True) is for "
                "one backward before every step. Leave overlap out to accumulate gradients"
            )
        bank.arrived.add(id(parameter))
        for label in self.scatter_order:
            bank = self.banks.get(label)
            if bank is None or bank.launched:
                continue
            if not bank.complete:
                return
            bank.launch({id(m): own_gradient(m) for m in bank.members})

    # state

    def gathered(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        for bank in self.banks.values():
            yield from bank.gathered()

    def elsewhere(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        for bank in self.banks.values():
            yield from bank.elsewhere()


def _square(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all elements, at least in float32."""
    return norms(tensors).square().sum() if tensors else torch.zeros((), device=device)


def _check_plain(members: Sequence[Member]) -> None:
    if any(is_dtensor(member.parameter) for member in members):
        raise ValueError(
            f"{members[0].piece.title} is a DTensor, spread over ranks already: leave distributed "
            "out"
        )


def _check_sparse(names: Sequence[str], tables: dict[str, Rows], members: list[Member]) -> None:
    """Raise a ValueError for names that are no tables which AdamW trains."""
    known = {m.piece.title for m in members if m.weight.dim() > 1}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"sparse: AdamW trains no table {', '.join(unknown)}; what it trains that has rows: "
            f"{', '.join(sorted(known)) or 'nothing'}"
        )
