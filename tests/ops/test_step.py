"""mamba3_step against the scan over the same tokens."""

import pytest
import torch
from compare import TOLERANCE, assert_close, gradients, scan_inputs, turned

from mamba3.ops import Mamba3State, mamba3_scan, mamba3_step, use_backend

PER_TOKEN = ("x", "b", "c", "dt", "a", "lam", "rate", "z")
SHAPES = {
    "siso": {},
    "siso-norm-groups": {"norm": True, "groups": 2, "headdim": 16},
    "siso-no-gate": {"gate": False, "heads": 5, "angles": 5},
    "siso-no-rotation": {"angles": 0, "heads": 1},
    "mimo": {"mimo": True, "rank": 4, "headdim": 24, "d_state": 48},
    "mimo-norm-groups": {"mimo": True, "rank": 3, "norm": True, "groups": 4, "angles": 5},
    "mimo-no-gate": {"mimo": True, "rank": 1, "gate": False},
}


def walk(call, length):
    """Outputs and final state by single steps."""
    state, ys = call["state"], []
    for i in range(length):
        token = {k: t[:, i] if k in PER_TOKEN else t for k, t in call.items()}
        y, state = mamba3_step(**(token | {"state": state}))
        ys.append(y)
    return torch.stack(ys, 1), *turned(state)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_one_pass(shape, backend):
    tensors, call = scan_inputs(length=5, **SHAPES[shape])
    with use_backend("reference"):
        y, state = mamba3_scan(**call)
    expected = (y, *turned(state))
    with use_backend(backend):
        got = walk(call, 5)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    wanted = gradients(expected, tensors)
    assert_close(gradients(got, tensors), wanted, 2 * TOLERANCE[torch.float64], "gradient")


def test_bfloat16_inputs_keep_a_float32_state():
    _, call = scan_inputs(length=6, dtype=torch.bfloat16)
    wide = {k: t if k == "state" else t.double() for k, t in call.items()}
    wide["state"] = Mamba3State(*(t.double() for t in call["state"]))
    call["state"] = Mamba3State(*(t.float() for t in call["state"]))
    with torch.no_grad():
        expected, got = walk(wide, 6), walk(call, 6)
    assert got[0].dtype == torch.bfloat16
    assert {t.dtype for t in got[1:]} == {torch.float32}
    assert_close(got[:1], expected[:1], TOLERANCE[torch.bfloat16], "output")
    assert_close(got[1:], expected[1:], TOLERANCE[torch.float32], "state")


def test_nothing_passed_in_changes():
    tensors, call = scan_inputs(length=1, mimo=True, rank=2)
    before = {name: t.detach().clone() for name, t in tensors.items()}
    with torch.no_grad():
        walk(call, 1)
        for _ in range(100):
            walk(call, 1)
    assert all(torch.equal(t, before[name]) for name, t in tensors.items())


def test_phase_does_not_drift():
    steps = 100_000
    generator = torch.Generator().manual_seed(0)
    rate = 3.1 * torch.rand(1, 2, generator=generator)
    dt = torch.rand(steps, 1, 1, generator=generator)
    zeros, maps, bias = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4)
    state = Mamba3State.zeros(1, heads=1, headdim=1, d_state=4, rank=1, angles=2)
    with torch.inference_mode():
        for i in range(steps):
            _, state = mamba3_step(
                zeros, maps, maps, dt[i], zeros[0], zeros[0], rate, bias, bias, bias[0, 0, :1],
                state=state,
            )  # fmt: skip
    exact = rate.double() * dt.double().sum()
    drift = torch.remainder(state.phase[0].double() - exact + torch.pi, 2 * torch.pi) - torch.pi
    assert drift.abs().max() < 1e-3


def test_state_of_another_batch():
    _, call = scan_inputs(length=1)
    token = {k: t[:, 0] if k in PER_TOKEN else t for k, t in call.items()}
    token["state"] = token["state"].reorder(torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="holds 3 sequences, the input 2"):
        mamba3_step(**token)


@pytest.mark.parametrize("wrong", [-2, 2])
def test_slot_out_of_range(wrong):
    _, call = scan_inputs(length=1)
    token = {k: t[:, 0] if k in PER_TOKEN else t for k, t in call.items()}
    index = torch.tensor([0, wrong])
    with torch.no_grad(), pytest.raises(ValueError, match=rf"hold {wrong}, expected -1 .* below 2"):
        mamba3_step(**token, inplace=True, state_indices=index)


@pytest.mark.parametrize("field", Mamba3State._fields)
def test_state_of_another_layer(field):
    _, call = scan_inputs(length=1)
    token = {k: t[:, 0] if k in PER_TOKEN else t for k, t in call.items()}
    t = getattr(token["state"], field)
    token["state"] = token["state"]._replace(**{field: t.repeat_interleave(2, -1)})
    with pytest.raises(ValueError, match=rf"state.{field} has shape"):
        mamba3_step(**token)
