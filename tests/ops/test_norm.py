"""rms_norm and add_rms_norm against torch's: the torch path, and the Triton kernels."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, TOLERANCE, assert_close, gradients

from mamba3.ops import rms_norm, use_backend
from mamba3.ops.norm import add_rms_norm

EPS = 1e-3


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: rms_norm(x, torch.ones(5)), "expected x"),
        (lambda x: rms_norm(x, torch.ones(2, 1, 4)), "expected x"),
        (lambda x: rms_norm(x, torch.ones(2, 4)), "expected x"),
        (lambda x: rms_norm(x, torch.ones(4), gate=torch.ones(4)), "gate has shape"),
        (lambda x: add_rms_norm(x, torch.ones(1, 4), torch.ones(4)), "residual has shape"),
    ],
)
def test_bad_shapes(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3, 4))


def part_of_rows(*shape, dtype):
    """(T, ...) of this shape, as a part of the rows of a wider projection."""
    width = torch.Size(shape[1:]).numel()
    wide = normal(shape[0], width + 24, dtype=dtype, device=DEVICE).detach()
    return wide[:, 8 : 8 + width].view(shape).requires_grad_()


# Shapes of x and of the weight.
SHAPES = {
    "one row": ((7,), (7,)),
    "odd width": ((3, 5, 37), (37,)),
    "many rows": ((130, 64), (64,)),
    "wide rows": ((3, 2600), (2600,)),
    "weight with ones": ((5, 2, 24), (1, 1, 24)),
    "weight of B and C": ((9, 2, 3, 2, 10), (2, 1, 1, 10)),
    "weight per head": ((2, 5, 3, 4, 6), (3, 1, 6)),
    "weight in two dimensions": ((2, 3, 4, 5, 6), (3, 1, 5, 6)),
    "weight per row": ((3, 6), (3, 6)),
}
LAYOUTS = {
    "contiguous": lambda *shape, dtype: normal(*shape, dtype=dtype, device=DEVICE),
    "part of rows": part_of_rows,
    "transposed": lambda *shape, dtype: (
        normal(*shape[::-1], dtype=dtype, device=DEVICE)
        .detach()
        .permute(*range(len(shape))[::-1])
        .requires_grad_()
    ),
}


@pytest.fixture
def launches(monkeypatch):
    """Names of the launchers called."""
    from mamba3.ops.triton import norm as module

    called = []
    for name in ("norm_forward", "norm_backward"):

        def counting(launch, *args):
            called.append(launch.__name__)
            return launch(*args)

        monkeypatch.setattr(module, name, partial(counting, getattr(module, name)))
    return called


def composed(x, weight, gate=None, residual=None):
    """The outputs, from torch's own ops."""
    summed = x if residual is None else x + residual
    out = F.rms_norm(summed, x.shape[-1:], eps=EPS) * weight
    out = out if gate is None else out * F.silu(gate)
    return (out,) if residual is None else (out, summed)


def fused(x, weight, gate=None, residual=None):
    with use_backend("triton"):
        if residual is None:
            return (rms_norm(x, weight, EPS, gate),)
        return add_rms_norm(x, residual, weight, EPS)


