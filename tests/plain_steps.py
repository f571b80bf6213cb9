"""What the tests of the optimizer's kernels step with, unless they say otherwise."""

import torch
from compare import DEVICE

from mamba3.optim.pieces import Numbers, Options

# Roundings of float32, of sums of a few terms.
ROUNDING = 3e-7
NUMBERS = Numbers(lr=0.02, weight_decay=0.3, momentum=0.9, fast_beta=0.8, share=0.4)
PLAIN = Options(
    preset="polar_express5", lr_rule="match_rms", nesterov=True, rails=None, equalize=None,
    row_equalize=False, trace_norm=False, cautious=False, decay_adjusted=False, extra_bits=False,
    adam_every=1, dtype=torch.float32,
)  # fmt: skip
# Triton's interpreter cuts off what it should round to bfloat16.
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
