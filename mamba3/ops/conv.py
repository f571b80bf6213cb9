"""causal_conv and causal_conv_step: Mamba-1's short depthwise convolution, with its SiLU.

Token t sees itself and the K - 1 before it, of its own sequence:
y_t = silu(bias + sum_k w_k x_{t-K+1+k}). The state holds the last K - 1 tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import differentiated, first_order, no_autocast, run, written
from .dispatch import on_kernels
from .scan import checked_bounds, row_bounds


@no_autocast
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve along the sequence, and apply SiLU.

    Args:
        x: (B, L, D).
        weight: (D, K), the current token's last.
        bias: (D,) or None.
        state: the K - 1 tokens before, oldest first, (B, D, K - 1); None is zeros. With
            `cu_seqlens`, B is the number of sequences.
        cu_seqlens: sequences packed in one row (B = 1): their boundaries, int, (sequences + 1,).

    Returns:
        The output (B, L, D) in x's dtype, and the state after the last token (of every sequence).

    Raises:
        ValueError: shapes that do not fit, boundaries that do not cover the row.

    Source: arXiv 2312.00752, figure 3 (the block's convolution).
    """
    if torch.compiler.is_compiling():
        return tuple(torch.ops.mamba3.causal_conv(x, weight, bias, state, cu_seqlens))
    batch, length, width = x.shape
    taps = weight.shape[-1]
    bounds = None if cu_seqlens is None else checked_bounds(cu_seqlens, x)
    sequences = batch if bounds is None else len(bounds) - 1
    shape = (sequences, width, taps - 1)
    if weight.shape != (width, taps) or (state is not None and state.shape != shape):
        raise ValueError(
            f"expected x (B, L, D), weight (D, K) and a state {shape}, got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {None if state is None else tuple(state.shape)}"
        )
    if on_kernels(x, weight, bias, state):
        tokens = tuple(bounds or row_bounds(x))
        return run(_KernelConv, x, weight, bias, state, tokens)
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dtype = x.to(wide), x.dtype
    before = x.new_zeros(shape) if state is None else state.to(wide)
    before = before.transpose(1, 2)
    if bounds is None:
        padded = torch.cat((before, x), 1)
        lagged = [padded[:, k : k + length] for k in range(taps)]
        after = padded[:, length:]
    else:
        # Every sequence behind the tokens before it, all in one row.
        counts = torch.tensor(bounds).diff()
        pieces = zip(before, x[0].split(counts.tolist()), strict=True)
        padded = torch.cat([one for pair in pieces for one in pair])
        number = torch.arange(sequences).repeat_interleave(counts)
        places = (torch.arange(length) + (taps - 1) * number).to(x.device)
        lagged = [padded[places + k].unsqueeze(0) for k in range(taps)]
        last = torch.tensor(bounds[1:]) + (taps - 1) * torch.arange(sequences)
        after = padded[(last[:, None] + torch.arange(taps - 1)).to(x.device)]
    y = _weighted(lagged, weight.to(wide), bias)
    # A copy: a state must not keep every token alive.
    return F.silu(y, inplace=not y.requires_grad).to(dtype), after.transpose(1, 2).contiguous()


@no_autocast
def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """One token of `causal_conv`: x (B, D), state (B, D, K - 1); returns (B, D) and the new state.

    Args:
        x, weight, bias, state: as in `causal_conv`, without its dimension L.
        inplace: update the state's tensor and return it, recording no gradient.
    """
    tensors = x, weight, bias, state
    # The kernel has no backward pass.
    if not (torch.compiler.is_compiling() or differentiated(*tensors)) and on_kernels(*tensors):
        from .triton.conv import step

        before = state.contiguous()
        after = before if inplace else torch.empty_like(before)
        y = step(x, weight, bias, before, after)
        return y, written(state, after) if inplace else after
    seen = torch.cat((state, x.unsqueeze(-1).to(state.dtype)), -1)
    y = _weighted(seen.unbind(-1), weight.to(state.dtype), bias)
    if inplace:
        with torch.no_grad():
            state.copy_(seen[..., 1:])
    else:
        state = seen[..., 1:]
    return F.silu(y).to(x.dtype), state


class _KernelConv(torch.autograd.Function):
    """The convolution on Triton's kernels; they compute in float32."""

    @staticmethod
    def forward(ctx, x, weight, bias, state, bounds):
        from .triton.conv import Conv
        from .triton.launch import token_rows

        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, state)]
        x = token_rows(x, 1)
        weight, bias, state = (
            None if t is None else t.float().contiguous() for t in (weight, bias, state)
        )
        ctx.conv = Conv(x, weight, bias is not None, bounds)
        ctx.save_for_backward(x, weight, bias, state)
        ctx.set_materialize_grads(False)
        return ctx.conv.forward(x, weight, bias, state)

    @staticmethod
    @first_order
    def backward(ctx, dy, d_final):
        x, *others = ctx.saved_tensors
        dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if dy is None else dy
        d_final = None if d_final is None else d_final.contiguous()
        grads = ctx.conv.backward(x, *others, dy.contiguous(), d_final)
        cast = (
            None if t is None else t.to(dtype) for t, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return *cast, None


def _weighted(lagged, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Channels side by side, as in the tokens.
    first, *rest = weight.T.contiguous()
    if bias is None:
        y = lagged[0] * first
    else:
        y = torch.addcmul(bias.to(first.dtype), lagged[0], first)
    for one, factor in zip(lagged[1:], rest, strict=True):
        y.addcmul_(one, factor)
    return y
