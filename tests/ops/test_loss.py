"""linear_cross_entropy against the head and torch's loss one after the other."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, gradients
from torch.utils._python_dispatch import TorchDispatchMode

from mamba3.ops import linear_cross_entropy, loss


def inputs(tokens=13, width=6, vocab=17, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::4] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("chunk_elements", [1, 50, 1 << 20])
def test_equals_head_and_loss(monkeypatch, chunk_elements):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk_elements)
    x, weight, labels = inputs()
    expected = F.cross_entropy(x @ weight.T, labels)
    got = linear_cross_entropy(x, weight, labels)
    assert got.item() == pytest.approx(expected.item(), rel=1e-14)
    named = {"x": x, "weight": weight}
    assert_close(gradients((got,), named), gradients((expected,), named), 1e-13, "gradient")


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_side_frozen(frozen):
    x, weight, labels = inputs()
    named = {"x": x, "weight": weight}
    list(named.values())[frozen].requires_grad_(False)
    named = {name: t for name, t in named.items() if t.requires_grad}
    expected = gradients((F.cross_entropy(x @ weight.T, labels),), named)
    got = gradients((linear_cross_entropy(x, weight, labels),), named)
    assert_close(got, expected, 1e-13, "gradient")


def test_float32_and_bfloat16():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        x, weight, labels = inputs(dtype=dtype)
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        expected = F.cross_entropy(wide[0] @ wide[1].T, labels)
        got = linear_cross_entropy(x, weight, labels)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(expected.item(), rel=tolerance)
        grads = gradients((got,), {"x": x, "weight": weight})
        wanted = gradients((expected,), {"x": wide[0], "weight": wide[1]})
        assert {g.dtype for g in grads.values()} == {dtype}
        assert_close(grads, wanted, tolerance, "gradient")


def test_large_logits_stay_finite():
    x, weight, labels = inputs()
    x = (x.detach() * 1e3).requires_grad_()
    expected = F.cross_entropy(x @ weight.T, labels)
    got = linear_cross_entropy(x, weight, labels)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    named = {"x": x, "weight": weight}
    assert_close(gradients((got,), named), gradients((expected,), named), 1e-12, "gradient")


def test_nothing_scored_is_nan_as_in_torch():
    x, weight, labels = inputs()
    assert linear_cross_entropy(x, weight, labels.fill_(-100)).isnan()
    assert linear_cross_entropy(x[:0], weight, labels[:0]).isnan()


def test_the_logits_never_exist_whole(monkeypatch):
    tokens, width, vocab = 64, 4, 100
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 8 * vocab)
    x, weight, labels = inputs(tokens, width, vocab, torch.float32)
    with Largest() as largest:
        linear_cross_entropy(x, weight, labels).backward()
    assert largest.elements == 8 * vocab
    with Largest() as largest:
        F.cross_entropy(x @ weight.T, labels).backward()
    assert largest.elements == tokens * vocab


def test_bad_shapes():
    x, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"expected x \(T, D\) and weight \(V, D\)"):
        linear_cross_entropy(x[:, :5], weight, labels)
    with pytest.raises(ValueError, match="labels have shape"):
        linear_cross_entropy(x, weight, labels[:5])
