"""Kernels of selective_scan, causal_conv and their steps against references in float64."""

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, gradients
from test_selective import check_conv, inputs

from mamba3.ops import (
    causal_conv,
    causal_conv_step,
    selective_scan,
    selective_step,
    use_backend,
)

BOUNDS = [0, 3, 3, 36, 37]


def check(given, **options):
    """The kernels on these inputs, against the reference; returns what they gave."""
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    with use_backend("reference"):
        expected = selective_scan(**exact, **options)
    wanted = gradients(expected, exact)
    with use_backend("triton"):
        got = selective_scan(**given, **options)
        tolerance = TOLERANCE[given["x"].dtype]
        assert [t.dtype for t in got] == [given["x"].dtype, torch.float32]
        assert_close(got, expected, tolerance)
        assert_close(gradients(got, given), wanted, 2 * tolerance)
    return got


@pytest.fixture(params=[1, 100], ids=["whole", "segments"])
def cut(request, monkeypatch):
    """Sequences in one piece, or cut into segments that start from those before."""
    from mamba3.ops.triton import selective_launch

    monkeypatch.setattr(selective_launch, "PROGRAMS_PER_SM", request.param)
    monkeypatch.setattr(selective_launch, "multiprocessors", lambda device: 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scan(cut, packed, dtype):
    shape = {"batch": 1, "sequences": len(BOUNDS) - 1} if packed else {"batch": 2}
    options = {"softplus": True}
    if packed:
        options["cu_seqlens"] = torch.tensor(BOUNDS, device=DEVICE)
    check(inputs(**shape, length=37, width=5, d_state=2, dtype=dtype), **options)


def test_without_skip_gate_and_start(cut):
    given = inputs(batch=1, length=35, width=70, d_state=2, dtype=torch.float32)
    given = {name: t for name, t in given.items() if name not in ("d", "z", "h")}
    given["dt"] = given["dt"].detach().exp().requires_grad_()
    check(given)


def test_views_of_wider_rows():
    """x, dt, z, b and c as slices of projections, as the layer has them."""
    given = inputs(length=9, width=6, d_state=4, dtype=torch.float32)
    wide = torch.cat([given[name].detach() for name in ("x", "z", "dt", "b", "c")], -1)
    parts = wide.split((6, 6, 6, 4, 4), -1)
    views = dict(zip(("x", "z", "dt", "b", "c"), parts, strict=True))
    check({name: views.get(name, t).detach().requires_grad_() for name, t in given.items()})


def test_extreme_steps():
    """Tiny and huge step sizes: the softplus keeps its digits, decays vanish without a NaN."""
    given = inputs(length=20, dtype=torch.float32)
    given["dt"] = (12 * given["dt"].detach()).requires_grad_()
    check(given, softplus=True)
    assert given["dt"].min() < -15 < 20 < given["dt"].max()


def test_only_some_gradients():
    given = inputs(length=20, dtype=torch.float32)
    given = {name: t.detach() for name, t in given.items()}
    given["a"].requires_grad_()
    with use_backend("triton"):
        y, _ = selective_scan(**given, softplus=True)
        [got] = torch.autograd.grad(y.sum(), [given["a"]])
    exact = {name: t.detach().double() for name, t in given.items()}
    exact["a"].requires_grad_()
    with use_backend("reference"):
        y, _ = selective_scan(**exact, softplus=True)
    [expected] = torch.autograd.grad(y.sum(), [exact["a"]])
    assert_close(got, expected, 2 * TOLERANCE[torch.float32])


def test_nothing_is_kept_where_nothing_is_differentiated(monkeypatch):
    """Though weights require gradients."""
    from mamba3.ops.triton.selective_launch import SelectiveScan

    kept, forward = [], SelectiveScan.forward
    monkeypatch.setattr(
        SelectiveScan, "forward", lambda self, inputs, training: (
            kept.append(training), forward(self, inputs, training)
        )[1],
    )  # fmt: skip
    given = inputs(length=18, width=3, d_state=2, dtype=torch.float32)
    with use_backend("triton"):
        y, h = selective_scan(**given, softplus=True)
        with torch.no_grad():
            again = selective_scan(**given, softplus=True)
    assert kept == [True, False]
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], h)


def test_same_bits_again():
    given = inputs(length=18, width=3, d_state=2, dtype=torch.float32)
    with use_backend("triton"):
        first, second = (selective_scan(**given, softplus=True) for _ in range(2))
        grads = [gradients(each, given) for each in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in given)


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv(taps, packed, dtype):
    with use_backend("triton"):
        check_conv(taps, packed, dtype)


@torch.no_grad()
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps(inplace, dtype):
    """Token by token, from rows of wider ones, it is what the whole sequences are."""
    given = {name: t.detach() for name, t in inputs(length=5, width=70, dtype=dtype).items()}
    given["h"] = given["h"].float()
    wide = {name: t.double() for name, t in given.items()}
    weight, bias, state = torch.randn(70, 4), torch.randn(70), torch.randn(2, 70, 3)
    weight, bias, state = (t.to(DEVICE) for t in (weight, bias, state))
    with use_backend("reference"):
        expected, final = selective_scan(**wide, softplus=True)
        seen, kept = causal_conv(wide["x"], weight.double(), bias.double(), state=state.double())
    h, ys, convolved = given["h"].clone(), [], []
    rows = torch.cat([given[name] for name in ("x", "z", "dt", "b", "c")], -1)
    with use_backend("triton"):
        for t in range(5):
            token = dict(zip(("x", "z", "dt", "b", "c"),
                             rows[:, t].split((70, 70, 70, 3, 3), -1), strict=True))  # fmt: skip
            y, new = selective_step(**token, a=given["a"], d=given["d"], h=h, softplus=True,
                                    inplace=inplace)  # fmt: skip
            assert (new is h) == inplace
            h = new
            ys.append(y)
            y, new = causal_conv_step(token["x"], weight, bias, state, inplace=inplace)
            assert (new is state) == inplace
            state = new
            convolved.append(y)
    assert ys[0].dtype == convolved[0].dtype == dtype
    assert_close((torch.stack(ys, 1), h), (expected, final), TOLERANCE[dtype])
    assert_close((torch.stack(convolved, 1), state), (seen, kept), TOLERANCE[dtype])
