"""Does this machine compute Mamba-3 right? Every path that can run here, against float64.

Compilers and drivers have given finite, wrong numbers without a word. `check` runs a layer forward
and backward and token by token on a device, on each backend and in each dtype that it has, and
compares with the sequential reference in float64 on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mamba3.layers import TMamba3Layer
from mamba3.ops import use_backend
from mamba3.ops.dispatch import available

FORMS = {
    "SISO": {"d_state": 24, "headdim": 16},
    "MIMO": {"d_state": 16, "headdim": 24, "is_mimo": True, "is_outproj_norm": True, "expand": 3},
}
# Largest relative error that rounding explains; in half precision the projections round too, and
# their backward passes once more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
WIDTH, LENGTH, STEPS = 48, 70, 6


class Finding(NamedTuple):
    """One comparison.

    device, backend, dtype, form: what was run.
    what: "forward", "gradients" or "steps".
    error: largest of the tensors' errors, each the norm of the difference over the norm.
    tolerance: what rounding explains.
    """

    device: str
    backend: str
    dtype: str
    form: str
    what: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; nan is not."""
        return self.error <= self.tolerance


def check(device: torch.device | str) -> Iterator[Finding]:
    """Compare everything that runs on a device with the reference, one finding at a time."""
    device = torch.device(device)
    for form, options in FORMS.items():
        for dtype in _dtypes(device):
            layer = _random_layer(options).to(dtype)
            exact = copy.deepcopy(layer).double()
            expected = _run(exact, "reference", "cpu")
            for backend in _backends(device):
                got = _run(copy.deepcopy(layer), backend, device)
                name = str(dtype).removeprefix("torch.")
                for what, tensors in got.items():
                    error = max(map(_error, tensors, expected[what]))
                    yield Finding(str(device), backend, name, form, what, error, TOLERANCES[dtype])


def _run(layer: TMamba3Layer, backend: str, device: torch.device | str) -> dict[str, list[Tensor]]:
    """Outputs and state, gradients of the input and every parameter, and the same by steps."""
    layer = layer.to(device)
    dtype = layer.in_proj.weight.dtype
    generator = torch.Generator().manual_seed(1)
    # Rounded to the narrowest dtype of all, so that every run has the same input.
    u = torch.randn(2, LENGTH, WIDTH, generator=generator).bfloat16().half()
    u = u.to(device, dtype).requires_grad_()
    with use_backend(backend):
        y, state = layer(u, return_state=True)
        inputs = [u, *layer.parameters()]
        gradients = torch.autograd.grad(100 * (y.float().square().mean() + state.h.mean()), inputs)
        walked = layer.new_state(2)
        with torch.inference_mode():
            steps = []
            for i in range(STEPS):
                out, walked = layer.step(u[:, i], walked)
                steps.append(out)
    return {
        "forward": [y.detach(), state.h.detach(), state.k.detach()],
        "gradients": list(gradients),
        "steps": [torch.stack(steps, 1), walked.h, walked.k],
    }


def _random_layer(options: dict) -> TMamba3Layer:
    """A layer with nothing left at its init: a weight of 1 hides a fault that drops it."""
    layer = TMamba3Layer(WIDTH, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return layer


def _backends(device: torch.device) -> list[str]:
    return [name for name in available(device) if name != "reference"]


def _dtypes(device: torch.device) -> list[torch.dtype]:
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        dtypes.remove(torch.bfloat16)
    return dtypes


def _error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.cpu().double(), expected.double()
    return ((got - expected).norm() / expected.norm()).item()
