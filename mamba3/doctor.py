"""Does this machine compute Mamba-3 right? Every op that has a kernel, on every backend here.

Compilers and drivers have given finite, wrong numbers without a word. `check` runs the ops forward
and backward on a device, on each backend that it has, in float32 and in half precision, and
compares outputs and every gradient with the sequential reference in float64 on the CPU. On a GPU
the widths are those of real models, so that the kernels are the ones that models run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import doctor_cases, ops
from .ops.dispatch import available

# Largest RMS error over RMS of what is expected that rounding explains. Gradients may have twice.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
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
    for case in doctor_cases.cases(device):
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

    sizes = doctor_cases.Sizes.on(device)
    lines = [f"Triton {_triton_version()}, scan of P = {sizes.headdim}, N = {sizes.d_state}:"]
    for form, rank in doctor_cases.RANKS.items():
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


def _run(case: doctor_cases.Case, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Outputs, and the gradients of a random sum of them where there are any, by name."""
    tensors = {k: t.detach().requires_grad_(case.differentiable) for k, t in tensors.items()}
    outputs = case.run(tensors)
    if not case.differentiable:
        return [outputs]
    draw = doctor_cases.Draw()
    weights = [draw.normal(*t.shape).to(t) for t in outputs.values()]
    grads = torch.autograd.grad(list(outputs.values()), list(tensors.values()), weights)
    names = [f"gradient of {name}" for name in tensors]
    return [outputs, dict(zip(names, grads, strict=True))]


def _finding(
    case: doctor_cases.Case,
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
