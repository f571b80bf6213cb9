"""The decoding kernel against the reference: on a GPU if there is one, else interpreted."""

import pytest
import torch
from compare import TOLERANCE, assert_close, call_arguments, scan_inputs, turned

from mamba3.ops import Mamba3State, mamba3_step, step, use_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PER_TOKEN = ("x", "b", "c", "dt", "a", "lam", "rate", "z")
SHAPES = {
    "siso": {},
    "siso-norm-groups": {"norm": True, "groups": 2, "headdim": 16},
    "siso-no-gate": {"gate": False, "heads": 5, "angles": 5},
    "siso-no-rotation": {"angles": 0, "heads": 1},
    "siso-P80-N48": {"headdim": 80, "d_state": 48, "angles": 12, "heads": 3, "batch": 1},
    "mimo-P64-N128": {
        "headdim": 64,
        "d_state": 128,
        "angles": 32,
        "heads": 1,
        "batch": 1,
        "mimo": True,
        "rank": 2,
    },
    "siso-P24-N256": {"headdim": 24, "d_state": 256, "angles": 64, "heads": 1, "batch": 1},
    "siso-P-in-parts": {"headdim": 50, "d_state": 256, "angles": 128, "heads": 2, "batch": 1},
    "siso-H24": {"heads": 24, "headdim": 8, "groups": 3, "d_state": 6, "batch": 1},
    "mimo-R1": {"mimo": True, "rank": 1},
    "mimo-R3-norm-groups": {"mimo": True, "rank": 3, "norm": True, "groups": 4, "angles": 5},
    "mimo-R4": {"mimo": True, "rank": 4, "headdim": 24, "d_state": 48},
    "mimo-R8-no-gate": {"mimo": True, "rank": 8, "heads": 1, "gate": False, "norm": True},
}


def tokens(length, dtype=torch.float32, **shape):
    """Calls of `mamba3_step`, one a token, without their state, and the first state."""
    tensors, _ = scan_inputs(length=length, dtype=dtype, **shape)
    call = call_arguments({name: t.detach().to(DEVICE) for name, t in tensors.items()})
    state = Mamba3State(*(t.float() for t in call.pop("state")))
    calls = [{k: t[:, i] if k in PER_TOKEN else t for k, t in call.items()} for i in range(length)]
    return calls, state


def walk(calls, state, backend):
    ys = []
    with use_backend(backend), torch.no_grad():
        for call in calls:
            y, state = mamba3_step(**call, state=state)
            ys.append(y)
    return torch.stack(ys), *turned(state)


def in_float64(calls, state):
    def widen(t):
        if isinstance(t, tuple):
            return tuple(map(widen, t))
        return t.double() if isinstance(t, torch.Tensor) else t

    return [{k: widen(t) for k, t in call.items()} for call in calls], state.to(torch.float64)


@pytest.fixture
def launches(monkeypatch):
    """Counts the kernel's launches, since falling back would pass every comparison."""
    from mamba3.ops.triton import step as module

    counted = []
    launch = module.step

    def counting(*args):
        counted.append(1)
        return launch(*args)

    monkeypatch.setattr(module, "step", counting)
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, dtype, launches):
    calls, state = tokens(3, dtype, **SHAPES[shape])
    expected = walk(*in_float64(calls, state), "reference")
    assert not launches
    got = walk(calls, state, "triton")
    assert len(launches) == 3
    assert got[0].dtype == dtype
    assert_close(got[:1], expected[:1], TOLERANCE[dtype], "output")
    assert_close(got[1:], expected[1:], TOLERANCE[torch.float32], "state")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_half_precision_state(backend):
    calls, state = tokens(3, mimo=True, rank=2)
    expected = walk(*in_float64(calls, state), "reference")
    got = walk(calls, state._replace(h=state.h.bfloat16()), backend)
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16] + [torch.float32] * 3
    assert_close(got[:2], expected[:2], 2 * TOLERANCE[torch.bfloat16], "output and h")
    assert_close(got[2:], expected[2:], TOLERANCE[torch.float32], "state")


def test_nothing_passed_in_changes():
    calls, state = tokens(1, mimo=True, rank=2, norm=True)
    before = [t.clone() for t in state]
    once = walk(calls, state, "triton")
    again = walk(calls, state, "triton")
    assert all(map(torch.equal, before, state))
    assert all(map(torch.equal, once, again))


def test_rows_of_a_wider_projection():
    calls, state = tokens(1, groups=2)
    expected = walk(calls, state, "triton")
    for name in ("x", "z", "b", "dt", "rate"):
        t = calls[0][name]
        wide = torch.randn(len(t), 3 * t[0].numel(), device=DEVICE)
        view = wide[:, t[0].numel() : 2 * t[0].numel()].view(t.shape)
        calls[0][name] = view.copy_(t)
    assert calls[0]["x"].stride(0) == 3 * calls[0]["x"][0].numel()
    got = walk(calls, state, "triton")
    assert all(map(torch.equal, got, expected))


def test_what_the_kernel_does_not_do_runs_on_torch(launches):
    calls, state = tokens(1)
    calls[0]["x"].requires_grad_()
    with use_backend("triton"):
        y, _ = mamba3_step(**calls[0], state=state)
    (grad,) = torch.autograd.grad(y.sum(), calls[0]["x"])
    assert torch.isfinite(grad).all()
    wide_calls, wide = in_float64(calls, state)
    got = walk(wide_calls, wide, "triton")
    assert_close(got, walk(wide_calls, wide, "reference"), TOLERANCE[torch.float64], "float64")
    assert not launches
    assert step._needs_more_than_the_kernel([wide.h])
