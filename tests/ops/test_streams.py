"""Complex and stream ops: against torch's complex numbers and einsum, and by gradcheck."""

import pytest
import torch
from compare import assert_close, gradients

from mamba3.ops import (
    broadcast_streams,
    complex_add,
    complex_mul,
    complex_state_update,
    mix_streams,
)


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    t = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
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
