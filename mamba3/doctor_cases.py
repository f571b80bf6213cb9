"""What `mamba3.doctor` compares: every op that has a kernel, on random tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .ops import reference
from .ops.gate import gate_and_mix
from .ops.norm import add_rms_norm

RANKS = {"SISO": 1, "MIMO": 4}


class Sizes(NamedTuple):
    """Sizes of what is compared."""

    heads: int
    groups: int
    headdim: int
    d_state: int
    rows: int
    more_sequences: int

    @classmethod
    def on(cls, device: torch.device) -> Sizes:
        # Where sequences and heads alone fill a GPU, a program walks through all chunks of one, as
        # in training; where they do not, chunks have programs of their own.
        if device.type == "cuda":
            return cls(4, 2, 64, 128, rows=140, more_sequences=40)
        return cls(2, 1, 24, 20, rows=70, more_sequences=1)

    @property
    def angles(self) -> int:
        return self.d_state // 4


class Case(NamedTuple):
    """One op on given tensors.

    tensors: by name, in float32; each is differentiated.
    narrow: names of those that take the dtype of a run; the others stay in float32.
    run: from tensors by name to outputs by name.
    """

    form: str
    op: str
    tensors: dict[str, Tensor]
    narrow: Sequence[str]
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    differentiable: bool = True
    backends: Sequence[str] = ("torch", "triton")


def cases(device: torch.device) -> Iterator[Case]:
    """Everything that is compared on a device."""
    sizes, draw = Sizes.on(device), Draw()
    xz, more = ("x", "z"), sizes.more_sequences
    for form, rank in RANKS.items():
        length = sizes.rows // rank
        tokens = draw.tokens(sizes, rank, 2, length)
        yield Case(form, "scan", tokens, xz, _scan)
        packed = draw.tokens(sizes, rank, 1, length + more) | draw.state(sizes, rank, 1 + more)
        yield Case(form, "scan, packed, with states", packed, xz, _scan)
        token = draw.tokens(sizes, rank, 3) | draw.state(sizes, rank, 3)
        yield Case(form, "step", token, xz, _step, differentiable=False)
        token |= draw.state(sizes, rank, 5)
        narrow = ("x", "z", "state.h")
        yield Case(form, "step in place", token, narrow, _step_in_place, differentiable=False)
        gate = {k: tokens[k] for k in ("mimo_z", "mimo_o", "norm_weight") if k in tokens}
        gate["z"] = tokens["z"].flatten(0, 1)
        gate["y"] = draw.normal(2 * length, sizes.heads, rank, sizes.headdim)
        yield Case(form, "gate_and_mix", gate, ("y", "z"), _gate_and_mix, backends=("triton",))
    yield from _mamba_cases(sizes, draw)
    yield from _small_cases(sizes, draw)


def _mamba_cases(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    """Of the legacy layer; on a GPU N = 16, as in the models that exist."""
    width, d_state = sizes.heads * sizes.headdim, sizes.d_state // 8
    first, sequences = sizes.rows // 2, 1 + sizes.more_sequences
    length = first + sizes.more_sequences
    bounds = [0, *range(first, length + 1)]

    def tensors(*lead: int) -> dict[str, Tensor]:
        return {
            **{name: draw.normal(*lead, width) for name in ("x", "dt", "z")},
            **{name: draw.normal(*lead, d_state) for name in "bc"},
            "a": -draw.uniform(width, d_state),
            "d": draw.normal(width),
            "h": draw.normal(sequences if len(lead) > 1 else lead[0], width, d_state),
        }

    def scan(t: dict[str, Tensor]) -> dict[str, Tensor]:
        cu_seqlens = torch.tensor(bounds, device=t["x"].device)
        return dict(
            zip("yh", ops.selective_scan(**t, softplus=True, cu_seqlens=cu_seqlens), strict=True)
        )

    def step(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t = {name: one.clone() for name, one in t.items()}
        return dict(zip("yh", ops.selective_step(**t, softplus=True, inplace=True), strict=True))

    narrow = ("x", "dt", "z", "b", "c")
    yield Case("", "selective_scan, packed", tensors(1, length), narrow, scan)
    yield Case("", "selective_step in place", tensors(3), narrow, step, differentiable=False)
    kernel = {"weight": draw.normal(width, 4), "bias": draw.normal(width)}

    def conv(t: dict[str, Tensor]) -> dict[str, Tensor]:
        cu_seqlens = torch.tensor(bounds, device=t["x"].device)
        return dict(zip(("y", "state"), ops.causal_conv(**t, cu_seqlens=cu_seqlens), strict=True))

    def conv_step(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t = {name: one.clone() for name, one in t.items()}
        return dict(zip(("y", "state"), ops.causal_conv_step(**t, inplace=True), strict=True))

    packed = {"x": draw.normal(1, length, width), "state": draw.normal(sequences, width, 3)}
    yield Case("", "causal_conv, packed", packed | kernel, ("x",), conv)
    token = {"x": draw.normal(3, width), "state": draw.normal(3, width, 3)}
    yield Case(
        "", "causal_conv_step in place", token | kernel, ("x",), conv_step, differentiable=False
    )


def _small_cases(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    rows, heads, p, n, rank = 70, sizes.heads, sizes.headdim, sizes.d_state, RANKS["MIMO"]
    for op, other, run in (
        ("rms_norm", "gate", lambda t: {"y": ops.rms_norm(t["x"], t["weight"], gate=t["gate"])}),
        ("add_rms_norm", "residual", lambda t: dict(zip("ys", add_rms_norm(**t), strict=True))),
    ):
        wide = (rows, heads * p)
        norm = {"x": draw.normal(*wide), "weight": draw.normal(wide[1]), other: draw.normal(*wide)}
        yield Case("", op, norm, tuple(norm), run)
    numbers = {"a": draw.normal(rows, heads, n), "b": draw.normal(rows, 1, n // 2)}
    for op in (ops.complex_mul, ops.complex_add):
        run = functools.partial(_both_layouts, op)
        yield Case("", op.__name__, numbers, ("a", "b"), run)
    yield _loss_case(rows, heads * p, draw)
    weight = draw.normal(heads, rank, p)
    streams = {"x": draw.normal(rows, heads, p), "weight": weight}
    yield Case(
        "", "broadcast_streams", streams, ("x",), lambda t: {"y": ops.broadcast_streams(**t)}
    )
    streams = {"y": draw.normal(rows, heads, rank, p), "weight": weight}
    yield Case("", "mix_streams", streams, ("y",), lambda t: {"out": ops.mix_streams(**t)})
    update = {
        "h": draw.normal(3, heads, p, n),
        "v": draw.normal(3, heads, rank, p),
        "k": draw.normal(3, heads, rank, n),
        "decay": draw.uniform(3, heads),
        "phasor": draw.normal(3, heads, n // 2),
    }
    yield Case(
        "", "complex_state_update", update, tuple(update),
        lambda t: {"h": ops.complex_state_update(*t.values())},
    )  # fmt: skip


def _loss_case(rows: int, width: int, draw: Draw) -> Case:
    """With more logits in a row than the kernel holds at a time, and every fourth not scored."""
    vocabulary = 10007
    labels = torch.randint(vocabulary, (rows,), generator=draw.generator)
    labels[::4] = -100
    head = {"x": draw.normal(rows, width), "weight": draw.exact(draw.normal(vocabulary, width) / 8)}

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": ops.linear_cross_entropy(**t, labels=labels.to(t["x"].device))}

    return Case("", "linear_cross_entropy", head, tuple(head), run)


class Draw:
    """Random tensors that every dtype holds exactly, so that all runs have the same input."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return self.exact(torch.randn(shape, generator=self.generator))

    def uniform(self, *shape: int) -> Tensor:
        return self.exact(torch.rand(shape, generator=self.generator))

    @staticmethod
    def exact(t: Tensor) -> Tensor:
        return t.bfloat16().half().float()

    def tokens(self, sizes: Sizes, rank: int, *lead: int) -> dict[str, Tensor]:
        """Arguments of the scan, or with one leading dimension of the step; decays that last."""
        heads, p, n = sizes.heads, sizes.headdim, sizes.d_state
        tensors = {
            "x": self.normal(*lead, heads, p),
            "z": self.normal(*lead, heads, p),
            "b": self.normal(*lead, rank, sizes.groups, n),
            "c": self.normal(*lead, rank, sizes.groups, n),
            "dt": 0.1 * self.uniform(*lead, heads),
            "a": -self.uniform(*lead, heads),
            "lam": self.uniform(*lead, heads),
            "rate": math.pi * torch.tanh(self.normal(*lead, sizes.angles)),
            "b_bias": self.normal(heads, rank, n),
            "c_bias": self.normal(heads, rank, n),
            "d": self.normal(heads),
        }
        if rank > 1:
            tensors |= {f"mimo_{s}": self.normal(heads, rank, p) for s in "xzo"}
            tensors["norm_weight"] = self.normal(heads, p)
        return tensors

    def state(self, sizes: Sizes, rank: int, sequences: int) -> dict[str, Tensor]:
        lead = (sequences, sizes.heads)
        return {
            "state.h": self.normal(*lead, sizes.headdim, sizes.d_state),
            "state.phase": self.normal(*lead, sizes.angles),
            "state.k": self.normal(sequences, rank, sizes.heads, sizes.d_state),
            "state.x": self.normal(*lead, sizes.headdim),
        }


