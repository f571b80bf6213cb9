"""The scan's kernels against the float64 reference: on a GPU if there is one, else interpreted."""

import sys
from itertools import pairwise

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, call_arguments, gradients, scan_inputs, turned
from test_scan import SHAPES

from mamba3.ops import Mamba3State, kernel_scan, mamba3_scan, use_backend
from mamba3.ops.triton import gate, layout, scan_forward
from mamba3.ops.triton import scan as launchers

# Triton's interpreter cuts float32 to bfloat16 off, where a GPU rounds.
HALF = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
LONG = {
    "siso-two-chunks": {"length": 75, "batch": 1, "heads": 2, "norm": True},
    "siso-groups-of-heads": {"length": 50, "batch": 1, "heads": 6, "groups": 2},
    "siso-P72-N132": {"headdim": 72, "d_state": 132, "angles": 33, "heads": 1, "batch": 1},
    "mimo-R3-chunks": {"length": 27, "rank": 3, "mimo": True, "heads": 2, "norm": True},
    "mimo-R2-chunks": {"length": 75, "rank": 2, "mimo": True, "batch": 1},
    "mimo-R4-no-gate": {"length": 21, "rank": 4, "mimo": True, "heads": 1, "gate": False},
}


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Counts scans on the kernels, since falling back would pass every comparison."""
    counted = []
    outputs = launchers.Scan.outputs

    def counting(self, *args):
        counted.append(1)
        return outputs(self, *args)

    monkeypatch.setattr(launchers.Scan, "outputs", counting)
    return counted


def run(backend, tensors, return_state=True, **options):
    """Outputs and final state, phase turned, then all gradients, on the CPU."""
    device = "cpu" if backend == "reference" else DEVICE
    tensors = {k: t.detach().to(device).requires_grad_() for k, t in tensors.items()}
    options = {k: t.to(device) if torch.is_tensor(t) else t for k, t in options.items()}
    with use_backend(backend):
        y, state = mamba3_scan(**call_arguments(tensors), return_state=return_state, **options)
    outputs = (y, *turned(state)) if return_state else (y,)
    grads = gradients([t.cpu() for t in outputs], tensors)
    return [t.detach().cpu() for t in outputs], {k: g.cpu() for k, g in grads.items()}


def compare(tensors, chunk_size=None, dtype=torch.float32, **options):
    wide = {name: t.detach().double() for name, t in tensors.items()}
    expected, expected_grads = run("reference", wide, **options)
    got, grads = run("triton", tensors, chunk_size=chunk_size, **options)
    assert got[0].dtype == dtype
    assert_close(got, expected, TOLERANCE[dtype], "output")
    assert_close(grads, expected_grads, 2 * TOLERANCE[dtype], "gradient")


@pytest.mark.parametrize("shape", SHAPES | LONG)
def test_kernels_equal_reference(shape, launches):
    tensors, _ = scan_inputs(**(SHAPES | LONG)[shape], dtype=torch.float32)
    compare(tensors)
    assert launches


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", ["siso-groups", "siso-groups-of-heads", "mimo-R2-chunks"])
def test_half_precision(shape, dtype):
    tensors, _ = scan_inputs(**(SHAPES | LONG)[shape], dtype=dtype)
    compare(tensors, dtype=dtype)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_chunk_size_changes_nothing(rank, chunk_size):
    tensors, _ = scan_inputs(
        length=39, rank=rank, mimo=rank > 1, heads=2, batch=1, dtype=torch.float32
    )
    compare(tensors, chunk_size)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("walks", [1, 2, 100])
def test_segments_change_nothing(monkeypatch, rank, walks):
    """Walks cut in any number of segments, rows of several lengths, slabs of a few chunks."""
    monkeypatch.setattr(launchers, "PROGRAMS_PER_SM", walks)
    monkeypatch.setattr(launchers, "SLAB_ELEMENTS", 2000)
    lengths = [1, 17, 40, 0, 16]
    tensors, _ = scan_inputs(
        length=sum(lengths), sequences=len(lengths), batch=1, heads=1, rank=rank, mimo=rank > 1,
        headdim=5, dtype=torch.float32,
    )  # fmt: skip
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    compare(tensors, 16 // rank, cu_seqlens=bounds)


@pytest.mark.parametrize(("rank", "walks"), [(1, 3), (2, 100)])
def test_bounds_that_the_host_does_not_read(monkeypatch, rank, walks):
    """As where steps are recorded: to the last bit what it is with them, and room for others."""
    monkeypatch.setattr(launchers, "PROGRAMS_PER_SM", walks)
    lengths = [1, 17, 20, 0, 5, 0, 0]
    for count in (7, 5):  # in the second, what is too many belongs to a sequence with tokens
        tensors, _ = scan_inputs(
            length=sum(lengths), sequences=count, batch=1, heads=1, rank=rank, mimo=rank > 1,
            headdim=5, dtype=torch.float32,
        )  # fmt: skip
        given = {"cu_seqlens": torch.tensor([0, *lengths[:count]]).cumsum(0)}
        wide = {name: t.detach().double() for name, t in tensors.items()}
        expected, expected_grads = run("reference", wide, **given)
        read = run("triton", tensors, chunk_size=16 // rank, **given)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[mamba3_scan.__module__], "capturing", lambda device: True)
            patch.setattr(torch.Tensor, "tolist", None)
            outputs, grads = run("triton", tensors, chunk_size=16 // rank, **given)
        assert_close(outputs, expected, TOLERANCE[torch.float32], "output")
        assert_close(grads, expected_grads, 2 * TOLERANCE[torch.float32], "gradient")
        if count == 7:
            assert all(torch.equal(a, b) for a, b in zip(outputs, read[0], strict=True))
            assert all(torch.equal(g, read[1][name]) for name, g in grads.items())


def test_bounds_that_have_to_be_read_and_cannot(monkeypatch):
    _, call = scan_inputs(length=4, sequences=1, batch=1, dtype=torch.float32)
    monkeypatch.setattr(sys.modules[mamba3_scan.__module__], "capturing", lambda device: True)
    with use_backend("torch"), pytest.raises(RuntimeError, match="while a CUDA graph is recorded"):
        mamba3_scan(**call, cu_seqlens=torch.tensor([0, 4]))


def test_a_layout_is_made_anew_where_bounds_have_changed():
    bounds, sizes = torch.tensor([0, 5, 9, 9]), layout.Sizes.of_any(3, 9, 4, 2)
    first = layout.layout_on_device(bounds, sizes)
    assert layout.layout_on_device(bounds, sizes) is first
    bounds[1] = 3
    again = layout.layout_on_device(bounds, sizes)
    known = layout.layout_of((0, 3, 9, 9), sizes, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(again, known, strict=True))
    assert not torch.equal(again.table, first.table)


def test_packed_equals_separate():
    lengths = [3, 17, 25, 1]
    _, call = scan_inputs(length=sum(lengths), sequences=4, batch=1, heads=2, dtype=torch.float32)
    call = {k: t.detach().to(DEVICE) if torch.is_tensor(t) else t for k, t in call.items()}
    call["state"] = Mamba3State(*(t.detach().to(DEVICE) for t in call["state"]))
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    per_token = ("x", "b", "c", "dt", "a", "lam", "rate", "z")
    with use_backend("triton"):
        y, state = mamba3_scan(**call, cu_seqlens=bounds)
        for i, (start, stop) in enumerate(pairwise(bounds.tolist())):
            one = {k: t[:, start:stop] if k in per_token else t for k, t in call.items()}
            one["state"] = Mamba3State(*(t[i : i + 1] for t in call["state"]))
            alone, alone_state = mamba3_scan(**one)
            assert_close(y[:, start:stop], alone, 1e-6, f"sequence {i}")
            got = [t[i : i + 1] for t in turned(state)]
            assert_close(got, list(turned(alone_state)), 1e-6, f"state {i}")


def test_without_a_state():
    tensors, _ = scan_inputs(length=20, heads=2, dtype=torch.float32)
    zeros = {k: torch.zeros_like(t) for k, t in tensors.items() if k.startswith("state.")}
    expected, expected_grads = run("reference", tensors | zeros)
    inputs = {k: t.detach().to(DEVICE).requires_grad_() for k, t in tensors.items()}
    inputs = {k: t for k, t in inputs.items() if not k.startswith("state.")}
    with use_backend("triton"):
        y, state = mamba3_scan(**inputs, return_state=False)
        assert state is None
        y_again, state = mamba3_scan(**inputs)
    assert torch.equal(y, y_again)
    assert_close([y.cpu(), *(t.cpu() for t in turned(state))], expected, 2e-5, "output")
    grads = gradients([t.cpu() for t in (y_again, *turned(state))], inputs)
    grads = {k: g.cpu() for k, g in grads.items()}
    assert_close(grads, {k: expected_grads[k] for k in grads}, 4e-5, "gradient")


def test_some_gradients_only():
    """The state alone is differentiated, or the output alone; nothing else is asked for."""
    tensors, _ = scan_inputs(length=20, heads=2, dtype=torch.float32)
    for pick in (slice(0, 1), slice(1, 2), slice(2, 3)):
        found = []
        for backend, device in (("reference", "cpu"), ("triton", DEVICE)):
            moved = {k: t.detach().to(device).requires_grad_() for k, t in tensors.items()}
            with use_backend(backend):
                y, state = mamba3_scan(**call_arguments(moved))
            outputs = [t.cpu() for t in (y, *turned(state))][pick]
            found.append({k: g.cpu() for k, g in gradients(outputs, moved).items()})
        assert_close(found[1], found[0], 4e-5, f"gradient of output {pick.start}")


def test_views_of_a_wider_projection():
    """Rows of x, z, B and C lie apart, at odd distances; results are those of dense ones."""
    tensors, _ = scan_inputs(length=18, heads=3, groups=3, dtype=torch.float32)
    expected, expected_grads = run("triton", tensors)
    wide = {}
    for name in ("x", "z", "b", "c", "dt", "a", "lam", "rate"):
        t = tensors[name].detach()
        width = t[0, 0].numel()
        rows = torch.randn(*t.shape[:2], width + 7)
        rows[..., 3 : 3 + width] = t.flatten(2)
        wide[name] = rows.to(DEVICE).requires_grad_()
    moved = {k: t.detach().to(DEVICE).requires_grad_() for k, t in tensors.items()}
    views = {k: t[..., 3:-4].unflatten(-1, tensors[k].shape[2:]) for k, t in wide.items()}
    with use_backend("triton"):
        y, state = mamba3_scan(**call_arguments(moved | views))
    outputs = [t.cpu() for t in (y, *turned(state))]
    assert_close(outputs, expected, 1e-6, "output")
    grads = gradients(outputs, wide)
    for name, g in grads.items():
        g = g[..., 3:-4].cpu().reshape(expected_grads[name].shape)
        assert_close(g, expected_grads[name], 1e-5, f"gradient of {name}")


def test_a_token_that_forgets_all():
    """Decays far below what float32 holds spoil nothing around them."""
    tensors, _ = scan_inputs(length=24, batch=1, heads=2, dtype=torch.float32)
    with torch.no_grad():
        tensors["a"][:, 5:8] = -1e4
        tensors["a"][:, 12] = -300.0
    compare(tensors)


def test_what_the_kernels_do_not_do_runs_on_torch(launches):
    for dtype, d_state in ((torch.float64, 10), (torch.float32, 300)):
        tensors, _ = scan_inputs(length=5, heads=1, d_state=d_state, dtype=dtype)
        got, _ = run("triton", tensors)
        assert got[0].dtype == dtype
    assert not launches
    assert not kernel_scan.has_kernel(torch.ones(1, dtype=torch.float64), torch.ones(1, 1, 1, 1, 2))


def test_the_same_numbers_every_time():
    tensors, _ = scan_inputs(length=40, heads=2, dtype=torch.float32)
    (first, first_grads), (second, second_grads) = run("triton", tensors), run("triton", tensors)
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(first_grads[k], second_grads[k]) for k in first_grads)


@pytest.mark.parametrize("name", ["x", "z", "b", "c"])
def test_offsets_past_int32(name):
    """Tokens so far apart that their offsets need 64 bits; only their pages are ever touched."""
    tensors, _ = scan_inputs(batch=1, length=3, heads=2, dtype=torch.float16)
    expected, expected_grads = run("triton", tensors)
    stride = (1 << 30) + 8
    t = tensors[name].detach()
    buffer = torch.empty(2 * stride + t[0, 0].numel(), dtype=torch.float16, device=DEVICE)
    far = buffer.as_strided(t.shape, (3 * stride, stride, *t.stride()[2:]))
    far.copy_(t)
    moved = {k: t.detach().to(DEVICE).requires_grad_() for k, t in tensors.items()}
    moved[name] = far.requires_grad_()
    with use_backend("triton"):
        y, state = mamba3_scan(**call_arguments(moved))
    outputs = [t.cpu() for t in (y, *turned(state))]
    assert all(map(torch.equal, outputs, expected))
    grads = gradients(outputs, moved)
    assert all(torch.equal(grads[k].cpu(), expected_grads[k]) for k in grads)


@pytest.mark.parametrize("mimo", [False, True])
def test_what_is_compiled_ahead_is_what_is_launched(mimo, monkeypatch):
    launched = []
    run_one = launchers.Launcher.__call__

    def recording(self, kernel, grid, *args, variant=None, **constants):
        kinds = [a.dtype if torch.is_tensor(a) else a for a in args]
        launched.append((kernel, kinds, constants))
        run_one(self, kernel, grid, *args, variant=variant, **constants)

    monkeypatch.setattr(launchers.Launcher, "__call__", recording)
    tensors, _ = scan_inputs(length=40, batch=1, heads=2, mimo=mimo, dtype=torch.float32)
    inputs = {k: t.detach().to(DEVICE) for k, t in tensors.items() if not k.startswith("state.")}
    inputs = {k: t.requires_grad_() for k, t in inputs.items()}
    call = {k: t for k, t in inputs.items() if not k.startswith("mimo_")}
    if mimo:
        call["mimo"] = tuple(inputs[f"mimo_{s}"] for s in "xzo")
    with use_backend("triton"):
        y, _ = mamba3_scan(**call, return_state=False)
    y.sum().backward()
    kernels = [
        inputs[k] for k in ("x", "b", "c", "dt", "a", "lam", "rate", "b_bias", "c_bias", "d")
    ]
    kernels = launchers.Inputs(*kernels, inputs.get("mimo_x"))
    scan = launchers.Scan.of(kernels, range(0, 41, 40), None)
    planned = [
        (kernel, [a.dtype if torch.is_tensor(a) else a for a in args], constants)
        for kernel, args, constants in scan.launches(training=True)
    ]
    gates = (gate._forward_kernel, gate._backward_kernel)
    launched = [one for one in launched if one[0] not in gates]
    # At other lengths there are segments, or none.
    assert [one for one in planned if one in launched] == launched
    rest = {kernel for kernel, *rest in planned if [kernel, *rest] not in map(list, launched)}
    assert rest <= {scan_forward.carry_kernel}
    forward = [kernel for kernel, _, _ in scan.launches(training=False)]
    assert forward == [kernel for kernel, _, _ in planned[: len(forward)]]
