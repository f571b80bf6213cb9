"""Kernels of `mamba3.ops.causal_conv` and its step, and their launchers.

    table, sequences  where chunks of tokens lie, as in `mamba3.ops.triton.chunk`
    x, y              (tokens, D), x with any distance between tokens
    weight            (D, K) float32, the current token's last; bias (D,) float32
    state, final      the K - 1 tokens before and at the end of every sequence, (B, K - 1, D): the
                      step's, which is the public form, is (B, D, K - 1)

A program has a tile of tokens and channels. Tokens that its taps share are in the cache, and what a
tap sees before a sequence's first token is its state. A thread has all tokens of its channels:
`lane` is the distance of channels, 1, which Triton must not know (see `selective`). Else several
threads would make a sum over tokens, each in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..recording import keep
from .launch import launch, on_device, token_stride
from .layout import layout
from .selective import LOG2E, silu

# Tokens and channels of a tile.
CHUNK, BLOCK_D, WARPS = 16, 64, 2


@triton.jit
def _channels(channels, lane, BLOCK_D: tl.constexpr):
    """Where a program's channels are, and which there are; the others repeat the last one."""
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.max_contiguous(tl.minimum(d, channels - 1) * lane, 2), d < channels


@triton.jit
def _near(row, start, stop):
    """The rows of a sequence that are nearest to some; any row where it has none."""
    return tl.where(start < stop, tl.maximum(start, tl.minimum(row, stop - 1)), 0)


