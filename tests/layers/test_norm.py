"""RMSNorm, the layer."""

import torch
from compare import DEVICE, TOLERANCE, assert_close, randomise

from mamba3.layers import RMSNorm


def test_under_autocast_the_result_is_what_products_take():
    norm = randomise(RMSNorm(24, device=DEVICE))
    x, residual = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, (expected_sum, summed) = norm(x), norm.add(x, residual)
    assert expected.dtype == expected_sum.dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):
        got, (got_sum, stream) = norm(x), norm.add(x, residual)
    assert got.dtype == got_sum.dtype == torch.bfloat16
    assert_close((got, got_sum), (expected, expected_sum), TOLERANCE[torch.bfloat16], "output")
    assert torch.equal(stream, summed)