def compare(tensors, tolerance, run=fused):
    """Outputs and gradients of `run` against float64; returns the outputs."""
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    expected, got = composed(**wide), run(**tensors)
    assert_close(got, expected, tolerance, "output")
    found = gradients(got, tensors)
    assert_close(found, gradients(expected, wide), 2 * tolerance, "gradient")
    assert all(found[name].dtype == t.dtype for name, t in tensors.items())
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, layout, dtype, launches):
    x_shape, weight_shape = SHAPES[shape]
    if layout == "part of rows" and len(x_shape) == 1:
        x_shape = (1, *x_shape)
    x = LAYOUTS[layout](*x_shape, dtype=dtype)
    weight = normal(*weight_shape, seed=1, dtype=dtype, device=DEVICE)
    (out,) = compare({"x": x, "weight": weight}, TOLERANCE[dtype])
    assert out.dtype == dtype
    assert launches == ["norm_forward", "norm_backward"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_width_one(layout):
    x = LAYOUTS[layout](9, 2, 1, dtype=torch.float32)
    weight = normal(2, 1, seed=1, dtype=torch.float32, device=DEVICE)
    compare({"x": x, "weight": weight}, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", ["odd width", "wide rows", "weight of B and C"])
def test_gate(shape, backend, dtype, launches):
    x_shape, weight_shape = SHAPES[shape]
    names = {"x": x_shape, "weight": weight_shape, "gate": x_shape}
    tensors = {
        name: normal(*size, seed=i, dtype=dtype, device=DEVICE)
        for i, (name, size) in enumerate(names.items())
    }

    def run(x, weight, gate):
        with use_backend(backend):
            return (rms_norm(x, weight, EPS, gate),)

    (out,) = compare(tensors, TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]), run)
    assert out.dtype == dtype
    assert launches == (["norm_forward", "norm_backward"] if backend == "triton" else [])


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", ["odd width", "many rows", "weight per head"])
def test_add(shape, backend, dtype, stream, launches):
    x_shape, weight_shape = SHAPES[shape]
    tensors = {
        "x": normal(*x_shape, dtype=dtype, device=DEVICE),
        "weight": normal(*weight_shape, seed=1, dtype=dtype, device=DEVICE),
        "residual": normal(*x_shape, seed=2, dtype=stream, device=DEVICE),
    }

    def run(x, weight, residual):
        with use_backend(backend):
            return add_rms_norm(x, residual, weight, EPS)

    worst = max(TOLERANCE[dtype], TOLERANCE[stream])
    out, summed = compare(tensors, worst, run)
    assert (out.dtype, summed.dtype) == (dtype, stream)
    assert launches == (["norm_forward", "norm_backward"] if backend == "triton" else [])


def test_a_program_takes_several_tiles(monkeypatch):
    from mamba3.ops.triton import norm as module

    monkeypatch.setattr(module, "PROGRAMS", 4)
    for shape in ("many rows", "weight per head"):
        x_shape, weight_shape = SHAPES[shape]
        x = normal(*x_shape[:-1], 2 * x_shape[-1], device=DEVICE, dtype=torch.float32)
        weight = normal(*weight_shape[:-1], 2 * weight_shape[-1], device=DEVICE, seed=1)
        compare({"x": x, "weight": weight.detach().float().requires_grad_()}, 2e-5)


def test_kernels_do_not_copy_a_part_of_rows():
    from mamba3.ops.triton.norm import find_rows

    maps = part_of_rows(9, 2, 3, 2, 10, dtype=torch.float32)
    kept, rows = find_rows(maps, (1, 2))
    assert kept is maps
    assert rows == ((9, 2, 6), (144, 60, 10))
    batch = maps.view(3, 3, 2, 3, 2, 10)
    assert find_rows(batch, (2, 3)) == (batch, rows)
    assert find_rows(maps, None) == (maps, ((9, 1, 12), (144, 0, 10)))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_dtype_of_its_own(backend):
    x, residual = (normal(9, 24, seed=i, dtype=torch.float32, device=DEVICE) for i in (0, 2))
    tensors = {"x": x, "weight": normal(24, seed=1, dtype=torch.float32, device=DEVICE)}

    def run(x, weight, residual=None):
        with use_backend(backend):
            if residual is None:
                return (rms_norm(x, weight, EPS, dtype=torch.bfloat16),)
            return add_rms_norm(x, residual, weight, EPS, dtype=torch.bfloat16)

    (out,) = compare(tensors, TOLERANCE[torch.bfloat16], run)
    again, summed = compare(tensors | {"residual": residual}, TOLERANCE[torch.bfloat16], run)
    assert out.dtype == again.dtype == torch.bfloat16
    assert summed.dtype == torch.float32


def test_float64_runs_on_torch(launches):
    x, weight = normal(3, 6, device=DEVICE), normal(6, seed=1, device=DEVICE)
    compare({"x": x, "weight": weight}, 1e-13)
    assert not launches


def test_no_second_derivative():
    x = normal(3, 6, dtype=torch.float32, device=DEVICE)
    (out,) = fused(x, torch.ones(6, device=DEVICE))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