@triton.jit
def _seen(
    row, start, stop, x_ptr, state_ptr, d, here, sequence, stride, channels,
    K: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """x at rows (T,) of one sequence: the state's before its start, 0 behind its end; (T, D)."""
    # Not masked, since each load of a mask of its own would wait for the one before.
    near = _near(row, start, stop)
    x = tl.load(x_ptr + near[:, None] * stride + d[None, :]).to(tl.float32)
    x = tl.where(((row >= start) & (row < stop))[:, None], x, 0.0)
    if HAS_STATE:
        place = row - start + (K - 1)
        before = (place >= 0) & (row < start)
        at = (sequence * (K - 1) + place)[:, None] * channels + d[None, :]
        x += tl.load(state_ptr + at, before[:, None] & here[None, :], 0.0)
    return x


@triton.jit
def _weighted(
    row, start, stop, x_ptr, state_ptr, weight_ptr, bias_ptr, d, here, sequence, stride, channels,
    K: tl.constexpr, HAS_STATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The convolution at rows (T,), before its SiLU; (T, D)."""
    total = tl.zeros([row.shape[0], d.shape[0]], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + d, here, 0.0)[None, :]
    for k in tl.static_range(K):
        x = _seen(
            row - (K - 1) + k, start, stop, x_ptr, state_ptr, d, here, sequence, stride, channels,
            K, HAS_STATE,
        )  # fmt: skip
        total += x * tl.load(weight_ptr + d * K + k, here, 0.0)[None, :]
    return total


@triton.jit
def _slope(
    row, start, stop, x_ptr, state_ptr, weight_ptr, bias_ptr, dy_ptr, d, here, sequence, stride,
    channels, K: tl.constexpr, HAS_STATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Gradient of what `_weighted` gives; 0 outside of the sequence."""
    v = _weighted(
        row, start, stop, x_ptr, state_ptr, weight_ptr, bias_ptr, d, here, sequence, stride,
        channels, K, HAS_STATE, HAS_BIAS,
    )  # fmt: skip
    inside = (row >= start) & (row < stop)
    near = _near(row, start, stop)
    dy = tl.load(dy_ptr + near[:, None] * channels + d[None, :]).to(tl.float32)
    open = 1.0 / (1.0 + tl.exp2(-v * LOG2E))
    return tl.where(inside[:, None], dy * open * (1.0 + v * (1.0 - open)), 0.0)


@triton.jit
def _chunk(chunk, table_ptr, sequences_ptr):
    """First row of a chunk; its sequence's number, start and end."""
    sequence = tl.load(table_ptr + chunk * 6 + 3)
    start = tl.load(table_ptr + tl.load(sequences_ptr + sequence * 4) * 6)
    return tl.load(table_ptr + chunk * 6), sequence, start, tl.load(table_ptr + chunk * 6 + 1)


@triton.jit(do_not_specialize=["lane"])
def forward_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, table_ptr, sequences_ptr, y_ptr, stride, channels, lane,
    K: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    first, sequence, start, stop = _chunk(chunk, table_ptr, sequences_ptr)
    d, here = _channels(channels, lane, BLOCK_D)
    row = first + tl.arange(0, T)
    v = _weighted(
        row, start, stop, x_ptr, state_ptr, weight_ptr, bias_ptr, d, here, sequence, stride,
        channels, K, HAS_STATE, HAS_BIAS,
    )  # fmt: skip
    real = (row < stop)[:, None] & here[None, :]
    tl.store(y_ptr + row[:, None] * channels + d[None, :], silu(v), real)


@triton.jit(do_not_specialize=["lane"])
def backward_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, table_ptr, sequences_ptr, dy_ptr, d_final_ptr, dx_ptr,
    d_params_ptr, stride, channels, lane,
    K: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """dx, and what a tile adds to the gradients of weight and bias, (chunks, K + 1, D)."""
    chunk = tl.program_id(0).to(tl.int64)
    first, sequence, start, stop = _chunk(chunk, table_ptr, sequences_ptr)
    d, here = _channels(channels, lane, BLOCK_D)
    row = first + tl.arange(0, T)
    dx = tl.zeros([T, BLOCK_D], tl.float32)
    params = d_params_ptr + chunk * (K + 1) * channels + d
    for later in tl.static_range(K):
        slope = _slope(
            row + later, start, stop, x_ptr, state_ptr, weight_ptr, bias_ptr, dy_ptr, d, here,
            sequence, stride, channels, K, HAS_STATE, HAS_BIAS,
        )  # fmt: skip
        dx += slope * tl.load(weight_ptr + d * K + (K - 1 - later), here, 0.0)[None, :]
        if later == 0:
            tl.store(params + K * channels, tl.sum(slope, 0), here)
            for k in tl.static_range(K):
                x = _seen(
                    row - (K - 1) + k, start, stop, x_ptr, state_ptr, d, here, sequence, stride,
                    channels, K, HAS_STATE,
                )  # fmt: skip
                tl.store(params + k * channels, tl.sum(slope * x, 0), here)
    real = (row < stop)[:, None] & here[None, :]
    if HAS_FINAL:
        place = row - stop + (K - 1)
        at = (sequence * (K - 1) + place)[:, None] * channels + d[None, :]
        dx += tl.load(d_final_ptr + at, real & (place >= 0)[:, None], 0.0)
    tl.store(dx_ptr + row[:, None] * channels + d[None, :], dx, real)


@triton.jit(do_not_specialize=["lane"])
def ends_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, bounds_ptr, dy_ptr, d_final_ptr, out_ptr, stride,
    channels, lane, K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FINAL: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The state after every sequence; with BACKWARD the gradient of the one before it."""
    sequence = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    d, here = _channels(channels, lane, BLOCK_D)
    one = tl.arange(0, 1)
    own = sequence * (K - 1) * channels + d
    for j in tl.static_range(K - 1):
        if BACKWARD:
            total = tl.zeros([1, BLOCK_D], tl.float32)
            for k in tl.static_range(j + 1):  # by tap k it was seen at the token start + j - k
                slope = _slope(
                    start + (j - k) + one, start, stop, x_ptr, state_ptr, weight_ptr, bias_ptr,
                    dy_ptr, d, here, sequence, stride, channels, K, HAS_STATE, HAS_BIAS,
                )  # fmt: skip
                total += slope * tl.load(weight_ptr + d * K + k, here, 0.0)[None, :]
            if HAS_FINAL:  # a sequence shorter than the state passes a part of it on
                place = j - (stop - start) + tl.zeros_like(d)
                passed = tl.load(d_final_ptr + own + place * channels, here & (place >= 0), 0.0)
                total += passed[None, :]
        else:
            total = _seen(
                stop - (K - 1) + j + one, start, stop, x_ptr, state_ptr, d, here, sequence, stride,
                channels, K, HAS_STATE,
            )  # fmt: skip
        tl.store(out_ptr + own + j * channels, tl.sum(total, 0), here)


@triton.jit
def step_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, y_ptr, out_ptr, stride, channels,
    K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One token for every sequence; the state may be written where it is read."""
    sequence = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    here = d < channels
    own = (sequence * channels + d) * (K - 1)
    x = tl.load(x_ptr + sequence * stride + d, here, 0.0).to(tl.float32)
    v = x * tl.load(weight_ptr + d * K + (K - 1), here, 0.0)
    if HAS_BIAS:
        v += tl.load(bias_ptr + d, here, 0.0)
    for k in tl.static_range(K - 1):
        seen = tl.load(state_ptr + own + k, here, 0.0).to(tl.float32)
        v += seen * tl.load(weight_ptr + d * K + k, here, 0.0)
        if k > 0:
            tl.store(out_ptr + own + (k - 1), seen, here)
    if K > 1:
        tl.store(out_ptr + own + (K - 2), x, here)
    tl.store(y_ptr + sequence * channels + d, silu(v), here)


class Conv:
    """One convolution's launches; holds sizes and where tokens lie, tensors are passed.

    Args:
        x: (..., D) as `token_rows` gives it.
        weight: (D, K) float32.
        has_bias: whether there is a bias.
        bounds: boundaries of the sequences in the flattened tokens, packed or not.
    """

    def __init__(self, x: Tensor, weight: Tensor, has_bias: bool, bounds: Sequence[int]):
        self.sequences, self.channels = len(bounds) - 1, x.shape[-1]
        self.layout = layout(bounds, CHUNK, 1, x.device)
        keep(self.layout)
        self.chunks, self.blocks = len(self.layout.table), triton.cdiv(self.channels, BLOCK_D)
        self.sizes = token_stride(x.shape, x.stride(), 1), self.channels, 1
        self.constants = {"K": weight.shape[1], "BLOCK_D": BLOCK_D, "HAS_BIAS": has_bias}
        self.constants["num_warps"] = WARPS

    def forward(self, x, weight, bias, state) -> tuple[Tensor, Tensor]:
        """The output and the state after every sequence; `bias`, `state` may be None."""
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        state = _by_tokens(state)
        given = self._given(x, weight, bias, state)
        constants = self.constants | {"HAS_STATE": state is not None}
        with on_device(x):
            if self.chunks:
                launch(
                    forward_kernel, (self.chunks, self.blocks),
                    *given, self.layout.table, self.layout.sequences, y, *self.sizes,
                    **constants, T=CHUNK,
                )  # fmt: skip
            final = self._ends(given, x, None, constants, backward=False)
        return y, final

    def backward(self, x, weight, bias, state, dy, d_final):
        """Gradients of x, weight, bias and state; those of what is None are None."""
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        state, d_final, taps = _by_tokens(state), _by_tokens(d_final), weight.shape[1]
        d_params = self._floats(self.chunks, taps + 1, self.channels)
        given = self._given(x, weight, bias, state)
        constants = self.constants | {"HAS_STATE": state is not None}
        with on_device(x):
            if self.chunks:
                launch(
                    backward_kernel, (self.chunks, self.blocks),
                    *given, self.layout.table, self.layout.sequences, dy,
                    dy if d_final is None else d_final, dx, d_params, *self.sizes,
                    **constants, T=CHUNK, HAS_FINAL=d_final is not None,
                )  # fmt: skip
            d_state = None
            if state is not None:
                d_state = self._ends(given, dy, d_final, constants, backward=True)
        d_params = d_params.sum(0)
        return dx, d_params[:taps].T, None if bias is None else d_params[taps], d_state

    def _ends(self, given, dy, d_final, constants, *, backward: bool) -> Tensor:
        out = self._floats(self.sequences, self.constants["K"] - 1, self.channels)
        launch(
            ends_kernel, (self.sequences, self.blocks),
            *given, self.layout.bounds, dy, dy if d_final is None else d_final, out, *self.sizes,
            **constants, HAS_FINAL=d_final is not None, BACKWARD=backward,
        )  # fmt: skip
        return out.mT.contiguous()

    def _given(self, x, weight, bias, state):
        return x, weight if state is None else state, weight, weight if bias is None else bias

    def _floats(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=self.layout.table.device)


def _by_tokens(state: Tensor | None) -> Tensor | None:
    """(B, D, K - 1) as the kernels read it: loads that lie as those of x change no layout."""
    return None if state is None else state.mT.contiguous()


def step(x, weight, bias, state, out) -> Tensor:
    """One token; `out` takes the new state and may be `state`. Returns y in x's dtype."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, channels = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight.contiguous()
    with on_device(x):
        launch(
            step_kernel, (batch, triton.cdiv(channels, 128)),
            x, state, weight, weight if bias is None else bias, y, out, x.stride(0), channels,
            K=weight.shape[1], BLOCK_D=128, HAS_BIAS=bias is not None,
        )  # fmt: skip
    return y
