"""linear_cross_entropy against the head and torch's loss, one after the other, in float64.

On the torch path, and on the kernel: on a GPU if there is one, else interpreted.
"""

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, TOLERANCE, assert_close, gradients
from torch.utils._python_dispatch import TorchDispatchMode

from mamba3.ops import linear_cross_entropy, loss, use_backend
from mamba3.ops.triton import loss as kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(tokens=13, width=6, vocab=17, dtype=torch.float64, ignored=-100):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[1], labels[2] = 0, vocab - 1
    labels[::4] = ignored
    x, weight = (t.to(DEVICE, dtype).requires_grad_() for t in (x, weight))
    return x, weight, labels.to(DEVICE)


def loss_and_gradients(call, x, weight, labels, **options):
    """The loss and the gradients of a random multiple of it, by name."""
    value = call(x, weight, labels, **options)
    named = {name: t for name, t in (("x", x), ("weight", weight)) if t.requires_grad}
    return {"loss": value} | gradients((value,), named)


def head_and_loss(x, weight, labels, **options):
    return F.cross_entropy(x @ weight.T, labels, **options)


def expected_of(x, weight, labels, **options):
    """The same, of the head and torch's loss in float64."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight)]
    return loss_and_gradients(head_and_loss, *wide, labels, **options)


@pytest.fixture(params=["torch", "triton"])
def backend(request, monkeypatch):
    """Runs a test on one path, and sees that it does."""
    launched = []
    launch = kernels.cross_entropy

    def counting(*args):
        launched.append(args)
        return launch(*args)

    monkeypatch.setattr(kernels, "cross_entropy", counting)
    with use_backend(request.param):
        yield request.param
    assert bool(launched) == (request.param == "triton")


class Largest(TorchDispatchMode):
    """Notes the most numbers that any tensor has which an operation makes, bytes not being ones."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.elements = max(self.elements, out.numel())
        return out


def chunks_of(monkeypatch, rows, vocab):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", rows * vocab)
    monkeypatch.setattr(loss, "GPU_ROWS", rows)


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_float64(monkeypatch, rows):
    given = inputs()
    chunks_of(monkeypatch, rows, 17)
    assert_close(loss_and_gradients(linear_cross_entropy, *given), expected_of(*given), 1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 16, 17, 100, 131])
@pytest.mark.parametrize("rows", [5, 1000])
def test_every_dtype(monkeypatch, backend, rows, vocab, dtype):
    """Widths below, at and above blocks and their multiples, in chunks with a rest and in one."""
    monkeypatch.setattr(kernels, "BLOCK", 32)
    chunks_of(monkeypatch, rows, vocab)
    given = inputs(vocab=vocab, dtype=dtype)
    got, expected = loss_and_gradients(linear_cross_entropy, *given), expected_of(*given)
    assert [t.dtype for t in got.values()] == [torch.float32, dtype, dtype]
    assert_close(got.pop("loss"), expected.pop("loss"), TOLERANCE[dtype], "loss")
    assert_close(got, expected, 2 * TOLERANCE[dtype], "gradient of")


