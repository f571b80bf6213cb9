"""HybridOptimizer: Muon for matrices and AdamW for the rest, as one torch optimizer.

    V  <- V + (1 - mu)(g - V),   u = g + mu (V - g),   O = orthogonalize(u)
    W  <- W - lr wd W - lr factor(m, n) O                                       matrices
    w  <- w - lr wd w - lr m_hat / (sqrt(v_hat) + eps)                          everything else

Sources: Jordan et al., "Muon" (2024); Liu et al., arXiv 2502.16982, for the factor that makes one
learning rate serve both rules; Loshchilov and Hutter, arXiv 1711.05101.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from .adamw import AdamWList, AdamWPiece
from .banks import MuonBank
from .distributed import Replicated, Sharded, bank_labels, distribution
from .orthogonalize import DEFAULT_PRESET
from .param_groups import RULES, ParamGroupEngine, Piece, check_rule
from .pieces import Member, Numbers, Options, is_dtensor, local, own_gradient
from .rules import Rails
from .skipped import SkippedSteps
from .state import check_groups, matching, named
from .tied import Tied, TiedPair

logger = logging.getLogger(__name__)

DECAYS = ("decoupled", "cautious")
# ANVIL's full update as options: HybridOptimizer(model, **ANVIL). It has no `trace_norm`, since the
# kernel of the momentum gives the norm.
ANVIL = {
    "preset": "anvil6",
    "lr_rule": "original",
    "rails": Rails(),
    "equalize": 0.95,
    "decay": "cautious",
    "decay_with_lr": True,
    "decay_adjusted": True,
}


class HybridOptimizer(torch.optim.Optimizer):
    """Muon and AdamW in one step.

    Args:
        model: any module, split by `ParamGroupEngine`, or such an engine.
        lr: learning rate of both rules.
        weight_decay: decoupled: a step takes lr * weight_decay of a weight. Embeddings, norms,
            biases and the like have none, see `plan()`.
        momentum: of the matrices.
        nesterov: whether their momentum looks ahead.
        betas, eps: AdamW's.
        preset: of `orthogonalize.PRESETS`: "keller5", "polar_express5" or "anvil6".
        lr_rule: factor on a matrix's learning rate, by its shape: "match_rms" (one lr serves both
            rules), "original" or "spectral"; see `orthogonalize.lr_factor`.
        overrides, split: of `ParamGroupEngine`.
        rails: twin-rail momentum; None is one average.
        equalize: beta of the lane equaliser (NorMuon) after the orthogonalisation; None leaves it
            out.
        row_equalize: bring rows to one norm before the orthogonalisation.
        trace_norm: take norms from the trace of the first Gram matrix.
        decay: "decoupled", or "cautious", only where weight and update have the same sign; with
            rails the slow rail's sign is asked, for AdamW that of its first average.
        decay_with_lr: weight_decay follows the schedule of lr, in proportion to its first value.
        decay_adjusted: a matrix's decay is multiplied by the factor of `lr_rule`, too.
        extra_bits: keep the 16 bits that bfloat16 weights lack, so that they train as exactly as
            float32 ones.
        adam_every: AdamW's pieces move every so many steps, by the sum of the gradients since.
        tied: an embedding and a head that are stored apart.
        skip_nonfinite: a step with a NaN or infinite gradient changes nothing, and is counted.
        dtype: of the orthogonalisation; None is bfloat16 on a GPU, float32 elsewhere.
        distributed: how many ranks share the work: `Replicated()` next to DDP, `Sharded()` in its
            place; None knows of no other rank.

    Raises:
        ValueError: options out of range or of no meaning for these parameters.

    Every parameter's state is made here, in float32 (float64 for float64 weights), and loaded in
    place. Parameter groups hold numbers, which schedulers may change between steps: lr,
    weight_decay, momentum, betas, eps.

    Parameters may be DTensors spread by rows, as `fully_shard(model)` makes them before the
    optimizer is made: `state` then holds this process's rows, and `state_dict()` DTensors.

    To capture steps in a CUDA graph, call `advance()` before every replay, and `update()` inside,
    after a step or two that ran as they are.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = HybridOptimizer(model, lr=1e-2)
        >>> model(torch.randn(3, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | ParamGroupEngine,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        preset: str = DEFAULT_PRESET,
        lr_rule: str = "match_rms",
        overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
        split: bool = True,
        rails: Rails | None = None,
        equalize: float | None = None,
        row_equalize: bool = False,
        trace_norm: bool = False,
        decay: str = "decoupled",
        decay_with_lr: bool = False,
        decay_adjusted: bool = False,
        extra_bits: bool = False,
        adam_every: int = 1,
        tied: Tied | None = None,
        skip_nonfinite: bool = True,
        dtype: torch.dtype | None = None,
        distributed: Replicated | Sharded | None = None,
    ):
        engine = model if isinstance(model, ParamGroupEngine) else None
        engine = engine or ParamGroupEngine(model, overrides, split=split)
        self._options = Options(
            preset=preset, lr_rule=lr_rule, nesterov=nesterov, rails=rails, equalize=equalize,
            row_equalize=row_equalize, trace_norm=trace_norm, cautious=decay == "cautious",
            decay_adjusted=decay_adjusted, extra_bits=extra_bits, adam_every=adam_every,
            dtype=dtype,
        )  # fmt: skip
        if decay not in DECAYS:
            raise ValueError(f"decay {decay!r} is none of {', '.join(DECAYS)}")
        self.engine = engine
        self.decay_with_lr, self.skip_nonfinite = decay_with_lr, skip_nonfinite
        device = next(iter(engine.parameters.values())).device
        self._skipped, self._told = SkippedSteps(device), False
        self._scalars: dict[tuple[int, torch.device], Tensor] = {}
        self._mode = distribution(distributed, model)
        # A GradScaler leaves out the step of one rank alone, for which the others would wait; but
        # hands steps to who says this, and so can be refused.
        self._step_supports_amp_scaling = isinstance(distributed, Sharded)
        # What is stepped, with the number of its group.
        self._works: list[tuple[int, MuonBank | AdamWList]] = []
        self._pieces: dict[int, list[Piece]] = {}
        for piece in engine.pieces:
            self._pieces.setdefault(id(engine.parameters[piece.name]), []).append(piece)
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": tuple(betas),
            "eps": eps,
        }  # fmt: skip
        super().__init__(self._groups(), defaults)
        self._check_extra_bits()
        self._pair = None if tied is None else TiedPair(tied, self._adamw_pieces())
        self._mode.plan(self._works)

    def plan(self) -> str:
        """The table of `ParamGroupEngine.plan`."""
        return self.engine.plan()

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out because of gradients that were not finite."""
        return int(self._skipped)

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all averaged gradients in the last step, where `Sharded.max_norm` clips them."""
        return self._mode.norm

    @property
    def recordable(self) -> bool:
        """Whether `update()` can be captured in a CUDA graph, as far as ranks are concerned."""
        return self._mode.recordable

    @property
    def bank_labels(self) -> tuple[str, ...]:
        """Names of the banks of same-shape matrices, count x rows x columns, for `Sharded`."""
        return tuple(bank_labels(self._banks()))

    # groups

    def _groups(self) -> list[dict[str, Any]]:
        """A group of the parameters that have a matrix, and one of those that have none."""
        groups: dict[str, list] = {rule: [] for rule in RULES}
        for name, parameter in self.engine.parameters.items():
            matrix = any(piece.rule == "muon" for piece in self._pieces[id(parameter)])
            groups["muon" if matrix else "adamw"].append((name, parameter))
        return [{"name": name, "params": named} for name, named in groups.items() if named]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters.

        Args:
            param_group: "params", tensors or (name, tensor) pairs, and "rule", "muon" or "adamw",
                for all of them; lr and the other numbers where they differ from the first ones.

        Raises:
            ValueError: no rule; one that does not fit a parameter.
        """
        group = dict(param_group)
        rule = group.pop("rule", None)
        # torch wants names in all groups or in none.
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        of = f"group {len(self.param_groups)}, parameter"
        group["params"] = [(f"{of} {i}", p) if isinstance(p, Tensor) else p
                           for i, p in enumerate(params)]  # fmt: skip
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            members = list(self._members(group, rule))
            group.setdefault("name", rule)
            group["step"] = 0
            group.setdefault("initial_lr", group["lr"])
            _check_numbers(group)
        except ValueError:
            self.param_groups.pop()
            raise
        banks: dict[tuple, list[Member]] = {}
        lists: dict[tuple, list[Member]] = {}
        for member in members:
            if member.piece.rule == "muon":
                banks.setdefault(member.kind, []).append(member)
            else:
                p = member.parameter
                kind = p.device, p.dtype, self._mode.label(member)
                lists.setdefault(kind, []).append(member)
        works = [self._mode.bank(those, self._options) for those in banks.values()]
        works += [AdamWList(those, self._options) for those in lists.values()]
        for parameter in group["params"]:
            # torch.distributed.checkpoint asks for one of every parameter, frozen ones too.
            self.state.setdefault(parameter, {})
        index = len(self.param_groups) - 1
        for own in works:
            self._works.append((index, own))
            for member, state in own.states():
                self._show(member, state)
            self._scalars[index, own.device] = torch.zeros(
                len(Numbers._fields), dtype=torch.float32, device=own.device
            )

    def _members(self, group: dict[str, Any], rule: str | None) -> Iterator[Member]:
        """The pieces of a group's parameters, but for those whose learning rate is 0 for good."""
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if is_dtensor(parameter):
                from .dtensor import Shards

                Shards.of(parameter, name)  # or a ValueError
            pieces = self._pieces.get(id(parameter))
            if pieces is None:
                if rule not in RULES:
                    raise ValueError(
                        f"{name}, of shape {tuple(parameter.shape)}, is in no rule: give the group "
                        f'"rule": one of {RULES}'
                    )
                piece = Piece(
                    name, "", 0, 0, tuple(parameter.shape), rule, None, 1.0, "add_param_group"
                )
                check_rule(piece)
                self._pieces[id(parameter)] = pieces = [piece]
            for piece in pieces:
                if piece.lr_mul:
                    yield Member(piece, parameter)

    def _show(self, member: Member, state: dict[str, Tensor]) -> None:
        """Make a piece's state that of its parameter, as everyone reads it."""
        self.state[member.parameter].update(named(member, state))

    def _banks(self) -> list[MuonBank]:
        return [own for _, own in self._works if not isinstance(own, AdamWList)]

    def _adamw_pieces(self) -> Iterator[AdamWPiece]:
        for _, own in self._works:
            if isinstance(own, AdamWList):
                yield from own.pieces

    def _check_extra_bits(self) -> None:
        if not self._options.extra_bits:
            return
        # A model in bfloat16 keeps some small parameters in float32, but no matrix.
        matrices = {bank.members[0].weight.dtype for bank in self._banks()}
        others = {piece.member.weight.dtype for piece in self._adamw_pieces()}
        if matrices != {torch.bfloat16} and (matrices or torch.bfloat16 not in others):
            raise ValueError(
                "extra_bits is for bfloat16 weights, and the matrices are "
                f"{_names(matrices or others)}: float32 has those bits. Convert the model "
                "(.to(torch.bfloat16)) or leave it out"
            )

    # steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure`, if given, computes the loss and the gradients first."""
        if getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "a GradScaler knows the gradients of one rank, Sharded steps with those of all: "
                "train in bfloat16 without a scaler, or with DDP and Replicated"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.advance()
        self.update()
        return loss

    def advance(self) -> None:
        """Count a step and bring the numbers of the groups, as they are now, to the devices."""
        if not self._told and self._skipped.any_before():
            self._tell(
                "a step before the last one was left out, as a gradient is not finite. The torch "
                "backend (mamba3.ops.use_backend) says which one"
            )
        for index, group in enumerate(self.param_groups):
            _check_numbers(group)
            group["step"] += 1
            # Copies from memory that is not pinned take a tenth of a millisecond of the host each.
            pinned = any(device.type == "cuda" for _, device in self._scalars)
            values = torch.tensor(self._values(group), dtype=torch.float32, pin_memory=pinned)
            for (of, _), scalars in self._scalars.items():
                if of == index:
                    scalars.copy_(values, non_blocking=True)

    @torch.no_grad()
    def update(self, finite: Tensor | None = None) -> None:
        """Change weights and state by the gradients and the numbers of the last `advance()`.

        Args:
            finite: whether all gradients are, of no dimension, on their device and the same on all
                ranks; None looks at them.
        """
        works, mode = self._works, self._mode
        if finite is None and self.skip_nonfinite and not mode.clips:
            finite = self._finite()
        finite = mode.begin(works, self._gradient, finite)
        if finite is not None and self.skip_nonfinite and self._leave_out(finite):
            mode.end()
            return
        tied, gradients = self._tied_now(), mode.gradients(self._gradient)
        for index, those in mode.ordered(works):
            group, numbers = self.param_groups[index], self._numbers(index, those.device)
            if isinstance(those, AdamWList):
                active = group["step"] % self._options.adam_every == 0
                those.step(gradients, numbers, group["betas"], group["eps"], active)
            else:
                those.step(gradients, numbers)
        mode.end()
        if tied:
            self._pair.copy_head()

    def wait(self) -> None:
        """Bring parameters up to date that `Sharded.deferred` has left on their way."""
        self._mode.wait()

    def _tied_now(self) -> bool:
        return self._pair is not None and self._pair.tied_at(self.param_groups[-1]["step"])

    def _gradient(self, member: Member) -> Tensor | None:
        """What a member is stepped by, if it is stepped."""
        return self._pair.gradient(member) if self._tied_now() else own_gradient(member)

    def _values(self, group: dict[str, Any]) -> Numbers:
        """The numbers of a group's step."""
        beta, share = group["momentum"], 1.0
        if self._options.rails is not None:
            beta, share = self._options.rails.at(group["step"])
        decay = group["weight_decay"]
        if self.decay_with_lr and group["initial_lr"]:
            decay *= group["lr"] / group["initial_lr"]
        return Numbers(group["lr"], decay, group["momentum"], beta, share)

    def _numbers(self, index: int, device: torch.device) -> Numbers:
        """The same as device scalars at fixed addresses; on a CPU the numbers themselves."""
        if device.type == "cpu":
            skip = float(self._scalars[index, device][-1])
            return self._values(self.param_groups[index])._replace(skip=skip)
        return Numbers(*self._scalars[index, device].unbind())

    def _finite(self) -> Tensor:
        """Whether all gradients are finite, on their device."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        largest = get_total_norm([g for g in grads if g.numel()], float("inf"))
        finite = torch.isfinite(largest)
        if any(map(is_dtensor, parameters)):
            from .dtensor import everywhere

            finite = everywhere(finite, parameters)
        return finite

    def _leave_out(self, finite: Tensor) -> bool:
        """Count a step whose gradients are not finite; whether the host is to leave it out.

        It need not know where all that steps heeds `Numbers.skip`.
        """
        skip = (~finite).float()
        self._skipped.add(skip)
        if all(own.skips for _, own in self._works):
            for scalars in self._scalars.values():
                Numbers(*scalars.unbind()).skip.copy_(skip)
            return False
        if finite:
            return False
        if not self._told:
            self._tell_which()
        return True

    def _tell_which(self) -> None:
        names = [
            name
            for name, p in self.engine.parameters.items()
            if p.grad is not None and not local(p.grad).isfinite().all()
        ]
        which = ", ".join(names) or "a parameter of a later group, or of another process,"
        step = self.param_groups[0]["step"]
        self._tell(f"step {step} left out: the gradient of {which} is not finite")

    def _tell(self, what: str) -> None:
        self._told = True
        logger.warning("%s. Further ones are only counted (skipped_steps)", what)

    # state

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Every process must call it if `Sharded`; it then has the state of all ranks.

        The same with DTensor parameters, whose state is of DTensors.
        """
        self.wait()
        saved = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        places = {id(parameter): i for i, parameter in enumerate(parameters)}
        for member, state in self._mode.gathered():
            place = places[id(member.parameter)]
            saved["state"][place] = saved["state"].get(place, {}) | named(member, state)
        for index, state in saved["state"].items():
            if is_dtensor(parameter := parameters[index]):
                from .dtensor import spread_state

                pieces = self._pieces[id(parameter)]
                saved["state"][index] = spread_state(parameter, pieces, state)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave, into the tensors that there are.

        With DTensor parameters every process must call it; whole tensors are taken, too.

        Raises:
            ValueError: it is of other parameters, or of an optimizer with other options.
        """
        check_groups(state_dict["param_groups"], self.param_groups)
        elsewhere: dict[int, dict[str, Tensor]] = {}
        for member, state in self._mode.elsewhere():
            elsewhere.setdefault(id(member.parameter), {}).update(named(member, state))
        copies: list[tuple[Tensor, Tensor]] = []
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            every = zip(saved["params"], group["params"], group["param_names"], strict=True)
            for key, parameter, name in every:
                state = state_dict["state"].get(key, {})
                if is_dtensor(parameter):
                    from .dtensor import local_state

                    state = local_state(parameter, self._pieces[id(parameter)], state)
                mine = self.state[parameter] | elsewhere.get(id(parameter), {})
                copies += matching(state, mine, name)
        for target, value in copies:
            target.copy_(value)  # no more than a check where the target is on another rank
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
            group["betas"] = tuple(group["betas"])

    def __getstate__(self):
        raise TypeError(
            "a HybridOptimizer cannot be pickled or deep-copied: save state_dict(), and load it "
            "into an optimizer made of the model"
        )


def _check_numbers(group: dict[str, Any]) -> None:
    """Raise a ValueError for a number that no step can be made with."""
    for name in ("lr", "weight_decay", "eps"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be at least 0, got {group[name]}")
    betas = {"momentum": group["momentum"]} | dict(enumerate(group["betas"]))
    for name, beta in betas.items():
        if not 0 <= beta < 1:
            what = name if name == "momentum" else f"betas[{name}]"
            raise ValueError(f"{what} must be in [0, 1), got {beta}")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
