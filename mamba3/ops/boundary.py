"""What a scan takes from the state it starts from, and the state that it leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from .chunking import SequenceEnds
from .reference import rotate
from .state import Mamba3State
from .streams import complex_state_update


def opening_h(
    state: Mamba3State, dt: Tensor, lam: Tensor, mimo_x: Tensor | None, ends: SequenceEnds | None
) -> Tensor:
    """The state's h with what the trapezoid of the first token adds of the token before it.

    Args:
        state: of every sequence.
        dt, lam: (B, L, H).
        mimo_x: (H, R, P), or None for SISO.
        ends: of packed sequences, or None for rows of equal length.
    """
    late = (1 - lam) * dt
    late = late[:, 0] if ends is None else late[0, ends.first] * ends.nonempty[:, None]
    v_prev = state.x.unsqueeze(2) if mimo_x is None else state.x.unsqueeze(2) * mimo_x
    v_prev = v_prev * late[..., None, None]
    return complex_state_update(state.h, v_prev, state.k.transpose(1, 2), torch.ones_like(late))


def closing_state(
    h: Tensor,
    phase: Tensor,
    x: Tensor,
    b: Tensor,
    b_bias: Tensor,
    interleaved: bool,
    ends: SequenceEnds | None,
    state: Mamba3State | None,
) -> Mamba3State:
    """The state after the last token.

    Args:
        h: (sequences, H, P, N).
        phase: (sequences, H, S).
        x, b: (B, L, ...) of the scan.
        b_bias: (H, R, N).
        interleaved: how channels pair.
        ends: of packed sequences, or None; one without tokens leaves `state` as it is.
        state: what the scan started from; None is zeros.
    """
    last = (b[:, -1], x[:, -1]) if ends is None else (b[0, ends.last], x[0, ends.last])
    b_last, x_last = (t.to(h.dtype) for t in last)
    per_group = h.shape[1] // b.shape[3]
    k = b_last.repeat_interleave(per_group, dim=2) + b_bias.transpose(0, 1)
    final = Mamba3State(h, phase, rotate(k, phase[:, None], interleaved), x_last)
    if ends is None:
        return final
    old = state or Mamba3State(*(torch.zeros_like(t) for t in final))
    return Mamba3State(*map(ends.where_nonempty, final, old))