def test_more_logits_than_a_block(backend):
    given = inputs(tokens=5, vocab=kernels.BLOCK + 5, dtype=torch.float32)
    with torch.no_grad():
        given[1][-3:] *= 8  # the largest ones come last
    got, expected = loss_and_gradients(linear_cross_entropy, *given), expected_of(*given)
    assert_close(got, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_side_frozen(backend, frozen):
    given = inputs(dtype=torch.float32)
    given[frozen].requires_grad_(False)
    got, expected = loss_and_gradients(linear_cross_entropy, *given), expected_of(*given)
    assert_close(got, expected, TOLERANCE[torch.float32])


def test_no_gradient_wanted(backend):
    x, weight, labels = inputs(dtype=torch.float32)
    expected = expected_of(x, weight, labels)["loss"]
    with torch.no_grad():
        got = linear_cross_entropy(x, weight, labels)
    assert_close(got, expected, TOLERANCE[torch.float32], "loss")


@pytest.mark.parametrize("ignored", [3, 1 << 40])
def test_label_that_is_ignored(backend, ignored):
    given = inputs(dtype=torch.float32, ignored=ignored)
    options = {"ignore_index": ignored}
    got = loss_and_gradients(linear_cross_entropy, *given, **options)
    expected = expected_of(*given, **options)
    assert_close(got, expected, TOLERANCE[torch.float32])
    assert not got["x"][::4].any()


def test_an_ignored_row_may_hold_anything(backend):
    x, weight, labels = inputs(dtype=torch.float32)
    expected = expected_of(x, weight, labels)
    with torch.no_grad():
        x[4] = 3e38  # its logits are infinite, and none
    got = loss_and_gradients(linear_cross_entropy, x, weight, labels)
    assert_close(got["loss"], expected["loss"], TOLERANCE[torch.float32], "loss")
    assert_close(got["x"], expected["x"], TOLERANCE[torch.float32], "gradient of x")


def test_large_logits(backend):
    """Up to 1e4 either way, exact in float32, so that nothing but the loss rounds."""
    x, weight, labels = inputs(dtype=torch.float32)
    with torch.no_grad():
        x.copy_((x * 20).round() * 64)
        weight.copy_((weight * 4).round() / 4)
        logits = x @ weight.T
        assert min(logits.max(), -logits.min()) > 1e4
    got = loss_and_gradients(linear_cross_entropy, x, weight, labels)
    assert_close(got, expected_of(x, weight, labels), TOLERANCE[torch.float32])


def test_near_ties_of_large_logits():
    """The softmax of logits that differ little is as exact as they are."""
    x = torch.full((3, 1), 8192.0, device=DEVICE, requires_grad=True)
    weight = 1 + torch.arange(5, device=DEVICE, dtype=torch.float32)[:, None] / 8192
    given = x, weight.requires_grad_(), torch.tensor([0, 2, 4], device=DEVICE)
    with use_backend("triton"):
        got = loss_and_gradients(linear_cross_entropy, *given)
    expected = expected_of(*given)
    for name in ("loss", "weight"):  # x's gradient is a sum that cancels
        assert_close(got[name], expected[name], 1e-6, name)


def test_rare_tokens_have_gradients_in_half_precision(backend):
    """A mean over many rows is smaller than float16's smallest number, its sum is not."""
    tokens, vocab = 512, 700
    x = torch.ones(tokens, 1, device=DEVICE, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(vocab, 1, device=DEVICE, dtype=torch.float16, requires_grad=True)
    given = x, weight, torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    (got,) = torch.autograd.grad(linear_cross_entropy(*given), weight)
    expected = torch.full_like(got, 1 / vocab)
    assert_close(got[1:], expected[1:], TOLERANCE[torch.float16], "gradient")


def test_scaled_losses_of_half_precision(backend):
    """A factor that float16 cannot hold, of gradients that it can."""
    x, weight, labels = inputs(dtype=torch.float16)
    with torch.no_grad():
        x /= 64
        weight /= 64
    named = {"x": x, "weight": weight}
    factor = 2.0**20
    got = gradients((linear_cross_entropy(x, weight, labels) * factor,), named)
    wide = {name: t.detach().double().requires_grad_() for name, t in named.items()}
    expected = gradients((head_and_loss(**wide, labels=labels) * factor,), wide)
    assert_close(got, expected, 2 * TOLERANCE[torch.float16], "gradient of")


def test_chunks_add_up_in_float32(monkeypatch, backend):
    chunks_of(monkeypatch, 1, 5)
    x, weight, labels = inputs(tokens=256, width=3, vocab=5, dtype=torch.bfloat16)
    with torch.no_grad():
        x.abs_()
        weight.zero_()
    given = x, weight, labels.clamp(max=0)
    got, expected = loss_and_gradients(linear_cross_entropy, *given), expected_of(*given)
    assert_close(got["weight"], expected["weight"], TOLERANCE[torch.bfloat16], "gradient of weight")


def test_kernel_equals_torch_path():
    given = inputs(dtype=torch.float32)
    with use_backend("torch"):
        expected = loss_and_gradients(linear_cross_entropy, *given)
    with use_backend("triton"):
        got = loss_and_gradients(linear_cross_entropy, *given)
    assert_close(got, expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(backend, dtype):
    """As on the tensors rounded beforehand, with the gradients of float32."""
    x, weight, labels = inputs(dtype=torch.float32)
    with torch.autocast(DEVICE, dtype):
        got = linear_cross_entropy(x, weight, labels)
    got = {"loss": got} | gradients((got,), {"x": x, "weight": weight})
    rounded = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
    expected = loss_and_gradients(linear_cross_entropy, *rounded, labels)
    assert torch.equal(got["loss"], expected["loss"])
    assert {t.dtype for t in got.values()} == {torch.float32}
    assert_close(got, expected, TOLERANCE[dtype])


def test_autocast_leaves_float64_alone():
    given = inputs()
    with torch.autocast(DEVICE, torch.bfloat16):
        got = linear_cross_entropy(*given)
    assert_close(got, expected_of(*given)["loss"], 1e-13, "loss")


def test_weight_is_cast_once(monkeypatch, backend):
    chunks_of(monkeypatch, 2, 17)
    x, weight, labels = inputs(dtype=torch.float32)
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default and out.shape == weight.shape:
                casts.append(out.dtype)
            return out

    with Casts(), torch.autocast(DEVICE, torch.bfloat16):
        linear_cross_entropy(x, weight, labels)
    assert casts == [torch.bfloat16]


def test_nothing_scored_is_nan_as_in_torch(backend):
    x, weight, labels = inputs(dtype=torch.float32)
    assert linear_cross_entropy(x, weight, labels.fill_(-100)).isnan()
    assert linear_cross_entropy(x[:0], weight, labels[:0]).isnan()


@pytest.mark.parametrize("label", [-1, 17, 1 << 40])
def test_the_kernel_reads_no_label_out_of_range(label):
    x, weight, labels = inputs(dtype=torch.float32)
    labels[3] = label
    with use_backend("triton"):
        assert linear_cross_entropy(x, weight, labels).isnan()


def test_nothing_but_the_logits_rows_is_written():
    room = torch.randn(5, 48, device=DEVICE)
    before, labels = room.clone(), torch.tensor([1, -100, 32], device=DEVICE)
    kernels.cross_entropy(room[1:4, :33], labels, -100, True)
    assert torch.equal(room[[0, 4]], before[[0, 4]])
    assert not torch.equal(room[1:4, :33], before[1:4, :33])
    kernels.cross_entropy(before[1:4, :33], labels, -100, False)
    assert torch.equal(room[[0, 4]], before[[0, 4]])


def test_the_logits_never_exist_whole(monkeypatch, backend):
    tokens, width, vocab = 64, 4, 112
    chunks_of(monkeypatch, 8, vocab)
    x, weight, labels = inputs(tokens, width, vocab, torch.float32)
    with Largest() as largest:
        linear_cross_entropy(x, weight, labels).backward()
    assert largest.elements == 8 * vocab
    with Largest() as largest:
        F.cross_entropy(x @ weight.T, labels).backward()
    assert largest.elements == tokens * vocab


@pytest.mark.parametrize(
    ("vocab", "dtype", "rows"),
    [
        (128256, torch.bfloat16, 4096),
        (128256, torch.float32, 2092),
        (32000, torch.bfloat16, 4096),
        (20, torch.bfloat16, 838860),
        (1 << 30, torch.bfloat16, 1),
    ],
)
def test_chunks_on_a_gpu(vocab, dtype, rows):
    class Weight:
        is_cuda = True

        def __len__(self):
            return vocab

    assert loss._chunk_rows(Weight(), dtype) == rows


def test_bad_arguments():
    x, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"expected x \(T, D\) and weight \(V, D\)"):
        linear_cross_entropy(x[:, :5], weight, labels)
    with pytest.raises(ValueError, match="labels have shape"):
        linear_cross_entropy(x, weight, labels[:5])
    with pytest.raises(TypeError, match=r"labels are torch.int32, expected torch.int64"):
        linear_cross_entropy(x, weight, labels.int())
