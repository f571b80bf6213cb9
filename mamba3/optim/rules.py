"""The arithmetic of the optimizer's rules, on plain tensors; every function works in place.

    code            symbol      meaning                                             shape
    g               g           gradients of same-shape matrices                    (K, m, n)
    fast, slow      V0, V1      momentum rails                                      (K, m, n)
    u               u           update before and after orthogonalisation           (K, m, n)
    lanes           v           mean squares of the update's longer side            (K, max(m, n))
    w               W           weights                                             (K, m, n)
    low                         16 bits that a bfloat16 weight lacks                the weight's

Scalars are numbers, or tensors of no dimension on the device of the rest, so that a captured CUDA
graph reads their current values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Scalar = float | Tensor

# Under a lane's mean square, which is about 1 / max(m, n).
LANE_EPS = 1e-10


class Rails(NamedTuple):
    """Twin-rail momentum: a fast and a slow average of the gradient, blended from a step on.

    Fields:
        engage_step: the step from which the rails are blended.
        fast: beta of the fast rail from then on.
        fast_from, fast_to: before, the fast rail's beta goes from one to the other in a line.
        slow: beta of the slow rail.
        blend: share of the fast rail once both are blended; before, it is all.
    """

    engage_step: int = 514
    fast: float = 0.85
    fast_from: float = 0.85
    fast_to: float = 0.95
    slow: float = 0.98
    blend: float = 0.4385

    def at(self, step: int) -> tuple[float, float]:
        """The fast rail's beta and its share at a step, counted from 1."""
        if step >= self.engage_step:
            return self.fast, self.blend
        done = (step - 1) / max(self.engage_step - 1, 1)
        return self.fast_from + done * (self.fast_to - self.fast_from), 1.0


def momentum_(g: Tensor, fast: Tensor, beta: Scalar, mu: Scalar, nesterov: bool) -> Tensor:
    """fast += (1 - beta)(g - fast); returns g + mu (fast - g), or fast itself without Nesterov."""
    fast.lerp_(g, 1 - beta)
    return torch.lerp(g, fast, mu) if nesterov else fast


def rails_(
    g: Tensor,
    fast: Tensor,
    slow: Tensor,
    fast_beta: Scalar,
    slow_beta: Scalar,
    share: Scalar,
    mu: Scalar,
    nesterov: bool,
) -> Tensor:
    """Both rails' averages; returns g + mu (share fast + (1 - share) slow - g)."""
    fast.lerp_(g, 1 - fast_beta)
    slow.lerp_(g, 1 - slow_beta)
    blend = torch.lerp(slow, fast, share)
    return torch.lerp(g, blend, mu) if nesterov else blend


def equalize_rows(u: Tensor) -> Tensor:
    """u with rows of unit norm; rows of zeros stay."""
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return u / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def equalize_lanes_(u: Tensor, lanes: Tensor, beta: Scalar) -> Tensor:
    """Bring the lanes of u (K, m, n), one an index of the longer side, to one size; keep its norm.

    Source: NorMuon, arXiv 2510.05491, algorithm 1. Its bias correction is left out: a factor that
    all lanes share ends in the norm.
    """
    short = -1 if u.shape[-2] >= u.shape[-1] else -2
    wide = u.to(lanes.dtype)
    return wide * lane_factors_(wide.square().mean(short), lanes, beta).unsqueeze(short)


def lane_factors_(square: Tensor, lanes: Tensor, beta: Scalar) -> Tensor:
    """Average mean squares of lanes; returns what these are to be multiplied by, (K, lanes)."""
    lanes.lerp_(square, 1 - beta)
    scale = torch.rsqrt(lanes + LANE_EPS)
    before, after = square.sum(-1), (square * scale.square()).sum(-1)
    norm = torch.sqrt(before / after.clamp_min(torch.finfo(after.dtype).tiny))
    return scale * norm[:, None]


def decay_(w: Tensor, amount: Tensor | Scalar, aligned_with: Tensor | None) -> None:
    """w -= amount w, everywhere or where a tensor has w's sign; zero has every sign."""
    if aligned_with is None:
        w.mul_(1 - amount)
    else:
        w.sub_(w * amount * (aligned_with * w >= 0))


def adamw_(
    w: Tensor,
    g: Tensor,
    average: Tensor,
    square: Tensor,
    step: Tensor,
    lr: Scalar,
    decay: Scalar,
    betas: tuple[float, float],
    eps: float,
    cautious: bool,
) -> None:
    """One step of AdamW with decay `decay` = lr times weight decay; averages are w's shape.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. `cautious` decays only where the
    first average has the weight's sign.
    """
    beta1, beta2 = betas
    step += 1
    average.lerp_(g, 1 - beta1)
    square.lerp_(g.square(), 1 - beta2)
    decay_(w, decay, average if cautious else None)
    scale = (1 - beta2**step).sqrt() / (1 - beta1**step)
    root_eps = eps * (1 - beta2**step).sqrt()
    w.sub_(lr * scale * average / (square.sqrt() + root_eps))


def join_bits(high: Tensor, low: Tensor) -> Tensor:
    """The float32 of a bfloat16 and the 16 bits it lacks (int16), as `split_bits` made them."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def split_bits(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 as its nearest bfloat16 and the signed 16 bits between them, both exact together.

    Halves go away from zero. Cutting the low bits off instead would make the weights that the model
    sees smaller by 0.28 % on average.
    """
    bits = master.view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    low = ((bits << 16) >> 16).to(torch.int16)
    return high, low
