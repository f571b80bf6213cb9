"""mamba3_scan: the chunked path against the sequential reference, and both against themselves."""

from itertools import pairwise

import pytest
import torch
from compare import (
    TOLERANCE,
    assert_close,
    call_arguments,
    error,
    gradients,
    scan_inputs,
    turned,
)

from mamba3.ops import Mamba3State, chunking, complex_state_update, mamba3_scan, use_backend
from mamba3.ops.chunking import default_chunk_size
from mamba3.ops.reference import rotate

# Sizes that users met faults at: no powers of two, one head, more heads than channels, ...
SHAPES = {
    "siso": {},
    "siso-L1": {"length": 1},
    "siso-norm": {"norm": True, "heads": 3, "headdim": 8},
    "siso-no-gate": {"gate": False, "norm": True},
    "siso-no-rotation": {"angles": 0, "heads": 1},
    "siso-full-rotation": {"angles": 5, "heads": 5, "groups": 5},
    "siso-groups": {"groups": 2, "length": 70, "d_state": 6},
    "siso-H24": {"heads": 24, "headdim": 8, "groups": 3, "d_state": 6, "batch": 1},
    "siso-P80-N48": {"heads": 1, "headdim": 80, "d_state": 48, "batch": 1, "length": 33},
    "siso-P24-N256": {"heads": 2, "headdim": 24, "d_state": 256, "batch": 1, "angles": 64},
    "siso-P48-N128": {"heads": 3, "headdim": 48, "d_state": 128, "batch": 1, "angles": 32},
    "mimo-P64-N64": {
        "heads": 2,
        "headdim": 64,
        "d_state": 64,
        "batch": 1,
        "angles": 16,
        "mimo": True,
        "rank": 2,
    },
    "siso-P128-N64": {"heads": 1, "headdim": 128, "d_state": 64, "batch": 1, "angles": 16},
    "mimo-R1": {"mimo": True},
    "mimo-R4-L1": {"mimo": True, "rank": 4, "length": 1},
    "mimo-R2-groups": {"mimo": True, "rank": 2, "groups": 2, "angles": 5},
    "mimo-R3-norm": {"mimo": True, "rank": 3, "norm": True, "length": 37, "heads": 3},
    "mimo-R4": {"mimo": True, "rank": 4, "length": 35, "headdim": 16, "d_state": 16},
    "mimo-R8": {"mimo": True, "rank": 8, "heads": 2, "norm": True, "gate": False},
}


def run(backend, tensors, **options):
    """Outputs and final state, phase turned, then all gradients."""
    with use_backend(backend):
        y, state = mamba3_scan(**call_arguments(tensors), **options)
    outputs = (y, *turned(state))
    return outputs, gradients(outputs, tensors)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunked_equals_reference(shape):
    tensors, _ = scan_inputs(**SHAPES[shape])
    expected, expected_grads = run("reference", tensors)
    got, grads = run("torch", tensors)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("chunk_size", [1, 5, 8, 64, 256])
def test_chunk_size_changes_nothing(rank, chunk_size):
    tensors, _ = scan_inputs(length=67, rank=rank, mimo=rank > 1, heads=2)
    expected, expected_grads = run("reference", tensors)
    got, grads = run("torch", tensors, chunk_size=chunk_size)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("block_elements", [1, 2000, 1 << 30])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
def test_blocks_change_nothing(monkeypatch, rank, packed, block_elements):
    monkeypatch.setattr(chunking, "BLOCK_ELEMENTS_PER_THREAD", block_elements)
    shape = {"length": 47, "rank": rank, "mimo": rank > 1, "heads": 2, "norm": True}
    options = {"chunk_size": 5}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 11, 11, 12, 40, 47])
        shape |= {"batch": 1, "sequences": 5}
    tensors, _ = scan_inputs(**shape)
    expected, expected_grads = run("reference", tensors, **options)
    got, grads = run("torch", tensors, **options)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("offset", ["q-1", "q", "q+1", "2q+3"])
@pytest.mark.parametrize("rank", [1, 4])
def test_lengths_around_a_chunk(rank, offset):
    q = default_chunk_size(rank, 1000)
    length = {"q-1": q - 1, "q": q, "q+1": q + 1, "2q+3": 2 * q + 3}[offset]
    tensors, _ = scan_inputs(length=length, rank=rank, mimo=rank > 1, heads=2, batch=1)
    expected, expected_grads = run("reference", tensors)
    got, grads = run("torch", tensors)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["siso-groups", "mimo-R3-norm"])
