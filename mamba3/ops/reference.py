"""The ground truth: Mamba-3 token by token, as the recurrence is written.

Slow and plain. Every other implementation is compared with this one; it computes in float32, or
in float64 when its inputs are, and torch differentiates it.

    code     paper / official       meaning                                      shape
    x        x                      values, one stream                           (B, L, H, P)
    z        z                      gate                                         (B, L, H, P)
    b, c     B, C                   input and output maps after their RMSNorm    (B, L, R, G, N)
    dt       dt                     step size, > 0                               (B, L, H)
    a        A                      decay rate, < 0                              (B, L, H)
    lam      sigmoid(trap)          weight of the current token in the trapezoid (B, L, H)
    rate     pi * tanh(angle)       rotation, rad per unit of dt                 (B, L, S)
    k, q     rotated B, C           state inputs and readouts                    (B, L, R, H, N)
    v        mimo_x * x             values per stream                            (B, L, R, H, P)
    h        h                      state                                        (B, H, P, N)
    phase    phase                  accumulated rotation, rad                    (B, H, S)

Source: arXiv 2603.15569; the recurrence is the exponential-trapezoidal rule

    h_t = alpha_t h_{t-1} + beta_t v_{t-1} k_{t-1}^T + gamma_t v_t k_t^T,    y_t = h_t q_t
    alpha = exp(dt a),  beta = (1 - lam) dt alpha,  gamma = lam dt
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import no_autocast
from .state import Mamba3State

# (mimo_x, mimo_z, mimo_o), each (H, R, P).
Mimo = tuple[Tensor, Tensor, Tensor]

# 2*pi = TAU_HIGH + TAU_LOW. TAU_HIGH has few bits, so n * TAU_HIGH is exact for any count of
# turns that occurs, and reducing a phase loses nothing however long the sequence is.
TAU_HIGH = 6.28125
TAU_LOW = 2 * math.pi - TAU_HIGH


def wrap_phase(phase: Tensor) -> Tensor:
    """Reduce angles in rad to [-pi, pi] without losing precision."""
    turns = torch.round(phase * (1 / (2 * math.pi)))
    return torch.sub(phase, turns, alpha=TAU_HIGH).sub(turns, alpha=TAU_LOW)


def rotate(a: Tensor, phase: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first channel pairs of `a` (..., N) by `phase` (..., S), S <= N/2.

    A pair is (2i, 2i + 1) when `interleaved` (SISO), else (i, i + N/2) (MIMO), for i < S.
    """
    s, half = phase.shape[-1], a.shape[-1] // 2
    cos, sin = phase.cos(), phase.sin()
    if interleaved:
        re, im, rest = a[..., 0 : 2 * s : 2], a[..., 1 : 2 * s : 2], a[..., 2 * s :]
        pairs = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1)
        return torch.cat((pairs.flatten(-2), rest), dim=-1)
    re, im = a[..., :s], a[..., half : half + s]
    parts = (re * cos - im * sin, a[..., s:half], re * sin + im * cos, a[..., half + s :])
    return torch.cat(parts, dim=-1)


def gate_and_mix(
    y: Tensor, z: Tensor | None, mimo: Mimo | None, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    """Head norm, gate and stream mix: y (..., R, H, P), z (..., H, P) -> (..., H, P)."""
    if norm_weight is not None:
        y = F.rms_norm(y, y.shape[-1:], eps=norm_eps) * norm_weight
    if z is not None:
        z = z.unsqueeze(-3)
        y = y * F.silu(z if mimo is None else z * mimo[1].transpose(0, 1))
    return y.squeeze(-3) if mimo is None else (y * mimo[2].transpose(0, 1)).sum(-3)


@no_autocast
def mamba3_scan_reference(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a: Tensor,
    lam: Tensor,
    rate: Tensor,
    b_bias: Tensor,
    c_bias: Tensor,
    d: Tensor,
    z: Tensor | None,
    mimo: Mimo | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    state: Mamba3State,
) -> tuple[Tensor, Mamba3State]:
    """Run the recurrence over whole sequences; arguments as in `mamba3.ops.mamba3_scan`."""
    n_heads, per_group = x.shape[2], x.shape[2] // b.shape[3]
    h, phase, k_prev, x_prev = state
    ys = []
    for t in range(x.shape[1]):
        phase = wrap_phase(phase + rate[:, t, None] * dt[:, t, :, None])
        k, q = (
            rotate(
                m[:, t].repeat_interleave(per_group, dim=2) + bias.transpose(0, 1),
                phase[:, None],
                interleaved=mimo is None,
            )
            for m, bias in ((b, b_bias), (c, c_bias))
        )
        v, v_prev = streams(x[:, t], mimo), streams(x_prev, mimo)
        alpha = torch.exp(dt[:, t] * a[:, t])
        beta = (1 - lam[:, t]) * dt[:, t] * alpha
        gamma = lam[:, t] * dt[:, t]
        h = (
            alpha[..., None, None] * h
            + beta[..., None, None] * torch.einsum("brhp,brhn->bhpn", v_prev, k_prev)
            + gamma[..., None, None] * torch.einsum("brhp,brhn->bhpn", v, k)
        )
        y = torch.einsum("bhpn,brhn->brhp", h, q) + d.view(n_heads, 1) * v
        ys.append(gate_and_mix(y, None if z is None else z[:, t], mimo, norm_weight, norm_eps))
        k_prev, x_prev = k, x[:, t]
    return torch.stack(ys, dim=1), Mamba3State(h, phase, k_prev, x_prev)


def streams(x: Tensor, mimo: Mimo | None) -> Tensor:
    """Values per stream: x (..., H, P) -> (..., R, H, P)."""
    x = x.unsqueeze(-3)
    return x if mimo is None else x * mimo[0].transpose(0, 1)
