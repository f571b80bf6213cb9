"""Does this machine compute Mamba-3 right? Every op that has a kernel, on every backend here.

Compilers and drivers have given finite, wrong numbers without a word. `check` runs the ops forward
and backward on a device, on each backend that it has, in float32 and in half precision, and
compares outputs and every gradient with the sequential reference in float64 on the CPU. On a GPU
the widths are those of real models, so that the kernels are the ones that models run.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .ops import reference
from .ops.dispatch import available
from .ops.gate import gate_and_mix
from .ops.norm import add_rms_norm

# Largest RMS error over RMS of what is expected that rounding explains. Gradients may have twice.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
RANKS = {"SISO": 1, "MIMO": 4}
# From the first version up to the second, Triton compiles a product wrongly for Hopper where its
# first operand is another product, transposed.
FAULTY_ON_HOPPER = (3, 4), (3, 7, 1)
HEADER = (
    "backend  dtype     form  op                          outputs  gradients  rounding explains"
)


class Finding(NamedTuple):
    """One op compared with the reference; as a string, a row under `HEADER`.

    device, backend, dtype: where it ran, and which dtype its large tensors had.
    form: "SISO" or "MIMO"; empty for an op that has no forms.
    what: the op.
    error: largest of the outputs' errors; infinite where a number is not finite or the op failed.
    gradients: largest of the gradients' errors; None for an op that has none.
    tolerance: what rounding explains of the outputs' errors; of the gradients' twice as much.
    worst: the tensor that is off the most, or how the op failed.
    """

    device: str
    backend: str
    dtype: str
    form: str
    what: str
    error: float
    gradients: float | None
    tolerance: float
    worst: str

    @property
    def ok(self) -> bool:
        """Whether the errors are within the tolerance."""
        return self.error <= self.tolerance and (self.gradients or 0) <= 2 * self.tolerance

    def __str__(self) -> str:
        gradients = "-" if self.gradients is None else f"{self.gradients:.1e}"
        verdict = "ok" if self.ok else f"FAIL: {self.worst}"
        return (
            f"{self.backend:7}  {self.dtype:8}  {self.form:4}  {self.what:26}  {self.error:7.1e}  "
            f"{gradients:9}  {self.tolerance:.0e}, {2 * self.tolerance:.0e}  {verdict}"
        )


def check(device: torch.device | str) -> Iterator[Finding]:
    """Compare every op that runs on a device with the reference, one finding at a time."""
    device = torch.device(device)
    for case in _cases(device):
        with ops.use_backend("reference"):
            expected = _run(case, {name: t.double() for name, t in case.tensors.items()})
        for backend in _backends(device):
            if backend in case.backends:
                for dtype in _dtypes(device, backend):
                    yield _finding(case, expected, device, backend, dtype)


def configurations(device: torch.device | str) -> list[str]:
    """Tiles, warps and pipeline stages of the scan's kernels on a device, in lines to print."""
    device = torch.device(device)
    if "triton" not in available(device):
        return []
    from .ops.triton import scan

    sizes = Sizes.on(device)
    lines = [f"Triton {_triton_version()}, scan of P = {sizes.headdim}, N = {sizes.d_state}:"]
    for form, rank in RANKS.items():
        for dtype in _dtypes(device, "triton"):
            widths = (rank, sizes.headdim, sizes.d_state, sizes.angles)
            tiles = scan.Tiles.of(*widths, dtype, None)
            lines.append(
                f"  {form} R={rank} {_name(dtype):8}  tiles of {tiles.rows} rows, "
                f"{tiles.chunk_size} tokens, by {tiles.block_p} of P"
            )
    width = max(map(len, scan.CONFIGS))
    for kernel in scan.CONFIGS:
        warps, stages = scan.config(kernel, torch.device(device))
        lines.append(f"  {kernel:{width}}  {warps} warps, {stages} stages")
    return lines


