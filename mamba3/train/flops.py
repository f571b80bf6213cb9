"""What a training step computes, and what share of a GPU's peak that is (MFU).

Model FLOPs: those that the model's equations need, a multiply-add being two. What is computed again
to save memory, or in another order to save time, does not count, nor does what is done element by
element (norms, gates, rotations), which matrix units have no part in.

    projections   2 D (rows of in_proj) + 2 E D, with an MLP of width W 6 D W; in every layer.
                  Mamba-1 has two more: 2 E (R + 2 N) + 2 R E, R the rank of the step size
    scan          H P N (1 + 4 R) a layer: a state of P N elements a head decays, takes R outer
                  products up, and is read out by R products. The trapezoid's two terms of a token
                  are one outer product, with the sum of their weights. Mamba-1: E N (1 + 4)
    head          2 D V for every position but a row's last, which predicts nothing
    backward      twice the forward: gradients of inputs and of weights

D, E, H, P, N, R as in `mamba3.config`, V the padded vocabulary. Nothing grows with the length.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from mamba3.config import Mamba3Config

# Dense FLOPs a second by the end of a GPU's name: bfloat16 or float16 with float32 sums, and
# float32 without TF32. Sources: NVIDIA's and AMD's data sheets, whose figures "with sparsity" are
# halved.
PEAKS = {
    r"B200": (2250e12, 75e12),
    r"GH200.*": (989e12, 67e12),
    r"H200": (989e12, 67e12),
    r"H200 NVL": (835e12, 60e12),
    r"H100 .*HBM.*": (989e12, 67e12),
    r"H100 PCIe": (756e12, 51e12),
    r"H100 NVL": (835e12, 60e12),
    r"A100[- ].*": (312e12, 19.5e12),
    r"A30": (165e12, 10.3e12),
    r"A40": (149.7e12, 37.4e12),
    r"A10": (125e12, 31.2e12),
    r"L40S": (362e12, 91.6e12),
    r"L40": (181e12, 90.5e12),
    r"L4": (121e12, 30.3e12),
    r"RTX 4090": (165.2e12, 82.6e12),
    r"RTX 3090": (71e12, 35.6e12),
    r"MI300X.*": (1307e12, 163.4e12),
}


class TokenFlops(NamedTuple):
    """FLOPs of one token of training, forward and backward, by what they are for."""

    projections: float
    scan: float
    head: float

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self)


def token_flops(config: Mamba3Config, length: int) -> TokenFlops:
    """The model FLOPs of a token in rows of `length` tokens, as the module's legend has them.

    Raises:
        ValueError: length is less than 1.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    mixers = {"mamba3": _mamba3, "mamba": _mamba}
    each = [mixers[kind](config) for kind in config.kinds]
    projections, scans = (sum(parts) for parts in zip(*each, strict=True))
    projections += config.n_layer * 6 * config.d_model * config.mlp_width
    head = 2 * config.d_model * config.padded_vocab_size * (length - 1) / length
    return TokenFlops(3 * projections, 3 * scans, 3 * head)


def _mamba3(config: Mamba3Config) -> tuple[int, int]:
    """Of the projections and of the scan of a layer, forward."""
    width, inner = config.d_model, config.d_inner
    maps = 2 * config.rank * config.ngroups * config.d_state
    rows = 2 * inner + maps + 3 * config.n_heads + config.n_angles
    scan = inner * config.d_state * (1 + 4 * config.rank)
    return 2 * width * rows + 2 * inner * width, scan


def _mamba(config: Mamba3Config) -> tuple[int, int]:
    """As `_mamba3`."""
    sizes, width = config.mamba, config.d_model
    inner, rank = sizes.expand * width, sizes.rank(width)
    maps = 2 * inner * (rank + 2 * sizes.d_state) + 2 * rank * inner
    return 2 * width * 2 * inner + maps + 2 * inner * width, inner * sizes.d_state * 5


def peak_flops(device: torch.device | str, precision: str) -> float | None:
    """FLOPs a second that a device could make at most; None if it is in no table.

    Args:
        device: of the weights.
        precision: of `mamba3.train.precision.PRECISIONS`. "float32" is without TF32, which torch
            leaves off unless told.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return _peak(torch.cuda.get_device_name(device), precision)


def _peak(name: str, precision: str) -> float | None:
    # Parts of a GPU have its name with more behind it.
    if "MIG" in name:
        return None
    for pattern, (half, single) in PEAKS.items():
        if re.fullmatch(f"(.* )?{pattern}", name):
            return single if precision == "float32" else half
    return None


def mfu(
    tokens_per_s: float,
    config: Mamba3Config,
    length: int,
    *,
    device: torch.device | str,
    precision: str,
    ranks: int = 1,
) -> float | None:
    """Share of the GPUs' peak that goes into model FLOPs; None where the peak is not known.

    Args:
        tokens_per_s: of all ranks together.
        config, length: as of `token_flops`.
        device, precision: as of `peak_flops`.
        ranks: GPUs.
    """
    peak = peak_flops(device, precision)
    if peak is None:
        return None
    return tokens_per_s * token_flops(config, length).total / (peak * ranks)
