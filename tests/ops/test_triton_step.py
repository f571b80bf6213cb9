"""The decoding kernel against the reference: on a GPU if there is one, else interpreted."""

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, call_arguments, scan_inputs, turned

from mamba3.ops import Mamba3State, mamba3_step, use_backend

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


BACKENDS = ["reference", "torch", "triton"]


def weights_of(call):
    """Clones of everything in a call that is no state."""
    return [t.clone() for t in (*call.values(), *call.get("mimo", ())) if torch.is_tensor(t)]


def bits(t):
    """Integers that tell NaNs apart."""
    return t.view({4: torch.int32, 2: torch.int16}[t.element_size()])


def same_bits(some, others):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(some, others, strict=True))


def poisoned_pool(state, slots, indices, fill=float("nan")):
    """A pool that holds the state's rows at the slots of `indices`, and `fill` elsewhere."""
    pool = Mamba3State(*(t.new_full((slots, *t.shape[1:]), fill) for t in state))
    for row, slot in enumerate(indices):
        if slot >= 0:
            for whole, own in zip(pool, state, strict=True):
                whole[slot] = own[row]
    return pool


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ["siso-norm-groups", "siso-P-in-parts", "mimo-R4"])
def test_in_place_equals_functional(shape, backend):
    calls, state = tokens(3, **SHAPES[shape])
    expected, functional = [], state
    own = Mamba3State(*(t.clone() for t in state))
    pointers = [t.data_ptr() for t in own]
    with use_backend(backend), torch.no_grad():
        for call in calls:
            y, functional = mamba3_step(**call, state=functional)
            expected.append(y)
            got, returned = mamba3_step(**call, state=own, inplace=True)
            assert torch.equal(got, y)
            assert all(map(torch.equal, own, functional))
            assert returned is own
    assert [t.data_ptr() for t in own] == pointers


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("indices", [[4, 1, 2], [3, -1, 1], [-1, 5, -1], [-1, -1, -1], [-1, 0, 5]])
def test_slots_of_a_pool(indices, backend, index_dtype):
    calls, state = tokens(2, batch=3, mimo=True, rank=2, headdim=16)
    pool = poisoned_pool(state, 6, indices)
    untouched = [slot for slot in range(6) if slot not in indices]
    before = [t[untouched].clone() for t in pool]
    expected = walk(calls, state, backend)[0]
    ys = []
    with use_backend(backend), torch.no_grad():
        for call in calls:
            index = torch.tensor(indices, dtype=index_dtype, device=DEVICE)
            y, returned = mamba3_step(**call, state=pool, inplace=True, state_indices=index)
            ys.append(y)
    live = [row for row, slot in enumerate(indices) if slot >= 0]
    skipped = [row for row, slot in enumerate(indices) if slot < 0]
    got = torch.stack(ys)
    assert torch.equal(got[:, live], expected[:, live])
    assert not got[:, skipped].any()
    assert returned is pool
    assert same_bits([t[untouched] for t in pool], before)
    with use_backend(backend), torch.no_grad():
        for call in calls:
            _, state = mamba3_step(**call, state=state)
    for row in live:
        assert all(
            torch.equal(t[indices[row]], own[row]) for t, own in zip(pool, state, strict=True)
        )


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_but_its_slots_is_written(shape, state_dtype):
    """Neighbours in the pool and every other argument keep their bits, whatever the sizes."""
    calls, state = tokens(1, **SHAPES[shape])
    state = state._replace(h=state.h.to(state_dtype))
    indices = [1, 3][: len(state.h)]
    pool = poisoned_pool(state, 5, indices)
    before, call = weights_of(calls[0]), calls[0]
    index = torch.tensor(indices, device=DEVICE)
    with use_backend("triton"), torch.no_grad():
        mamba3_step(**call, state=pool, inplace=True, state_indices=index)
        _, expected = mamba3_step(**call, state=state)
    assert same_bits(weights_of(call), before)
    for slot in range(5):
        rows = [t[slot] for t in pool]
        if slot in indices:
            assert same_bits(rows, [t[indices.index(slot)] for t in expected])
        else:
            assert all(torch.isnan(t).all() for t in rows)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_hundred_steps_change_no_weight(backend):
    calls, state = tokens(1, headdim=16, heads=3, d_state=6, batch=1)
    before = weights_of(calls[0])
    with use_backend(backend), torch.no_grad():
        for _ in range(100):
            mamba3_step(**calls[0], state=state, inplace=True)
    assert same_bits(weights_of(calls[0]), before)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_in_place_where_the_state_is_a_view(backend):
    calls, state = tokens(1)
    with use_backend(backend), torch.no_grad():
        y, expected = mamba3_step(**calls[0], state=state)
        h = state.h.mT.contiguous().mT
        x = torch.stack((state.x, state.x), -1)[..., 0]
        view = state._replace(h=h, x=x)
        got, _ = mamba3_step(**calls[0], state=view, inplace=True)
    assert not h.is_contiguous()
    # A library's matrix product may sum in another order for another layout.
    assert_close([got, *view], [y, *expected], 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_sees_a_change_in_place(backend):
    calls, state = tokens(1)
    factor = torch.ones_like(state.h, requires_grad=True)
    product = (factor * state.h).sum()
    with use_backend(backend), torch.no_grad():
        mamba3_step(**calls[0], state=state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_records_no_gradient(backend):
    calls, state = tokens(1)
    calls[0]["b_bias"].requires_grad_()
    before = [t.clone() for t in state]
    with use_backend(backend):
        with pytest.raises(ValueError, match=r"inplace=True records no gradient.*torch.no_grad"):
            mamba3_step(**calls[0], state=state, inplace=True)
        assert all(map(torch.equal, state, before))
        with torch.no_grad():
            mamba3_step(**calls[0], state=state, inplace=True)
    assert not torch.equal(state.h, before[0])


@pytest.mark.parametrize(
    ("indices", "inplace", "message"),
    [
        (torch.tensor([0, 1]), False, "pass inplace=True"),
        (torch.tensor([0.0, 1.0]), True, r"int32 or int64 of shape \(2,\).*got torch.float32"),
        (torch.tensor([0]), True, r"of shape \(2,\).*of shape \(1,\)"),
        (torch.tensor([0, 1], device="meta"), True, "are on meta, the input on"),
    ],
)
def test_wrong_indices(indices, inplace, message):
    calls, state = tokens(1)
    if indices.device.type != "meta":
        indices = indices.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        mamba3_step(**calls[0], state=state, inplace=inplace, state_indices=indices)


def test_the_kernel_writes_to_no_slot_out_of_range():
    """On a GPU nothing else looks at the numbers."""
    from mamba3.ops.triton import step as module

    calls, state = tokens(1, gate=False)
    before = [t.clone() for t in state]
    index = torch.tensor([2, 1 << 40], device=DEVICE)
    call = {"z": None} | calls[0]
    names = ("x", "b", "c", "dt", "a", "lam", "rate", "b_bias", "c_bias", "d", "z")
    y, _ = module.step(*(call[n] for n in names), None, None, 1e-5, state, True, index)
    assert not y.any()
    assert all(map(torch.equal, state, before))
