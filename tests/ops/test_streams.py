"""Complex and stream ops: against torch's complex numbers and einsum, and by gradcheck.

The Triton kernels run on a GPU if there is one, else interpreted.
"""

from functools import partial

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, gradients

from mamba3.ops import (
    broadcast_streams,
    complex_add,
    complex_mul,
    complex_state_update,
    mix_streams,
    use_backend,
)


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    t = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
    return t.requires_grad_()


def to_complex(t, count, interleaved):
    half = t.shape[-1] // 2
    if interleaved:
        return torch.complex(t[..., 0 : 2 * count : 2], t[..., 1 : 2 * count : 2])
    return torch.complex(t[..., :count], t[..., half : half + count])


def expected_pairs(op, a, b, interleaved):
    """`op` on complex numbers, written back channel by channel."""
    count, half = b.shape[-1] // 2, a.shape[-1] // 2
    z = op(to_complex(a, count, interleaved), to_complex(b, count, interleaved))
    shape = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    channels = list(a.expand(*shape, a.shape[-1]).unbind(-1))
    for i in range(count):
        re, im = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        channels[re], channels[im] = z[..., i].real, z[..., i].imag
    return torch.stack(channels, -1)


SHAPES = {
    "same": ((2, 3, 10), (2, 3, 10)),
    "fewer pairs": ((2, 3, 10), (2, 3, 6)),
    "b broadcasts": ((2, 3, 4, 6), (3, 1, 4)),
    "a broadcasts": ((1, 4, 6), (2, 5, 4, 6)),
    "no pairs": ((2, 6), (2, 0)),
}


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("function", "op"), [(complex_mul, torch.mul), (complex_add, torch.add)])
def test_complex_ops(function, op, shapes, interleaved):
    a, b = (normal(*shape, seed=i) for i, shape in enumerate(SHAPES[shapes]))
    got = function(a, b, interleaved=interleaved)
    expected = expected_pairs(op, a, b, interleaved)
    assert_close(got, expected, 1e-15, "output")
    grads, wanted = (gradients((t,), {"a": a, "b": b}) for t in (got, expected))
    assert_close(grads, wanted, 1e-14, "gradient")
    assert torch.autograd.gradcheck(lambda *t: function(*t, interleaved=interleaved), (a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_complex_mul_in_half_precision(dtype):
    a, b = normal(5, 8, dtype=dtype), normal(5, 6, dtype=dtype)
    expected = expected_pairs(torch.mul, a.double(), b.double(), True)
    assert_close(complex_mul(a, b), expected, 1e-2, "output")


def test_streams():
    x, weight = normal(2, 3, 4, 6), normal(4, 5, 6)
    y = normal(2, 3, 4, 5, 6)
    assert_close(broadcast_streams(x, weight), torch.einsum("...hp,hrp->...hrp", x, weight), 1e-15)
    assert_close(mix_streams(y, weight), torch.einsum("...hrp,hrp->...hp", y, weight), 1e-15)
    assert torch.autograd.gradcheck(broadcast_streams, (x, weight))
    assert torch.autograd.gradcheck(mix_streams, (y, weight))
    assert torch.autograd.gradcheck(broadcast_streams, (normal(4, 6), weight))
    assert torch.autograd.gradcheck(mix_streams, (normal(4, 5, 6), weight))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("with_phasor", [True, False])
def test_state_update(with_phasor, interleaved):
    h, decay = normal(2, 3, 4, 6), normal(2, 3)
    v, k = normal(2, 3, 5, 4), normal(2, 3, 5, 6)
    phasor = normal(2, 3, 4) if with_phasor else None
    got = complex_state_update(h, v, k, decay, phasor, interleaved=interleaved)
    moved = h
    if with_phasor:
        moved = expected_pairs(torch.mul, h, phasor.unsqueeze(-2), interleaved)
    expected = decay[..., None, None] * moved + torch.einsum("bhmp,bhmn->bhpn", v, k)
    assert_close(got, expected, 1e-15, "output")

    def update(*tensors):
        return complex_state_update(*tensors, interleaved=interleaved)

    inputs = (h, v, k, decay) + ((phasor,) if with_phasor else ())
    assert torch.autograd.gradcheck(update, inputs)


def test_inputs_are_left_alone():
    a, b = normal(3, 8).detach(), normal(3, 6).detach()
    h, decay, v, k = (normal(*s).detach() for s in ((3, 4, 8), (3,), (3, 2, 4), (3, 2, 8)))
    before = [t.clone() for t in (a, b, h, decay, v, k)]
    complex_mul(a, b)
    complex_add(a, b)
    complex_state_update(h, v, k, decay, b)
    assert all(map(torch.equal, before, (a, b, h, decay, v, k)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: complex_mul(torch.ones(3, 7), torch.ones(3, 2)), "expected real pairs"),
        (lambda: complex_add(torch.ones(3, 4), torch.ones(3, 6)), "expected real pairs"),
        (lambda: broadcast_streams(torch.ones(2, 5), torch.ones(4, 3, 5)), "expected x"),
        (lambda: mix_streams(torch.ones(3, 4, 5), torch.ones(4, 3, 5)), "expected y"),
        (
            lambda: complex_state_update(
                torch.ones(2, 4, 6), torch.ones(2, 1, 4), torch.ones(2, 2, 6), torch.ones(2)
            ),
            r"expected h \(..., H, P, N\)",
        ),
        (
            lambda: complex_state_update(
                torch.ones(2, 4, 6), torch.ones(2, 1, 4), torch.ones(2, 1, 6), torch.ones(3)
            ),
            "decay has shape",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def launches(monkeypatch):
    """Names of the launchers called."""
    from mamba3.ops.triton import gate, streams

    called = []
    for module, names in (
        (gate, ("gate_forward", "gate_backward")),
        (streams, ("complex_forward", "complex_mul_backward")),
        (streams, ("broadcast_forward", "broadcast_backward")),
        (streams, ("state_update_forward", "state_update_backward")),
    ):
        for name in names:

            def counting(launch, *args, **options):
                called.append(launch.__name__)
                return launch(*args, **options)

            monkeypatch.setattr(module, name, partial(counting, getattr(module, name)))
    return called


def compare_kernel(function, expected, dtypes, *tensors):
    """Output and gradients of kernels on these values, against `expected` in float64."""
    wide = {i: t.detach().requires_grad_() for i, t in enumerate(tensors)}
    given = {
        i: t.detach().to(DEVICE, dtype).requires_grad_()
        for (i, t), dtype in zip(wide.items(), dtypes, strict=True)
    }
    with torch.no_grad():  # both start from the rounded values
        for i, t in wide.items():
            t.copy_(given[i])
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    with use_backend("triton"):
        got = function(*given.values())
    want = expected(*wide.values())
    assert_close(got.cpu(), want, tolerance, "output")
    found, wanted = gradients((got,), given), gradients((want,), wide)
    assert [g.dtype for g in found.values()] == list(dtypes)
    assert_close({i: g.cpu() for i, g in found.items()}, wanted, 2 * tolerance, "gradient")
    return got


HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("function", "op"), [(complex_mul, torch.mul), (complex_add, torch.add)])
def test_complex_kernels(function, op, shapes, interleaved, dtype, launches):
    tensors = (normal(*shape, seed=i) for i, shape in enumerate(SHAPES[shapes]))
    got = compare_kernel(
        partial(function, interleaved=interleaved),
        partial(expected_pairs, op, interleaved=interleaved),
        (dtype, dtype),
        *tensors,
    )
    assert got.dtype == dtype
    backward = ["complex_mul_backward"] if function is complex_mul else []
    assert launches == ["complex_forward", *backward]


@pytest.mark.parametrize("dtypes", [(SINGLE, SINGLE), (HALF, HALF), (HALF, SINGLE)])
@pytest.mark.parametrize("lead", [(), (3, 5), (40,)])
@pytest.mark.parametrize(("rank", "headdim"), [(1, 64), (3, 6), (4, 24), (8, 80)])
def test_stream_kernels(rank, headdim, lead, dtypes, launches):
    heads = 2
    x, y = normal(*lead, heads, headdim), normal(*lead, heads, rank, headdim, seed=1)
    weight = normal(heads, rank, headdim, seed=2)
    einsum = partial(torch.einsum, "...hp,hrp->...hrp")
    got = compare_kernel(broadcast_streams, einsum, dtypes, x, weight)
    assert got.dtype == torch.promote_types(*dtypes)
    assert launches == ["broadcast_forward", "broadcast_backward"]
    einsum = partial(torch.einsum, "...hrp,hrp->...hp")
    got = compare_kernel(mix_streams, einsum, dtypes, y, weight)
    assert got.dtype == torch.promote_types(*dtypes)
    assert launches[2:] == ["gate_forward", "gate_backward"]


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("sizes", [(1, 6, 10), (3, 24, 48), (2, 80, 128), (1, 2, 2)])
def test_state_update_kernels(sizes, dtype, launches):
    outer, headdim, d_state = sizes
    lead = (2, 3)
    tensors = (
        normal(*lead, headdim, d_state),
        normal(*lead, outer, headdim, seed=1),
        normal(*lead, outer, d_state, seed=2),
        normal(*lead, seed=3),
    )

    def expected(h, v, k, decay):
        return decay[..., None, None] * h + torch.einsum("bhmp,bhmn->bhpn", v, k)

    got = compare_kernel(complex_state_update, expected, (dtype,) * 4, *tensors)
    assert got.dtype == dtype
    assert launches == ["state_update_forward", "state_update_backward"]


def test_state_update_kernels_with_phasor(launches):
    h, decay = normal(2, 3, 4, 6), normal(2, 3)
    v, k, phasor = normal(2, 3, 5, 4), normal(2, 3, 5, 6), normal(2, 3, 4)

    def expected(h, v, k, decay, phasor):
        moved = expected_pairs(torch.mul, h, phasor.unsqueeze(-2), True)
        return decay[..., None, None] * moved + torch.einsum("bhmp,bhmn->bhpn", v, k)

    compare_kernel(complex_state_update, expected, (SINGLE,) * 5, h, v, k, decay, phasor)
    backward = ["state_update_backward", "complex_mul_backward"]
    assert launches == ["complex_forward", "state_update_forward", *backward]


def test_kernels_take_any_layout():
    def turned(*shape, seed):
        t = normal(*shape[::-1], seed=seed).detach().float().to(DEVICE)
        return t.permute(*range(t.dim())[::-1])

    def everything(turn):
        a, b = turn(turned(3, 5, 6, seed=0)), turn(turned(3, 5, 4, seed=1))
        weight, v, k = (turn(turned(5, 2, 6, seed=i)) for i in range(2, 5))
        h, decay = turn(turned(5, 6, 6, seed=5)), turn(turned(5, seed=6))
        with use_backend("triton"):
            streams = broadcast_streams(a, weight)
            mixed = mix_streams(turn(turned(3, 5, 2, 6, seed=7)), weight)
            state = complex_state_update(h, v, k, decay)
            return complex_mul(a, b), complex_add(a, b), streams, mixed, state

    expected = everything(torch.Tensor.contiguous)
    assert all(map(torch.equal, everything(lambda t: t), expected))


def test_float64_runs_on_torch(launches):
    with use_backend("triton"):
        a, b = normal(2, 6, device=DEVICE), normal(2, 4, device=DEVICE)
        got = complex_mul(a, b)
        mix_streams(normal(2, 3, 4, device=DEVICE), normal(2, 3, 4, device=DEVICE))
    assert_close(got, expected_pairs(torch.mul, a, b, True), 1e-15)
    assert not launches


def test_arguments_by_name():
    h, v, k, decay = normal(2, 3, 4), normal(2, 1, 3), normal(2, 1, 4), normal(2)
    got = complex_state_update(h=h, v=v, k=k, decay=decay)
    assert torch.equal(got, complex_state_update(h, v, k, decay))
