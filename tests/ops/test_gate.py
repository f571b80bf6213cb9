"""The gate kernels against the reference: on a GPU if there is one, else interpreted."""

from functools import partial

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, gradients

from mamba3.ops import reference
from mamba3.ops.gate import gate_and_mix

EPS = 1e-3
FORMS = {
    "siso": {},
    "siso-norm": {"norm": True},
    "siso-norm-no-gate": {"norm": True, "gate": False, "headdim": 6},
    "siso-P24": {"headdim": 24, "tokens": 130},
    "siso-one-token": {"tokens": 1, "heads": 1},
    "mimo-R1": {"rank": 1, "headdim": 80, "norm": True},
    "mimo-R3": {"rank": 3, "headdim": 24},
    "mimo-R3-norm": {"rank": 3, "headdim": 6, "norm": True},
    "mimo-R4-no-gate": {"rank": 4, "gate": False},
    "mimo-R4-norm-no-gate": {"rank": 4, "gate": False, "norm": True, "headdim": 128},
    "mimo-R8": {"rank": 8, "headdim": 80, "heads": 2},
}


def inputs(dtype, *, tokens=37, heads=3, rank=None, headdim=64, gate=True, norm=False):
    """Random arguments by name; z is rows of a wider projection."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float32):
        t = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        return t.requires_grad_()

    tensors = {"y": normal(tokens, heads, rank or 1, headdim, dtype=dtype)}
    if gate:
        wide = normal(tokens, heads * headdim + 24, dtype=dtype)
        tensors["z"] = wide.detach()[:, 8:-16].view(tokens, heads, headdim).requires_grad_()
    if rank:
        tensors |= {f"mimo_{s}": normal(heads, rank, headdim) for s in "zo"}
    if norm:
        tensors["norm_weight"] = normal(heads, headdim, dtype=dtype)
    return tensors


def kernel(tensors):
    given = [tensors.get(name) for name in ("y", "z", "mimo_z", "mimo_o", "norm_weight")]
    return gate_and_mix(*given, EPS)


def expected(tensors):
    """Output and gradients in float64."""
    tensors = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    mimo = (None, tensors["mimo_z"], tensors["mimo_o"]) if "mimo_o" in tensors else None
    y, norm_weight = tensors["y"].transpose(1, 2), tensors.get("norm_weight")
    out = reference.gate_and_mix(y, tensors.get("z"), mimo, norm_weight, EPS)
    return out, gradients((out,), tensors)


@pytest.fixture
def launches(monkeypatch):
    """Names of the launchers called."""
    from mamba3.ops.triton import gate as module

    called = []
    for name in ("gate_forward", "gate_backward"):

        def counting(launch, *args):
            called.append(launch.__name__)
            return launch(*args)

        monkeypatch.setattr(module, name, partial(counting, getattr(module, name)))
    return called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_equals_reference(form, dtype, launches):
    tensors = inputs(dtype, **FORMS[form])
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    out, grads = expected(tensors)
    got = kernel(tensors)
    assert got.dtype == dtype
    assert_close(got, out, tolerance, "output")
    got = gradients((got,), tensors)
    assert {n: g.dtype for n, g in got.items()} == {n: t.dtype for n, t in tensors.items()}
    assert_close(got, grads, 2 * tolerance, "gradient")
    assert launches == ["gate_forward", "gate_backward"]


def test_a_program_takes_several_tiles(monkeypatch):
    from mamba3.ops.triton import gate as module

    monkeypatch.setattr(module, "PARTIAL_ROWS", 7)
    tensors = inputs(torch.float32, tokens=50, rank=3, headdim=80, norm=True)
    out, grads = expected(tensors)
    got = kernel(tensors)
    assert_close(got, out, TOLERANCE[torch.float32], "output")
    assert_close(gradients((got,), tensors), grads, 2 * TOLERANCE[torch.float32], "gradient")


def test_any_layout():
    tensors = inputs(torch.float32, rank=3, headdim=24, norm=True)
    out, grads = expected(tensors)
    turned = {n: t.detach().mT.contiguous().mT.requires_grad_() for n, t in tensors.items()}
    assert not any(t.is_contiguous() for t in turned.values())
    got = kernel(turned)
    assert_close(got, out, TOLERANCE[torch.float32], "output")
    assert_close(gradients((got,), turned), grads, 2 * TOLERANCE[torch.float32], "gradient")


def test_large_gates_stay_finite():
    tensors = inputs(torch.float32, tokens=4, headdim=6)
    with torch.no_grad():
        tensors["z"].mul_(200)
    out, grads = expected(tensors)
    got = kernel(tensors)
    assert_close(got, out, TOLERANCE[torch.float32], "output")
    assert_close(gradients((got,), tensors), grads, 2 * TOLERANCE[torch.float32], "gradient")


def test_nothing_to_do_is_no_copy(launches):
    y = inputs(torch.float32, gate=False)["y"]
    assert kernel({"y": y}).data_ptr() == y.data_ptr()
    assert not launches
