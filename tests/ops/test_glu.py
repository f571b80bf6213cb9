"""silu_gated against float64: the torch path, and the Triton kernels."""

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, gradients

from mamba3.ops import silu_gated, use_backend
from mamba3.ops.triton import glu

# (..., 2 W), several tiles of rows and of columns among them.
SHAPES = [(2,), (3, 5, 14), (300, 20), (5, 2 * 600)]


def normal(*shape, dtype, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    t = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return t.to(DEVICE, dtype).requires_grad_()


@pytest.fixture
def launches(monkeypatch):
    """Kernels that are launched."""
    launched, launch = [], glu._launch
    monkeypatch.setattr(
        glu, "_launch", lambda kernel, *args, **o: launched.append(1) or launch(kernel, *args, **o)
    )
    return launched


def compare(x, backend, tolerance):
    wide = x.detach().double().requires_grad_()
    value, gate = wide.chunk(2, -1)
    expected = value * gate / (1 + torch.exp(-gate))
    with use_backend(backend):
        out = silu_gated(x)
    assert out.dtype == x.dtype
    assert_close(out, expected, tolerance, "output")
    grads, wanted = gradients((out,), {"x": x}), gradients((expected,), {"x": wide})
    assert_close(grads, wanted, 2 * tolerance, "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, dtype, launches):
    compare(normal(*shape, dtype=dtype), "triton", TOLERANCE[dtype])
    assert len(launches) == 2


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_any_layout(backend):
    x = normal(14, 9, dtype=torch.float32).detach().T.requires_grad_()
    compare(x, backend, TOLERANCE[torch.float32])


def test_float64_runs_on_torch(launches):
    compare(normal(3, 8, dtype=torch.float64), "triton", TOLERANCE[torch.float64])
    assert not launches


def test_large_gates_stay_finite():
    compare(normal(4, 6, dtype=torch.float32, scale=200.0), "triton", TOLERANCE[torch.float32])


def test_an_odd_number_of_channels():
    with pytest.raises(ValueError, match="expected x"):
        silu_gated(torch.ones(2, 3))