def test_precision(shape, dtype):
    # Half-precision inputs are exact in float64 too: only the arithmetic is being measured.
    tensors, _ = scan_inputs(**SHAPES[shape], dtype=dtype)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    expected, expected_grads = run("reference", wide)
    got, grads = run("torch", tensors)
    assert got[0].dtype == dtype
    assert_close(got[:1], expected[:1], TOLERANCE[dtype], "output")
    assert_close(got[1:], expected[1:], TOLERANCE[torch.float32], "state")
    assert_close(grads, expected_grads, 2 * TOLERANCE[dtype], "gradient")


def test_autocast_leaves_the_recurrence_in_float32():
    tensors, call = scan_inputs(dtype=torch.float32, mimo=True, rank=2, length=40)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = mamba3_scan(**call)
        grads = gradients((y,), tensors)
    plain, _ = mamba3_scan(**call)
    assert torch.equal(y, plain)
    assert_close(grads, gradients((plain,), tensors), 0.0, "gradient")


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_packed_equals_separate(backend, rank):
    lengths = [1, 17, 25, 64, 0, 3]
    shape = {"heads": 2, "rank": rank, "mimo": rank > 1, "norm": True, "batch": 1}
    tensors, call = scan_inputs(length=sum(lengths), sequences=len(lengths), **shape)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    got, grads = run(backend, tensors, cu_seqlens=bounds)

    ys, states = [], []
    per_token = ("x", "b", "c", "dt", "a", "lam", "rate", "z")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        one = {k: t[:, start:stop] if k in per_token else t for k, t in call.items()}
        one["state"] = Mamba3State(*(t[i : i + 1] for t in call["state"]))
        if stop > start:
            with use_backend("reference"):
                y, state = mamba3_scan(**one)
            ys.append(y)
        else:
            state = one["state"]
        states.append(turned(state))
    expected = (torch.cat(ys, 1), *(torch.cat(t) for t in zip(*states, strict=True)))
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    expected_grads = gradients(expected, tensors)
    assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("cut", [1, 7, 32, 40])
@pytest.mark.parametrize("rank", [1, 3])
def test_continuation_equals_one_pass(rank, cut):
    tensors, call = scan_inputs(length=41, rank=rank, mimo=rank > 1, heads=2)
    expected, expected_grads = run("torch", tensors)
    per_token = ("x", "b", "c", "dt", "a", "lam", "rate", "z")
    halves = [
        {k: t[:, part] if k in per_token else t for k, t in call.items()}
        for part in (slice(0, cut), slice(cut, None))
    ]
    y_first, state = mamba3_scan(**halves[0])
    y_second, state = mamba3_scan(**(halves[1] | {"state": state}))
    got = (torch.cat((y_first, y_second), 1), *turned(state))
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(gradients(got, tensors), expected_grads, 2 * TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_causality(backend):
    tensors, call = scan_inputs(length=40)
    with use_backend(backend), torch.no_grad():
        before, _ = mamba3_scan(**call)
        for name in ("x", "b", "c", "dt", "lam", "rate", "z"):
            tensors[name][:, 23:] = tensors[name][:, 23:].flip(1) * 0.5
        after, _ = mamba3_scan(**call)
    assert error(after[:, :23], before[:, :23]) < 1e-14
    assert error(after[:, 23:], before[:, 23:]) > 1e-2


def test_reference_is_the_complex_recurrence():
    """Rotating k and q is the same as rotating the state: the complex form of the paper."""
    tensors, call = scan_inputs(batch=1, length=9, heads=2, gate=False)
    with use_backend("reference"), torch.no_grad():
        expected, _ = mamba3_scan(**call)
    t = {name: value.detach() for name, value in tensors.items()}
    turn = t["rate"][:, :, None] * t["dt"][..., None]  # (1, L, H, S)
    # In the turning frame the state, the last k and the first q all carry the initial phase.
    h = rotate(t["state.h"], -t["state.phase"][:, :, None], interleaved=True)
    k_prev = rotate(t["state.k"], -t["state.phase"][:, None], interleaved=True)[:, 0]
    x_prev = t["state.x"]
    for i in range(9):
        dt, lam = t["dt"][:, i], t["lam"][:, i]
        alpha = torch.exp(dt * t["a"][:, i])
        # exp(-i turn): what a fixed frame sees of k turning forward, the state sees backward.
        phasor = torch.polar(torch.ones_like(turn[:, i]), -turn[:, i])
        phasor = torch.view_as_real(phasor).flatten(-2)
        k = t["b"][:, i, 0] + t["b_bias"][:, 0]
        q = t["c"][:, i, 0] + t["c_bias"][:, 0]
        k_moved = rotate(k_prev, -turn[:, i], interleaved=True)
        v = torch.stack(
            (x_prev * ((1 - lam) * dt * alpha)[..., None], t["x"][:, i] * (lam * dt)[..., None]), 2
        )
        h = complex_state_update(h, v, torch.stack((k_moved, k), 2), alpha, phasor)
        y = (h @ q[..., None]).squeeze(-1) + t["d"][:, None] * t["x"][:, i]
        assert_close(y, expected[:, i], TOLERANCE[torch.float64], f"token {i}")
        k_prev, x_prev = k, t["x"][:, i]


@pytest.mark.parametrize("kind", ["decays at once", "no step at all", "mixed"])
def test_extreme_steps_stay_finite(kind):
    tensors, _ = scan_inputs(length=70, dtype=torch.float32)
    with torch.no_grad():
        if kind == "decays at once":
            tensors["a"] *= 1e4
        elif kind == "no step at all":
            tensors["dt"].zero_()
        else:
            tensors["a"][:, ::3] *= 1e4
            tensors["dt"][:, ::5] = 0
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    expected, expected_grads = run("reference", wide)
    got, grads = run("torch", tensors, chunk_size=64)
    assert_close(got, expected, TOLERANCE[torch.float32], "output")
    assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float32], "gradient")