def remedy(findings: Sequence[Finding]) -> str:
    """What to do about findings of one device, none of which is ok."""
    advice = []
    if {found.backend for found in findings} == {"triton"}:
        advice.append("set MAMBA3_BACKEND=torch, which is right here")
        version, device = _triton_version(), torch.device(findings[0].device)
        if _is_hopper(device) and FAULTY_ON_HOPPER[0] <= _parsed(version) < FAULTY_ON_HOPPER[1]:
            advice.append(
                f"Triton {version} is known to compile some kernels wrongly for Hopper GPUs: with "
                "a torch that allows it, python -m pip install 'triton>=3.7.1'"
            )
    advice.append("please report it with the table above")
    return "; ".join(advice)


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


def _cases(device: torch.device) -> Iterator[Case]:
    sizes, draw = Sizes.on(device), _Draw()
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
    yield from _small_cases(sizes, draw)


def _small_cases(sizes: Sizes, draw: _Draw) -> Iterator[Case]:
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


def _loss_case(rows: int, width: int, draw: _Draw) -> Case:
    """With more logits in a row than the kernel holds at a time, and every fourth not scored."""
    vocabulary = 10007
    labels = torch.randint(vocabulary, (rows,), generator=draw.generator)
    labels[::4] = -100
    head = {"x": draw.normal(rows, width), "weight": draw.exact(draw.normal(vocabulary, width) / 8)}

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": ops.linear_cross_entropy(**t, labels=labels.to(t["x"].device))}

    return Case("", "linear_cross_entropy", head, tuple(head), run)


class _Draw:
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


def _run(case: Case, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Outputs, and the gradients of a random sum of them where there are any, by name."""
    tensors = {k: t.detach().requires_grad_(case.differentiable) for k, t in tensors.items()}
    outputs = case.run(tensors)
    if not case.differentiable:
        return [outputs]
    draw = _Draw()
    weights = [draw.normal(*t.shape).to(t) for t in outputs.values()]
    grads = torch.autograd.grad(list(outputs.values()), list(tensors.values()), weights)
    names = [f"gradient of {name}" for name in tensors]
    return [outputs, dict(zip(names, grads, strict=True))]


def _finding(
    case: Case,
    expected: list[dict[str, Tensor]],
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
) -> Finding:
    dtypes = {name: dtype if name in case.narrow else torch.float32 for name in case.tensors}
    tensors = {name: t.to(device, dtypes[name]) for name, t in case.tensors.items()}
    where = (str(device), backend, _name(dtype), case.form, case.op)
    tolerance = TOLERANCES[dtype]
    try:
        with ops.use_backend(backend):
            got = _run(case, tensors)
        errors = {
            name: _error(t, of[name])
            for mine, of in zip(got, expected, strict=True)
            for name, t in mine.items()
        }
    except Exception as failure:  # a kernel that does not compile or launch is a finding as well
        reason = f"{type(failure).__name__}: {failure}".partition("\n")[0]
        return Finding(*where, math.inf, None, tolerance, reason)
    outputs = {name: error for name, error in errors.items() if name in got[0]}
    gradients = {name: error for name, error in errors.items() if name not in outputs}
    # The gradients of outputs that are off follow them.
    blamed = outputs if max(outputs.values()) > tolerance else gradients or outputs
    return Finding(
        *where,
        error=max(outputs.values()),
        gradients=max(gradients.values(), default=None),
        tolerance=tolerance,
        worst=max(blamed, key=blamed.get),
    )


def _error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().cpu().double(), expected.detach()
    error = ((got - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


def _backends(device: torch.device) -> list[str]:
    return [name for name in available(device) if name != "reference"]


def _dtypes(device: torch.device, backend: str) -> list[torch.dtype]:
    """float32, and the half precision that the device is used with."""
    half = torch.bfloat16
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            half = torch.float16
    elif backend == "triton":
        half = torch.float16  # Triton's interpreter multiplies matrices of bfloat16 as integers
    return [torch.float32, half]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_hopper(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def _triton_version() -> str:
    from .ops.triton import scan

    return scan.triton.__version__


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
