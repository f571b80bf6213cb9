"""RMSNorm, the layer."""

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, randomise

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.layers import RMSNorm


def test_under_autocast_the_result_is_what_products_take():
    norm = randomise(RMSNorm(24, device=DEVICE))
    x, residual = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, (expected_sum, summed) = norm(x), norm(x, residual=residual)
    assert expected.dtype == expected_sum.dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):
        got, (got_sum, stream) = norm(x), norm(x, residual=residual)
    assert got.dtype == got_sum.dtype == torch.bfloat16
    assert_close((got, got_sum), (expected, expected_sum), TOLERANCE[torch.bfloat16], "output")
    assert torch.equal(stream, summed)


def test_norms_of_the_residual_stream_are_called():
    """Hooks take part, in every block."""
    config = Mamba3Config(
        vocab_size=9, d_model=8, n_layer=2, d_state=4, headdim=8, d_intermediate=6
    )
    model = Mamba3LM(config)
    called = []
    for name, module in model.named_modules():
        if name.endswith((".norm", ".norm2", ".norm_f")):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    model(torch.arange(5)[None])
    layers = [f"backbone.layers.{i}.{n}" for i in range(2) for n in ("norm", "norm2")]
    assert called == [*layers, "backbone.norm_f"]


def test_a_gate_and_a_residual_stream():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="not both"):
        RMSNorm(3)(x, x, residual=x)
