"""Orthogonalisation against singular value decompositions in float64."""

import math
import sys

import pytest
import torch

from mamba3.optim.orthogonalize import (
    PRESETS,
    frobenius,
    lr_factor,
    orthogonalize,
    singular_values,
)

FORMS = [{"gram": False}, {"trace_norm": True}, {"gram": True}]
names = pytest.mark.parametrize("preset", PRESETS)
forms = pytest.mark.parametrize("form", FORMS, ids=["in turn", "trace", "gram"])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_singular_values(s, columns, seed=0):
    """A matrix with given singular values, and its polar factor."""
    u, _, v = torch.linalg.svd(normal(len(s), columns, seed=seed), full_matrices=False)
    return u * s @ v, u @ v


def off(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("preset", "lowest", "low", "high"),
    [
        ("keller5", 1e-2, 0.68, 1.135),
        ("polar_express5", 3e-3, 0.858, 1.142),
        ("anvil6", 1e-2, 0.9995, 1.0005),
        ("anvil6", 3e-3, 0.988, 1.0005),
    ],
)
def test_where_singular_values_end(preset, lowest, low, high):
    ends = singular_values(torch.logspace(math.log10(lowest), 0, 20001), preset)
    assert low < ends.min() < ends.max() < high


@forms
@pytest.mark.parametrize(("preset", "tolerance"), [("anvil6", 0.01), ("polar_express5", 0.11)])
@pytest.mark.parametrize("shape", [(256, 768), (2048, 512)])
def test_bfloat16_is_near_the_polar_factor(shape, preset, tolerance, form):
    x = normal(*shape)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert off(orthogonalize(x, preset, dtype=torch.bfloat16, **form), u @ v) < tolerance


@names
@forms
@pytest.mark.parametrize("condition", [1e2, 1e3])
def test_every_singular_value_goes_where_the_maps_take_it(condition, preset, form):
    s = torch.logspace(0, -math.log10(condition), 48, dtype=torch.float64)
    x, _ = with_singular_values(s, 130)
    got = orthogonalize(x, preset, **form)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    expected = u * singular_values(s / s.norm(), preset) @ v
    assert got.dtype == torch.float64
    assert off(got, expected) < 1e-11
    half = orthogonalize(x, preset, dtype=torch.bfloat16, **form)
    assert torch.linalg.matrix_norm(half.double(), 2) < 1.25
    # Singular values under bfloat16's rounding of the largest are lost; float16's is finer.
    tolerance = 0.02 if form.get("gram") else 0.04 if condition == 1e2 else 0.15
    assert off(half, expected) < tolerance


@names
@forms
@pytest.mark.parametrize("seed", range(12))
def test_signs_of_rank_one_do_not_blow_up(seed, preset, form):
    """Rounding puts such matrices above their own norm; the first map must bear it."""
    rows, columns = 16 << seed % 4, 64 << seed % 3
    signs = [normal(n, seed=seed + n).sign() for n in (rows, columns)]
    x = torch.outer(*signs) * (1 + 2.0 ** -(6 + seed % 3) * normal(rows, columns, seed=seed).sign())
    got = orthogonalize(x.bfloat16(), preset, dtype=torch.bfloat16, **form).double()
    assert 0.6 < torch.linalg.matrix_norm(got, 2) < 1.25


@names
@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_does_not_matter_and_zero_stays(dtype, preset, form):
    x = normal(24, 40).float()
    expected = orthogonalize(x, preset, dtype=dtype, **form).double()
    for scale in (1e-9, 1e-3, 1e4, 1e9):
        got = orthogonalize(x * scale, preset, dtype=dtype, **form)
        assert off(got, expected) < (1e-4 if dtype == torch.float32 else 0.05)
    zero = torch.zeros(2, 24, 40)
    assert torch.equal(orthogonalize(zero, preset, dtype=dtype, **form), zero.to(dtype))


@names
@forms
def test_transposes_and_batches(preset, form):
    x = normal(3, 2, 20, 33)
    got = orthogonalize(x, preset, **form)
    assert got.shape == x.shape
    assert torch.equal(orthogonalize(x.mT, preset, **form).mT, got)
    for i in range(3):
        assert off(orthogonalize(x[i, 1], preset, **form), got[i, 1]) < 1e-12


def test_gram_space_is_taken_where_it_pays(monkeypatch):
    module = sys.modules["mamba3.optim.orthogonalize"]
    taken = []
    monkeypatch.setattr(module, "_in_gram_space", lambda x, *_: taken.append(x.shape) or x)
    for shape in ((256, 384), (256, 383), (255, 999), (800, 260)):
        orthogonalize(torch.zeros(shape))
    assert taken == [(1, 256, 384), (1, 260, 800)]
    orthogonalize(torch.zeros(256, 512), trace_norm=True)
    assert len(taken) == 2


def test_norms_of_half_precision_do_not_overflow():
    x = torch.full((1, 200, 300), 60000.0, dtype=torch.float16)
    assert frobenius(x).item() == pytest.approx(6e4 * math.sqrt(6e4), rel=1e-3)


@pytest.mark.parametrize(
    ("rule", "shape", "factor"),
    [
        ("match_rms", (100, 25), 2.0),
        ("match_rms", (25, 100), 2.0),
        ("original", (100, 25), 2.0),
        ("original", (25, 100), 1.0),
        ("spectral", (25, 100), 0.5),
    ],
)
def test_lr_factor(rule, shape, factor):
    assert lr_factor(rule, *shape) == pytest.approx(factor)


def test_errors():
    with pytest.raises(ValueError, match=r"matrices .* got \(3,\)"):
        orthogonalize(torch.zeros(3))
    with pytest.raises(ValueError, match="'keller' is none of keller5, polar_express5, anvil6"):
        orthogonalize(torch.zeros(3, 3), "keller")
    with pytest.raises(ValueError, match="trace_norm"):
        orthogonalize(torch.zeros(3, 3), gram=True, trace_norm=True)
    with pytest.raises(ValueError, match="'rms' is none of match_rms"):
        lr_factor("rms", 1, 1)
