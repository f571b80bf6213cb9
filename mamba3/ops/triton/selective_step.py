"""Kernel of `mamba3.ops.selective_step`: one token, its state read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, on_device
from .selective import LOG2E, silu, steps

# Elements of the state that a program has.
TILE = 1024


@triton.jit
def step_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, h_ptr, y_ptr, out_ptr,
    x_stride, dt_stride, b_stride, c_stride, z_stride, channels,
    N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
    GATE: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    here, in_n = d < channels, n < N
    tile = here[:, None] & in_n[None, :]
    own = (row * channels + d)[:, None] * N + n[None, :]
    h = tl.load(h_ptr + own, tile, 0.0, eviction_policy="evict_first").to(tl.float32)
    a = tl.load(a_ptr + d[:, None] * N + n[None, :], tile, 0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + d, here, 0.0).to(tl.float32)
    dt = steps(tl.load(dt_ptr + row * dt_stride + d, here, 0.0).to(tl.float32), here, SOFTPLUS)
    b = tl.load(b_ptr + row * b_stride + n, in_n, 0.0).to(tl.float32)
    c = tl.load(c_ptr + row * c_stride + n, in_n, 0.0).to(tl.float32)
    h = tl.exp2(a * (dt * LOG2E)[:, None]) * h + (dt * x)[:, None] * b[None, :]
    y = tl.sum(h * c[None, :], 1)
    if SKIP:
        y += tl.load(d_ptr + d, here, 0.0).to(tl.float32) * x
    if GATE:
        y *= silu(tl.load(z_ptr + row * z_stride + d, here, 0.0).to(tl.float32))
    tl.store(out_ptr + own, h, tile, eviction_policy="evict_first")
    tl.store(y_ptr + row * channels + d, y, here)


def step(x, dt, a, b, c, d, z, h, out, softplus: bool) -> Tensor:
    """Launch the kernel; `out` takes the new state and may be `h`, both contiguous.

    What varies by row may be a view of wider rows; gradients are not recorded. Returns y.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, channels = x.shape
    d_state = a.shape[1]
    x, dt, b, c, z = (
        t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (x, dt, b, c, z)
    )
    block_n = triton.next_power_of_2(d_state)
    block_d = max(1, TILE // block_n)
    with on_device(x):
        launch(
            step_kernel, (batch, triton.cdiv(channels, block_d)),
            x, dt, a.contiguous(), b, c, a if d is None else d.contiguous(), x if z is None else z,
            h, y, out, *((x if t is None else t).stride(0) for t in (x, dt, b, c, z)), channels,
            N=d_state, BLOCK_D=block_d, BLOCK_N=block_n, SOFTPLUS=softplus, GATE=z is not None,
            SKIP=d is not None,
        )  # fmt: skip
    return y