def test_phase_does_not_drift():
    length = 100_000
    generator = torch.Generator().manual_seed(0)
    rate = 3.1 * torch.rand(1, length, 2, generator=generator)
    dt = torch.rand(1, length, 1, generator=generator)
    zeros = torch.zeros(1, length, 1, 1)
    maps = torch.zeros(1, length, 1, 1, 4)
    bias = torch.zeros(1, 1, 4)
    with torch.no_grad():
        _, state = mamba3_scan(zeros, maps, maps, dt, -dt, dt, rate, bias, bias, torch.ones(1))
    exact = (rate.double() * dt.double()).sum(1)
    drift = torch.remainder(state.phase[0].double() - exact + torch.pi, 2 * torch.pi) - torch.pi
    assert drift.abs().max() < 1e-4


def test_saved_memory_is_linear_in_length():
    def saved(length):
        _, call = scan_inputs(batch=1, length=length, mimo=True, rank=2, dtype=torch.float32)
        sizes = {}

        def pack(t):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            mamba3_scan(**call)
        return sum(sizes.values())

    short, long = saved(256), saved(1024)
    assert long < 4.1 * short


def test_non_contiguous_inputs():
    tensors, _ = scan_inputs(mimo=True, rank=2, groups=2)
    strided = {
        name: t.detach().mT.contiguous().mT.requires_grad_() if t.dim() > 1 else t
        for name, t in tensors.items()
    }
    assert not strided["x"].is_contiguous()
    expected, expected_grads = run("torch", tensors)
    got, grads = run("torch", strided)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float64], "gradient")


def test_second_derivative_is_refused():
    tensors, call = scan_inputs()
    y, _ = mamba3_scan(**call)
    with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph"):
        torch.autograd.grad(y.sum(), tensors["x"], create_graph=True)


def _with(call, **changes):
    return call | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: _with(c, x=c["x"][:, :, 0]), r"expected x \(B, L, H, P\)"),
        (lambda c: _with(c, x=c["x"][:, :0]), "at least one token"),
        (lambda c: _with(c, dt=c["dt"][:, :5]), r"dt has shape \(2, 5, 4\), expected \(2, 13, 4\)"),
        (lambda c: _with(c, d=c["d"][:2]), r"d has shape \(2,\), expected \(4,\)"),
        (lambda c: _with(c, b_bias=c["b_bias"][:2]), "b_bias has shape"),
        (lambda c: _with(c, rate=c["rate"].repeat(1, 1, 3)), "S at most N/2"),
        (lambda c: _with(c, b=c["b"].repeat(1, 1, 1, 3, 1)), "groups must divide the heads"),
        (lambda c: _with(c, b=c["b"].repeat(1, 1, 2, 1, 1)), "b has 2 streams: pass mimo="),
        (lambda c: _with(c, chunk_size=0), "chunk_size must be at least 1"),
        (lambda c: _with(c, state=c["state"].reorder(torch.tensor([0]))), "holds 1 sequences"),
        (
            lambda c: _with(c, state=c["state"]._replace(x=c["state"].h)),
            r"state.x has shape .* other sizes",
        ),
        (lambda c: _with(c, cu_seqlens=torch.tensor([0, 13])), "the batch must be 1, got 2"),
        (lambda c: _with(c, cu_seqlens=torch.tensor([0.0, 13.0])), "must be a 1-D int tensor"),
    ],
)
def test_bad_arguments(change, message):
    _, call = scan_inputs()
    with pytest.raises(ValueError, match=message):
        mamba3_scan(**change(call))


@pytest.mark.parametrize("bounds", [[0, 12], [1, 13], [0, 9, 5, 13]])
def test_bad_boundaries(bounds):
    _, call = scan_inputs(batch=1, sequences=len(bounds) - 1)
    with pytest.raises(ValueError, match="must rise from 0 to the row's length 13"):
        mamba3_scan(**call, cu_seqlens=torch.tensor(bounds))
