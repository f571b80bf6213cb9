"""mamba3_step: the recurrence by one token, as decoding needs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import backend
from .reference import Mimo, mamba3_scan_reference, wrap_phase
from .state import Mamba3State
from .streams import broadcast_streams, complex_mul, complex_state_update, mix_streams


def mamba3_step(
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
    z: Tensor | None = None,
    *,
    state: Mamba3State,
    mimo: Mimo | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
) -> tuple[Tensor, Mamba3State]:
    """Advance every sequence by one token; the same function as `mamba3_scan` at L = 1.

    Differentiable, and functional: the state passed in is left as it is.

    Args:
        x, b, c, dt, a, lam, rate, z: as in `mamba3_scan`, without the dimension L.
        b_bias, c_bias, d, mimo, norm_weight, norm_eps: as in `mamba3_scan`.
        state: the state of the B sequences, as returned here or by `mamba3_scan`.

    Returns:
        The output (B, H, P) in x's dtype, and the new state.
    """
    wide = state.h.dtype
    tensors = [t.to(wide) for t in (x, b, c, dt, a, lam, rate)]
    weights = [t.to(wide) for t in (b_bias, c_bias, d)]
    z = None if z is None else z.to(wide)
    if backend() == "reference":
        tensors = [t.unsqueeze(1) for t in tensors]
        z = None if z is None else z.unsqueeze(1)
        y, state = mamba3_scan_reference(*tensors, *weights, z, mimo, norm_weight, norm_eps, state)
        return y.squeeze(1).to(x.dtype), state
    y, state = _step(*tensors, *weights, z, mimo, norm_weight, norm_eps, state)
    return y.to(x.dtype), state


def _step(x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight, norm_eps, state):
    groups = b.shape[2]
    phase = wrap_phase(state.phase + rate.unsqueeze(1) * dt.unsqueeze(2))
    interleaved = mimo is None
    cos, sin = phase.cos(), phase.sin()
    phasor = torch.stack((cos, sin), -1).flatten(-2) if interleaved else torch.cat((cos, sin), -1)
    phasor = phasor.unsqueeze(1)
    if groups > 1:
        b, c = (t.repeat_interleave(len(d) // groups, dim=2) for t in (b, c))
    k = complex_mul(b + b_bias.transpose(0, 1), phasor, interleaved=interleaved)
    q = complex_mul(c + c_bias.transpose(0, 1), phasor, interleaved=interleaved)

    # Both tokens of the trapezoid enter together, as 2R outer products.
    alpha = torch.exp(dt * a)
    gamma = lam * dt
    beta = (dt - gamma) * alpha
    v = x.unsqueeze(1) if mimo is None else broadcast_streams(x, mimo[0])
    v_prev = state.x.unsqueeze(1) if mimo is None else broadcast_streams(state.x, mimo[0])
    values = torch.cat((v * gamma[:, None, :, None], v_prev * beta[:, None, :, None]), 1)
    h = complex_state_update(state.h, values, torch.cat((k, state.k), 1), alpha)

    y = torch.matmul(h, q.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, R, H, P)
    y = torch.addcmul(y, v, d.unsqueeze(1))
    if norm_weight is not None:
        y = F.rms_norm(y, y.shape[-1:], eps=norm_eps) * norm_weight
    if mimo is None:
        y = y.squeeze(1)
        return (y if z is None else y * F.silu(z)), Mamba3State(h, phase, k, x)
    if z is not None:
        y = y * F.silu(broadcast_streams(z, mimo[1]))
    return mix_streams(y, mimo[2]), Mamba3State(h, phase, k, x)
