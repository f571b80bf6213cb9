"""steering against its formulas in float64: the torch path, and the Triton kernels."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, TOLERANCE, assert_close, gradients

from mamba3.ops import steering, use_backend
from mamba3.ops.triton import steering as launchers

NAMES = ("dt", "a", "lam", "rate")
FLOOR = 0.2


def normal(*shape, dtype, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    t = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return t.to(DEVICE, dtype).requires_grad_()


def formula(raw, dt_bias, activation):
    heads = len(dt_bias)
    dd_dt, dd_a, trap, angle = raw.split((heads, heads, heads, raw.shape[-1] - 3 * heads), -1)
    f = torch.where(dd_a > 0, 1 + dd_a, 1 / (1 - dd_a.clamp(max=0)))
    f = f if activation == "heavy_tail" else torch.log1p(torch.exp(dd_a))
    dt = torch.log1p(torch.exp(dd_dt + dt_bias))
    return dt, -f.clamp(min=FLOOR), torch.sigmoid(trap), math.pi * torch.tanh(angle)


def compare(raw, dt_bias, activation, backend):
    wide = [t.detach().double().requires_grad_() for t in (raw, dt_bias)]
    expected = dict(zip(NAMES, formula(*wide, activation), strict=True))
    with use_backend(backend):
        got = dict(zip(NAMES, steering(raw, dt_bias, activation, FLOOR), strict=True))
    assert {t.dtype for t in got.values()} == {dt_bias.dtype}
    # Computed in dt_bias's dtype whatever that of raw is.
    assert_close(got, expected, TOLERANCE[dt_bias.dtype], "output")
    grads = gradients(got.values(), {"raw": raw, "dt_bias": dt_bias})
    wanted = gradients(expected.values(), dict(zip(grads, wide, strict=True)))
    assert grads["raw"].dtype == raw.dtype
    assert_close(grads, wanted, 2 * max(TOLERANCE[t.dtype] for t in (raw, dt_bias)), "gradient")


@pytest.fixture
def launches(monkeypatch):
    """Names of the launchers called."""
    called = []
    for name in ("steering_forward", "steering_backward"):
        launch = getattr(launchers, name)
        monkeypatch.setattr(
            launchers, name, lambda *args, f=launch: called.append(f.__name__) or f(*args)
        )
    return called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["heavy_tail", "softplus"])
@pytest.mark.parametrize(("shape", "heads"), [((14,), 3), ((2, 21, 10), 3), ((40, 7), 2)])
def test_kernels(shape, heads, activation, dtype, launches):
    raw = normal(*shape, dtype=dtype)
    compare(raw, normal(heads, dtype=torch.float32, seed=1), activation, "triton")
    assert launches == ["steering_forward", "steering_backward"]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_angles_in_a_wider_projection(backend):
    wide = normal(2, 9, 20, dtype=torch.float32).detach()
    raw = wide[..., 4:13].requires_grad_()
    compare(raw, normal(3, dtype=torch.float32, seed=1), "heavy_tail", backend)


def test_a_program_takes_several_tiles(monkeypatch):
    monkeypatch.setattr(launchers, "PROGRAMS", 2)
    raw = normal(90, 11, dtype=torch.float32)
    compare(raw, normal(3, dtype=torch.float32, seed=1), "heavy_tail", "triton")


def test_float64_runs_on_torch(launches):
    raw, bias = normal(5, 11, dtype=torch.float64), normal(3, dtype=torch.float64, seed=1)
    compare(raw, bias, "softplus", "triton")
    assert not launches


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_far_from_zero(backend):
    """Small step sizes keep their digits, and nothing overflows."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    values = torch.tensor([-80.0, -30.0, -12.0, -4.0, 0.0, 30.0, 1e6], device=DEVICE, dtype=dtype)
    raw = torch.zeros(len(values), 3, device=DEVICE, dtype=dtype)
    raw[:, 0], raw[:, 2] = values, values
    bias = torch.zeros(1, device=DEVICE, dtype=dtype)
    with use_backend(backend):
        dt, _, lam, _ = steering(raw, bias, "heavy_tail", FLOOR)
    wide = values.double()
    expected = torch.logaddexp(wide, torch.zeros_like(wide))
    torch.testing.assert_close(dt[:, 0].double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(lam[:, 0].double(), wide.sigmoid(), rtol=2e-5, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("value", [-1e6, -3.0, -1e-3, 0.0, 1e-3, 2.0, 1e6])
def test_decay_rate(value, backend):
    dtype = torch.float32 if backend == "triton" else torch.float64
    rel = 1e-6 if backend == "triton" else 1e-12
    raw = torch.tensor([0.0, value, 0.0], dtype=dtype, device=DEVICE, requires_grad=True)
    bias = torch.zeros(1, dtype=dtype, device=DEVICE)
    with use_backend(backend):
        rate = steering(raw, bias, "heavy_tail", 1e-4)[1]
        soft = steering(raw, bias, "softplus", 1e-4)[1].item()
    expected = 1 + value if value >= 0 else 1 / (1 - value)
    assert rate.item() == pytest.approx(-max(expected, 1e-4), rel=rel)
    (grad,) = torch.autograd.grad(rate, raw)
    slope = 1.0 if value >= 0 else 1 / (1 - value) ** 2
    assert grad[1].item() == pytest.approx(0.0 if expected < 1e-4 else -slope, rel=rel)
    softplus = F.softplus(torch.tensor(value, dtype=torch.float64)).item()
    assert soft == pytest.approx(-max(softplus, 1e-4), rel=rel)
    assert soft < 0
