"""Activation checkpointing gives the gradients that there are without it."""

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, gradients, randomise
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mamba3 import Mamba3Config, Mamba3LM, Mamba3State
from mamba3.layers import Block
from mamba3.ops import mamba3_scan

DTYPES = {"torch": torch.float64, "triton": torch.float32}
BLOCKS = {
    "siso": {},
    "mimo-norm": {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
}


@pytest.fixture(params=DTYPES)
def dtype(request, monkeypatch):
    """A backend's dtype, with that backend in use by the threads of autograd too."""
    monkeypatch.setenv("MAMBA3_BACKEND", request.param)
    return DTYPES[request.param]


def block_and_inputs(options, dtype):
    """A block, what it is called with, and everything that it is differentiated by, by name."""
    config = Mamba3Config(
        vocab_size=1, n_layer=1, d_model=16, d_state=6, headdim=16, d_intermediate=12,
        **BLOCKS[options],
    )  # fmt: skip
    block = randomise(Block(config, device=DEVICE, dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    like = {"u": torch.empty(1, 5, 16), **block.mixer.new_state(1)._asdict()}
    inputs = {
        name: torch.randn(t.shape, generator=generator).to(DEVICE, dtype).requires_grad_()
        for name, t in like.items()
    }
    return block, list(inputs.values()), inputs | dict(block.named_parameters())


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("options", BLOCKS)
def test_same_gradients(options, use_reentrant, dtype):
    block, inputs, tensors = block_and_inputs(options, dtype)
    runs = []

    def run(u, *state):
        runs.append(torch.is_grad_enabled())
        y, final = block(u, state=Mamba3State(*state))
        return y, *final

    def differentiate(outputs):
        """By backward(), which is all that the reentrant form supports."""
        weights = [torch.cos(torch.arange(t.numel())).to(t).view_as(t) for t in outputs]
        torch.autograd.backward(outputs, weights)
        found = {name: t.grad for name, t in tensors.items()}
        for t in tensors.values():
            t.grad = None
        return found

    expected = run(*inputs)
    wanted = differentiate(expected)
    got = checkpoint(run, *inputs, use_reentrant=use_reentrant)
    assert_close(got, expected, 0.0, "output")
    assert_close(differentiate(got), wanted, 1e-7, "gradient")
    assert runs == [True, not use_reentrant, True]


@pytest.mark.parametrize("options", BLOCKS)
def test_compiled(options, monkeypatch):
    torch._dynamo.reset()
    block, inputs, tensors = block_and_inputs(options, torch.float64)
    scans = []

    def run(u, *state):
        y, final = block(u, state=Mamba3State(*state))
        return y, *final

    def checkpointed(*inputs):
        return checkpoint(run, *inputs, use_reentrant=False)

    def counting(*args, **options):
        scans.append(torch.is_grad_enabled())
        return mamba3_scan(*args, **options)

    expected = run(*inputs)
    wanted = gradients(expected, tensors)
    monkeypatch.setattr("mamba3.ops.scan.mamba3_scan", counting)
    got = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")(*inputs)
    tolerance = TOLERANCE[torch.float64]
    assert_close(got, expected, tolerance, "output")
    assert_close(gradients(got, tensors), wanted, 2 * tolerance, "gradient")
    # Forward; again for what follows it in the block; and once more to be differentiated.
    assert scans == [False, False, True]


class Products(TorchDispatchMode):
    """Counts products of linear layers and everything else."""

    def __init__(self):
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.products += 1
        else:
            self.others += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", BLOCKS)
def test_a_model_that_recomputes(options, dtype):
    """Equal losses and gradients; what the backward pass repeats is what it is asked to."""
    config = Mamba3Config(
        vocab_size=20, n_layer=2, d_model=16, d_state=6, headdim=16, d_intermediate=12,
        **BLOCKS[options],
    )  # fmt: skip
    model = randomise(Mamba3LM(config, device=DEVICE, dtype=dtype), scale=0.3)
    ids = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    parameters = dict(model.named_parameters())
    counts, found = {}, {}
    for kind in (None, "full", "selective"):
        model.backbone.recompute = kind
        loss = model(ids, labels=ids, return_logits=False).loss
        with Products() as seen:
            gradients_of = torch.autograd.grad(loss, list(parameters.values()))
        found[kind] = {"loss": loss, **dict(zip(parameters, gradients_of, strict=True))}
        counts[kind] = seen
        if kind is not None:
            assert_close(found[kind], found[None], 1e-7, kind)
    assert counts["full"].products > counts["selective"].products
    assert counts["selective"].others > counts[None].others
    with torch.no_grad():  # where there is nothing to save memory for
        assert torch.equal(model(ids, labels=ids, return_logits=False).loss, found[None]["loss"])
