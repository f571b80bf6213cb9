"""mamba3_step: the recurrence by one token, as decoding needs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import no_autocast
from .dispatch import backend
from .norm import rms_norm
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

    Differentiable, and functional: the state passed in is left as it is. On a GPU, where nothing
    is differentiated, it is one Triton kernel.

    Args:
        x, b, c, dt, a, lam, rate, z: as in `mamba3_scan`, without the dimension L.
        b_bias, c_bias, d, mimo, norm_weight, norm_eps: as in `mamba3_scan`.
        state: the state of the B sequences, as returned here or by `mamba3_scan`; h may be kept in
            bfloat16, which halves what a step reads and writes.

    Returns:
        The output (B, H, P) in x's dtype, and the new state.

    Raises:
        ValueError: a state of another batch or of other sizes.
    """
    if state.h.shape != (*x.shape, b.shape[-1]) or state.k.shape[1] != b.shape[1]:
        state.check(Mamba3State.zeros_for(len(x), x, b, rate, device="meta"))
    chosen = backend(x.device)
    arguments = [x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z]
    if chosen == "triton":
        tensors = [*arguments, *(mimo or ()), norm_weight, *state]
        if not _needs_more_than_the_kernel(tensors):
            from .triton.step import step

            return step(*arguments, mimo, norm_weight, norm_eps, state)
    stored, wide = state.h.dtype, torch.promote_types(state.h.dtype, torch.float32)
    if stored != wide:
        state = state.to(wide)
    tensors = [t if t.dtype == wide else t.to(wide) for t in (x, b, c, dt, a, lam, rate)]
    weights = [t if t.dtype == wide else t.to(wide) for t in (b_bias, c_bias, d)]
    z, norm_weight = (None if t is None else t.to(wide) for t in (z, norm_weight))
    if chosen == "reference":
        tensors = [t.unsqueeze(1) for t in tensors]
        z = None if z is None else z.unsqueeze(1)
        rest = (z, mimo, norm_weight, norm_eps, state)
        y, state = mamba3_scan_reference(*tensors, *weights, *rest)
        y = y.squeeze(1)
    else:
        y, state = _step(*tensors, *weights, z, mimo, norm_weight, norm_eps, state)
    if stored != wide:
        state = state._replace(h=state.h.to(stored))
    return y.to(x.dtype), state


def _needs_more_than_the_kernel(tensors: list[Tensor | None]) -> bool:
    """Whether something is differentiated, or in float64: the kernel does neither."""
    present = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in present):
        return True
    return any(t.dtype == torch.float64 for t in present)


@no_autocast
def _step(x, b, c, dt, a, lam, rate, b_bias, c_bias, d, z, mimo, norm_weight, norm_eps, state):
    """As `mamba3_step`, with streams behind heads: (B, H, R, ...)."""
    interleaved = mimo is None
    dt = dt.unsqueeze(2)
    phase = wrap_phase(torch.addcmul(state.phase, rate.unsqueeze(1), dt))
    cos, sin = phase.cos(), phase.sin()
    phasor = torch.stack((cos, sin), -1).flatten(-2) if interleaved else torch.cat((cos, sin), -1)
    maps = torch.stack((b, c), 1).transpose(2, 3)  # (B, 2, G, R, N)
    if maps.shape[2] > 1:
        maps = maps.repeat_interleave(len(d) // maps.shape[2], dim=2)
    maps = maps + torch.stack((b_bias, c_bias))
    k, q = complex_mul(maps, phasor[:, None, :, None], interleaved=interleaved).unbind(1)

    # Both tokens of the trapezoid enter together, as 2R outer products.
    alpha = torch.exp(dt * a.unsqueeze(2))
    gamma = lam.unsqueeze(2) * dt
    beta = (dt - gamma) * alpha
    values = torch.stack((x * gamma, state.x * beta), 1)  # (B, 2, H, P)
    if mimo is None:
        values, skip = values.transpose(1, 2), d[:, None, None]
    else:
        values = broadcast_streams(values, mimo[0]).transpose(1, 2).flatten(2, 3)
        skip = d[:, None, None] * mimo[0]
    keys = torch.cat((k, state.k.transpose(1, 2)), 2)
    h = complex_state_update(state.h, values, keys, alpha.squeeze(2))

    # q times h transposed: the other order, a matrix times a vector, is many times slower.
    y = torch.addcmul(q @ h.mT, x.unsqueeze(2), skip)
    if norm_weight is not None:
        y = rms_norm(y, norm_weight.unsqueeze(1), norm_eps)
    if mimo is None:
        y = y.squeeze(2)
        y = y if z is None else y * F.silu(z)
    else:
        y = y if z is None else y * F.silu(broadcast_streams(z, mimo[1]))
        y = mix_streams(y, mimo[2])
    return y, Mamba3State(h, phase, k.transpose(1, 2), x)
