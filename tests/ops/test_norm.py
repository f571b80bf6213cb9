"""rms_norm against torch's."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, gradients

from mamba3.ops import rms_norm


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return t.requires_grad_()


@pytest.mark.parametrize("shape", [(7,), (3, 5, 10), (2, 3, 1)])
def test_equals_torch(shape):
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    expected = F.rms_norm(x, shape[-1:], weight, 1e-3)
    got = rms_norm(x, weight, 1e-3)
    assert_close(got, expected, 1e-14, "output")
    named = {"x": x, "weight": weight}
    assert_close(gradients((got,), named), gradients((expected,), named), 1e-13, "gradient")


def test_one_weight_a_group():
    x, weight = normal(4, 2, 3, 6), normal(2, 1, 6, seed=1)
    expected = F.rms_norm(x, (6,), eps=1e-5) * weight
    got = rms_norm(x, weight)
    assert_close(got, expected, 1e-14, "output")
    named = {"x": x, "weight": weight}
    assert_close(gradients((got,), named), gradients((expected,), named), 1e-13, "gradient")


def test_half_precision_is_computed_in_float32():
    x, weight = normal(5, 64, dtype=torch.bfloat16), normal(64, seed=1, dtype=torch.bfloat16)
    expected = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    got = rms_norm(x, weight)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())


def test_zeros_and_extremes():
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x, torch.ones(8))
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert torch.isfinite(x.grad).all()
    large = torch.full((1, 8), 1e15)
    assert_close(rms_norm(large, torch.ones(8)), torch.ones(1, 8), 1e-6)


def test_bad_shapes():
    with pytest.raises(ValueError, match="expected x"):
        rms_norm(torch.ones(3, 4), torch.ones(5))
