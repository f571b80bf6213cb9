"""Other implementations of the scan, for `bench_gpu.py`: published numbers, and how to call them.

Tensors are those of `mamba3.ops.mamba3_scan`, by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

# Not measured by this script: state-spaces/mamba of July 2026 (SISO: Triton, MIMO: TileLang 0.1.8)
# on one NVIDIA H200, torch 2.11, Triton 3.6. (form, B, L): forward ms, forward + backward ms, MB.
PUBLISHED = {
    ("SISO", 1, 2048): (0.643, 2.200, 396),
    ("SISO", 1, 8192): (1.329, 3.682, 816),
    ("SISO", 1, 32768): (5.326, 14.594, 2496),
    ("SISO", 8, 2048): (0.695, 2.943, 1376),
    ("SISO", 16, 4096): (2.573, 9.417, 4736),
    ("SISO", 64, 512): (1.411, 4.805, 2496),
    ("MIMO R=4", 1, 2048): (0.909, 4.782, 508),
    ("MIMO R=4", 8, 2048): (1.079, 8.472, 2271),
    ("MIMO R=4", 16, 4096): (4.029, None, None),
}
PUBLISHED_FIRST_CALL_S = {"MIMO R=4": 109}
GLA, OFFICIAL = "simple_gla", "official"

# What is differentiated, and what computes the output of it.
Timed = tuple[list[Tensor], Callable[[], Tensor]]


def importable(official: bool) -> dict[str, Callable[[dict[str, Tensor]], Timed]]:
    """Functions that make of our tensors a call of a peer, by its name."""
    peers = {GLA: simple_gla} if importlib.util.find_spec("fla") else {}
    return peers | ({OFFICIAL: official_siso} if official else {})


def simple_gla(tensors: dict[str, Tensor]) -> Timed:
    """chunk_simple_gla, with q and k per head."""
    from fla.ops.common import chunk_o
    from fla.ops.simple_gla import chunk_simple_gla

    # It refuses its backward pass on Hopper with Triton 3.4 to 3.7.0, whose gradients are wrong
    # there; the time is of interest all the same.
    chunk_o.TRITON_ABOVE_3_7_1 = True
    heads = tensors["x"].shape[2]
    q, k = (
        tensors[name].detach().squeeze(3).expand(-1, -1, heads, -1).contiguous()
        for name in ("c", "b")
    )
    g = (tensors["dt"] * tensors["a"]).detach()
    leaves = [t.requires_grad_() for t in (q, k, tensors["x"].detach(), g)]
    return leaves, lambda: chunk_simple_gla(*leaves)[0]


def official_siso(tensors: dict[str, Tensor]) -> Timed:
    """mamba3_siso_combined of the same numbers as ours, angles and trapezoid in bf16."""
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    def heads_first(t):
        return t.transpose(1, 2).contiguous()

    heads = tensors["x"].shape[2]
    t = {name: tensor.detach() for name, tensor in tensors.items()}
    turns = torch.atanh((t["rate"] / torch.pi).clamp(-0.999, 0.999)).unsqueeze(2)
    leaves = [
        t["c"][:, :, 0],
        t["b"][:, :, 0],
        t["x"],
        heads_first(t["a"] * t["dt"]),
        heads_first(t["dt"]),
        heads_first(torch.logit(t["lam"].clamp(1e-3, 1 - 1e-3))).bfloat16(),
        t["c_bias"][:, 0],
        t["b_bias"][:, 0],
        turns.expand(-1, -1, heads, -1).bfloat16().contiguous(),
        t["d"],
        t["z"],
    ]
    leaves = [leaf.contiguous().requires_grad_() for leaf in leaves]
    return leaves, lambda: mamba3_siso_combined(*leaves)


def warm_up(
    peers: dict[str, Callable[[dict[str, Tensor]], Timed]], tensors: dict[str, Tensor]
) -> dict[str, Callable[[dict[str, Tensor]], Timed]]:
    """Have peers choose their configurations for these sizes; returns those that run."""
    if peers:
        shorten_tuning(warmup=5, rep=20)
    running = {}
    for name, make in peers.items():
        try:
            run_once(make, tensors)
            running[name] = make
        except Exception as failure:  # whatever a peer does, ours is timed
            print(f"{name} is left out: {type(failure).__name__}: {failure}")
    return running


def compile_part(part: int, of: int, official: bool, tensors: dict[str, Tensor]) -> None:
    """Compile every `of`-th configuration of the peers, from number `part` on."""
    shorten_tuning(warmup=1, rep=1, part=part, of=of)
    for make in importable(official).values():
        run_once(make, tensors)


def run_once(make: Callable[[dict[str, Tensor]], Timed], tensors: dict[str, Tensor]) -> None:
    """Forward and backward."""
    leaves, function = make(tensors)
    y = function()
    torch.autograd.grad(y, leaves, torch.ones_like(y))
    torch.cuda.synchronize()


def shorten_tuning(warmup: int, rep: int, part: int = 0, of: int = 1) -> None:
    """Have Triton's tuners, of peers imported from now on, try a configuration for fewer ms."""
    import triton
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def shorter(self, fn, arg_names, configs, *args, **options):
        def bench(call, quantiles):
            return triton.testing.do_bench(call, warmup=warmup, rep=rep, quantiles=quantiles)

        configs = configs[part::of] or configs[:1]
        init(self, fn, arg_names, configs, *args, **{**options, "do_bench": bench})

    Autotuner.__init__ = shorter
