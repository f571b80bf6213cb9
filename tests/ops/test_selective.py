"""selective_scan, causal_conv and their steps: against the recurrence and torch's convolution."""

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, TOLERANCE, assert_close, gradients

from mamba3.ops import (
    causal_conv,
    causal_conv_step,
    selective,
    selective_scan,
    selective_step,
    use_backend,
)

BOUNDS = [0, 3, 3, 10, 11]


def inputs(batch=2, length=11, width=5, d_state=3, sequences=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        t = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        return t.requires_grad_()

    a = (-normal(width, d_state).detach().exp()).requires_grad_()
    rows, maps = (batch, length, width), (batch, length, d_state)
    return {
        "x": normal(*rows), "dt": normal(*rows), "a": a, "b": normal(*maps), "c": normal(*maps),
        "d": normal(width), "z": normal(*rows), "h": normal(sequences or batch, width, d_state),
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_in_chunk", [1, 4, 100])
def test_scan(monkeypatch, packed, dtype, tokens_in_chunk):
    """Chunks of any size against the reference in float64, forward and every gradient."""
    options = {"softplus": True}
    shape = {"batch": 1, "sequences": len(BOUNDS) - 1} if packed else {}
    if packed:
        options["cu_seqlens"] = torch.tensor(BOUNDS, device=DEVICE)
    given = inputs(**shape, dtype=dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    with use_backend("reference"):
        expected = selective_scan(**exact, **options)
    wanted = gradients(expected, exact)
    monkeypatch.setattr(selective, "CHUNK_ELEMENTS", tokens_in_chunk * given["h"][:1].numel())
    got = selective_scan(**given, **options)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.promote_types(dtype, torch.float32)
    assert_close(got, expected, TOLERANCE[dtype])
    assert_close(gradients(got, given), wanted, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("taps", [1, 3])
def test_inference_is_the_same_and_leaves_its_inputs(taps):
    """Where no gradient is recorded, passes run in place: never in the caller's tensors."""
    given = inputs()
    wanted = selective_scan(**given)
    x, weight = given["x"], torch.ones(5, taps, dtype=torch.float64, device=DEVICE)
    wanted_conv = causal_conv(x, weight)
    before = {name: t.detach().clone() for name, t in given.items()}
    with torch.no_grad():
        assert_close(selective_scan(**given), wanted, 1e-12)
        assert_close(causal_conv(x, weight), wanted_conv, 1e-12)
    assert all(torch.equal(t, before[name]) for name, t in given.items())


def test_reference_is_the_recurrence():
    """One channel and one token after the other, in Python's own arithmetic."""
    given = {name: t.detach() for name, t in inputs(1, 4, 2, 2).items()}
    h = given["h"][0].tolist()
    ys = []
    for t in range(4):
        y = []
        for i in range(2):
            dt, x = given["dt"][0, t, i].exp().item(), given["x"][0, t, i].item()
            total = given["d"][i].item() * x
            for n in range(2):
                decay = 2.718281828459045 ** (dt * given["a"][i, n].item())
                h[i][n] = decay * h[i][n] + dt * x * given["b"][0, t, n].item()
                total += h[i][n] * given["c"][0, t, n].item()
            z = given["z"][0, t, i].item()
            y.append(total * z / (1 + 2.718281828459045**-z))
        ys.append(y)
    with use_backend("reference"):
        y, final = selective_scan(**given | {"dt": given["dt"].exp()})
    assert_close(y[0].cpu(), torch.tensor(ys, dtype=torch.float64), 1e-12)
    assert_close(final[0].cpu(), torch.tensor(h, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("inplace", [False, True])
def test_steps_are_the_scan(inplace):
    given = inputs()
    y, final = selective_scan(**given, softplus=True)
    wanted = gradients((y, final), given)
    weights = {name: given[name] for name in "ad"}
    h, ys = given["h"].detach().clone() if inplace else given["h"], []
    for t in range(y.shape[1]):
        token = {name: given[name][:, t] for name in ("x", "dt", "b", "c", "z")}
        out, new = selective_step(**token, **weights, h=h, softplus=True, inplace=inplace)
        assert (new is h) == inplace
        h = new
        ys.append(out)
    assert_close((torch.stack(ys, 1), h), (y, final), 1e-12)
    if not inplace:
        assert_close(gradients((torch.stack(ys, 1), h), given), wanted, 1e-12)


def test_what_does_not_fit_is_said():
    given = inputs()
    with pytest.raises(ValueError, match=r"c has shape \(2, 11, 2\), expected \(2, 11, 3\)"):
        selective_scan(**given | {"c": given["c"][..., :2]})
    with pytest.raises(ValueError, match=r"the state has shape \(1, 5, 3\), expected \(2, 5, 3\)"):
        selective_scan(**given | {"h": given["h"][:1]})
    with pytest.raises(ValueError, match=r"expected x \(B, L, D\) with L >= 1"):
        selective_scan(**given | {"x": given["x"][0]})


def check_conv(taps, packed, dtype):
    """Every sequence alone, by torch's convolution in float64, after the tokens of its state."""
    generator = torch.Generator().manual_seed(1)
    bounds = BOUNDS if packed else [0, 11]
    rows, sequences = (1, len(bounds) - 1) if packed else (2, 2)
    shapes = {
        "x": (rows, 11, 5), "weight": (5, taps), "bias": (5,), "state": (sequences, 5, taps - 1),
    }  # fmt: skip
    given = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(DEVICE, dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    ys, states = [], []
    for i in range(sequences):
        row = (0, slice(bounds[i], bounds[i + 1])) if packed else i
        padded = torch.cat((exact["state"][i], exact["x"][row].T), -1)
        if padded.shape[-1] >= taps:
            y = F.conv1d(padded, exact["weight"][:, None], exact["bias"], groups=5)
            ys.append(F.silu(y).T)
        states.append(padded[:, padded.shape[-1] - (taps - 1) :])
    expected = torch.cat(ys).view(rows, 11, 5), torch.stack(states)
    cu_seqlens = torch.tensor(bounds, device=DEVICE) if packed else None
    got = causal_conv(**given, cu_seqlens=cu_seqlens)
    assert_close(got, expected, TOLERANCE[dtype])
    held = {name: t for name, t in given.items() if t.numel()}
    wanted = gradients(expected, {name: exact[name] for name in held})
    assert_close(gradients(got, held), wanted, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_conv(taps, packed, dtype):
    check_conv(taps, packed, dtype)


@pytest.mark.parametrize("inplace", [False, True])
def test_conv_steps_are_the_convolution(inplace):
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE)
        for shape in ((2, 6, 5), (5, 4), (5,))
    )
    y, final = causal_conv(x, weight, bias)
    state = torch.zeros_like(final)
    for t in range(6):
        out, new = causal_conv_step(x[:, t], weight, bias, state, inplace=inplace)
        assert (new is state) == inplace
        state = new
        assert_close(out, y[:, t], 1e-12)
    assert_close(state, final, 1e-12)