def _call(tensors: dict[str, Tensor]) -> dict:
    """Arguments of the scan and the step, from tensors by name."""
    call = {k: t for k, t in tensors.items() if not k.startswith(("state.", "mimo_"))}
    if "mimo_x" in tensors:
        call["mimo"] = tuple(tensors[f"mimo_{s}"] for s in "xzo")
    if "state.h" in tensors:
        call["state"] = ops.Mamba3State(*(tensors[f"state.{f}"] for f in ops.Mamba3State._fields))
    return call


def _results(y: Tensor, state: ops.Mamba3State) -> dict[str, Tensor]:
    """Outputs by name, phases as points on the circle, since angles compare modulo 2 pi."""
    state = state._replace(phase=torch.stack((state.phase.cos(), state.phase.sin())))
    return {"y": y} | {f"state.{name}": t for name, t in state._asdict().items()}


def _scan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    call = _call(tensors)
    if "state" not in call:
        return {"y": ops.mamba3_scan(**call, return_state=False)[0]}
    x, sequences = call["x"], call["state"].batch_size
    lengths = [x.shape[1] - sequences + 1] + [1] * (sequences - 1)
    bounds = torch.tensor([0, *accumulate(lengths)], device=x.device)
    return _results(*ops.mamba3_scan(**call, cu_seqlens=bounds))


def _step(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return _results(*ops.mamba3_step(**_call(tensors)))


def _step_in_place(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In a pool of slots of which one row names none."""
    call = _call({name: t.clone() for name, t in tensors.items()})
    slots = torch.tensor([4, -1, 1], device=call["x"].device)
    return _results(*ops.mamba3_step(**call, inplace=True, state_indices=slots))


def _gate_and_mix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    y, z, *rest = (tensors.get(k) for k in ("y", "z", "mimo_z", "mimo_o", "norm_weight"))
    if y.dtype != torch.float64:
        return {"out": gate_and_mix(y, z, *rest, 1e-5)}
    mimo_z, mimo_o, norm_weight = rest
    mimo = None if mimo_o is None else (mimo_z, mimo_z, mimo_o)
    return {"out": reference.gate_and_mix(y.transpose(1, 2), z, mimo, norm_weight, 1e-5)}


def _both_layouts(op: Callable, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"interleaved": op(**tensors), "halves": op(**tensors, interleaved=False)}
