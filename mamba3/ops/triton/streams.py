"""Kernels of `mamba3.ops.streams`: complex pairs, streams, and the state's update by a token.

Operands are contiguous and already broadcast. Mixing streams is `triton.gate` without a gate.

    complex_mul     out = a b,          d_a = d_out conj(b),  d_b = d_out conj(a)
    broadcast       out_r = x w_r,      d_x = sum_r d_out_r w_r,  d_w_r = sum_t d_out_r x
    state_update    out = decay h + sum_m v_m k_m^T,  d_h = decay d_out,  d_decay = sum d_out h,
                    d_v_m = d_out k_m,  d_k_m = d_out^T v_m

Source: arXiv 2603.15569; symbols as in `mamba3.ops.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gate import PARTIAL_ROWS, SUMMING_TILE, TILE, _offsets, _weight
from .launch import OPTIONS, on_device
from .pairs import load_pairs, store_pairs


@triton.jit
def _load(pointer, row, rows, WIDTH: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Parts (ROWS, BLOCK) of rows of WIDTH channels, in float32."""
    re, im = load_pairs(pointer + row * WIDTH, row < rows, WIDTH, BLOCK, HALVES, ROWS)
    return re.to(tl.float32), im.to(tl.float32)


@triton.jit
def _store(pointer, re, im, row, rows, WIDTH: tl.constexpr, HALVES: tl.constexpr,
           ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    store_pairs(pointer + row * WIDTH, re, im, row < rows, WIDTH, BLOCK, HALVES, ROWS)


@triton.jit(do_not_specialize=["rows"])
def _complex_kernel(
    a_ptr, b_ptr, out_ptr, rows,
    N: tl.constexpr, S: tl.constexpr, HALVES: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    re, im = _load(a_ptr, row, rows, N, HALVES, ROWS, BLOCK)
    b_re, b_im = _load(b_ptr, row, rows, 2 * S, HALVES, ROWS, BLOCK)
    if ADD:
        re, im = re + b_re, im + b_im
    else:
        b_re = tl.where(tl.arange(0, BLOCK)[None, :] < S, b_re, 1.0)
        re, im = re * b_re - im * b_im, re * b_im + im * b_re
    _store(out_ptr, re, im, row, rows, N, HALVES, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _complex_mul_backward_kernel(
    grad_ptr, a_ptr, b_ptr, grad_a_ptr, grad_b_ptr, rows,
    N: tl.constexpr, S: tl.constexpr, HALVES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    re, im = _load(grad_ptr, row, rows, N, HALVES, ROWS, BLOCK)
    a_re, a_im = _load(a_ptr, row, rows, N, HALVES, ROWS, BLOCK)
    b_re, b_im = _load(b_ptr, row, rows, 2 * S, HALVES, ROWS, BLOCK)
    grad_re, grad_im = re * a_re + im * a_im, im * a_re - re * a_im
    _store(grad_b_ptr, grad_re, grad_im, row, rows, 2 * S, HALVES, ROWS, BLOCK)
    b_re = tl.where(tl.arange(0, BLOCK)[None, :] < S, b_re, 1.0)
    grad_re, grad_im = re * b_re + im * b_im, im * b_re - re * b_im
    _store(grad_a_ptr, grad_re, grad_im, row, rows, N, HALVES, ROWS, BLOCK)


@triton.jit(do_not_specialize=["tokens"])
def _broadcast_kernel(
    x_ptr, weight_ptr, out_ptr, tokens, heads,
    R: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    wide, _, at, here = _offsets(tile, head, heads, tokens, 0, R, P, 1, BLOCK_T, BLOCK_P)
    x = tl.load(x_ptr + at, here, 0.0).to(tl.float32)
    for r in tl.static_range(R):
        tl.store(out_ptr + wide + r * P, x * _weight(weight_ptr, head * R + r, P, BLOCK_P), here)


@triton.jit(do_not_specialize=["tokens"])
def _broadcast_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, grad_x_ptr, partial_ptr, tokens, heads,
    R: tl.constexpr, P: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    parts = tl.num_programs(0) // heads
    streams, p = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_P)[None, :]
    grad_weight = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
    for tile in range(part, tl.cdiv(tokens, BLOCK_T), parts):
        wide, _, at, here = _offsets(tile, head, heads, tokens, 0, R, P, 1, BLOCK_T, BLOCK_P)
        x = tl.load(x_ptr + at, here, 0.0).to(tl.float32)
        grad_x = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
        for r in tl.static_range(R):
            grad = tl.load(grad_ptr + wide + r * P, here, 0.0).to(tl.float32)
            grad_x += grad * _weight(weight_ptr, head * R + r, P, BLOCK_P)
            row = tl.sum(grad * x, 0, keep_dims=True)
            grad_weight += tl.where(streams == r, row, 0.0)
        tl.store(grad_x_ptr + at, grad_x, here)
    place = tl.program_id(0).to(tl.int64) * (R * P) + streams * P + p
    tl.store(partial_ptr + place, grad_weight, (streams < R) & (p < P))


@triton.jit
def _state_update_kernel(
    h_ptr, v_ptr, k_ptr, decay_ptr, out_ptr,
    M: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p, n = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    at, here = row * (P * N) + p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    h = tl.load(h_ptr + at, here, 0.0).to(tl.float32)
    h *= tl.load(decay_ptr + row).to(tl.float32)
    for m in range(M):
        v = tl.load(v_ptr + (row * M + m) * P + p, p < P, 0.0).to(tl.float32)
        k = tl.load(k_ptr + (row * M + m) * N + n, n < N, 0.0).to(tl.float32)
        h += v[:, None] * k[None, :]
    tl.store(out_ptr + at, h, here)


@triton.jit
def _state_update_backward_kernel(
    grad_ptr, h_ptr, v_ptr, k_ptr, decay_ptr, grad_h_ptr, grad_v_ptr, grad_k_ptr, grad_decay_ptr,
    M: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    decay = tl.load(decay_ptr + row).to(tl.float32)
    grad_decay = tl.zeros([BLOCK_P], tl.float32)
    for first in range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        at, here = row * (P * N) + p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
        grad = tl.load(grad_ptr + at, here, 0.0).to(tl.float32)
        grad_decay += tl.sum(grad * tl.load(h_ptr + at, here, 0.0).to(tl.float32), 1)
        tl.store(grad_h_ptr + at, grad * decay, here)
    tl.store(grad_decay_ptr + row, tl.sum(grad_decay, 0))
    # The gradient is in a cache by now: it is read again for every outer product.
    for m in range(M):
        k = tl.load(k_ptr + (row * M + m) * N + n, n < N, 0.0).to(tl.float32)
        grad_k = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, P, BLOCK_P):
            p = first + tl.arange(0, BLOCK_P)
            at = row * (P * N) + p[:, None] * N + n[None, :]
            here = (p < P)[:, None] & (n < N)[None, :]
            grad = tl.load(grad_ptr + at, here, 0.0).to(tl.float32)
            v = tl.load(v_ptr + (row * M + m) * P + p, p < P, 0.0).to(tl.float32)
            grad_k += tl.sum(grad * v[:, None], 0)
            tl.store(grad_v_ptr + (row * M + m) * P + p, tl.sum(grad * k[None, :], 1), p < P)
        tl.store(grad_k_ptr + (row * M + m) * N + n, grad_k, n < N)


def complex_forward(a: Tensor, b: Tensor, interleaved: bool, *, add: bool) -> Tensor:
    """a times or plus b, of rows (..., N) and (..., 2S)."""
    out = torch.empty_like(a)
    rows, constants = _complex_rows(a, b, interleaved)
    with on_device(a):
        grid = (triton.cdiv(rows, constants["ROWS"]),)
        _complex_kernel[grid](a, b, out, rows, ADD=add, **constants)
    return out


def complex_mul_backward(grad, a, b, interleaved) -> tuple[Tensor, Tensor]:
    """Gradients of a and b."""
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    rows, constants = _complex_rows(a, b, interleaved)
    with on_device(a):
        grid = (triton.cdiv(rows, constants["ROWS"]),)
        _complex_mul_backward_kernel[grid](grad, a, b, grad_a, grad_b, rows, **constants)
    return grad_a, grad_b


def _complex_rows(a: Tensor, b: Tensor, interleaved: bool) -> tuple[int, dict]:
    """How many rows there are, and the kernels' compile-time arguments."""
    block = triton.next_power_of_2(a.shape[-1] // 2)
    return a.numel() // a.shape[-1], {
        "N": a.shape[-1],
        "S": b.shape[-1] // 2,
        "HALVES": not interleaved,
        "ROWS": max(1, TILE[0] // (2 * block)),
        "BLOCK": block,
        "num_warps": TILE[1],
        **OPTIONS,
    }


def broadcast_forward(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, H, P) times weight (H, R, P): (T, H, R, P)."""
    tokens, heads, headdim = x.shape
    dtype = torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(tokens, *weight.shape, dtype=dtype, device=x.device)
    block_p = triton.next_power_of_2(headdim)
    block_t = max(1, TILE[0] // block_p)
    with on_device(x):
        sizes = {"R": weight.shape[1], "P": headdim, "BLOCK_T": block_t, "BLOCK_P": block_p}
        _broadcast_kernel[(triton.cdiv(tokens, block_t) * heads,)](
            x, weight, out, tokens, heads, **sizes, num_warps=TILE[1], **OPTIONS
        )
    return out


def broadcast_backward(grad, x, weight) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    tokens, heads, headdim = x.shape
    block_p = triton.next_power_of_2(headdim)
    block_t = max(1, SUMMING_TILE[0] // block_p)
    parts = min(triton.cdiv(tokens, block_t), max(1, PARTIAL_ROWS // heads))
    grad_x = torch.empty_like(x)
    partial = torch.empty(parts, *weight.shape, dtype=torch.float32, device=x.device)
    with on_device(x):
        sizes = {"R": weight.shape[1], "P": headdim, "BLOCK_T": block_t, "BLOCK_P": block_p}
        sizes["BLOCK_R"] = triton.next_power_of_2(weight.shape[1])
        tensors = grad, x, weight, grad_x, partial
        _broadcast_backward_kernel[(parts * heads,)](
            *tensors, tokens, heads, **sizes, num_warps=SUMMING_TILE[1], num_stages=1, **OPTIONS
        )
    return grad_x, partial.sum(0)


def state_update_forward(h, v, k, decay) -> Tensor:
    """decay h + sum_m v_m k_m^T: h (..., P, N), v (..., M, P), k (..., M, N), decay (...)."""
    out = torch.empty_like(h, dtype=torch.promote_types(h.dtype, decay.dtype))
    constants = _state_sizes(v, k)
    grid = decay.numel(), triton.cdiv(constants["P"], constants["BLOCK_P"])
    with on_device(h):
        _state_update_kernel[grid](h, v, k, decay, out, **constants)
    return out


def state_update_backward(grad, h, v, k, decay) -> tuple[Tensor, ...]:
    """Gradients of h, v, k and decay."""
    tensors = h, v, k, decay
    grads = tuple(torch.empty_like(t) for t in tensors)
    with on_device(h):
        _state_update_backward_kernel[(decay.numel(),)](
            grad, *tensors, *grads, **_state_sizes(v, k)
        )
    return grads


def _state_sizes(v: Tensor, k: Tensor) -> dict:
    """The kernels' compile-time arguments."""
    block_n = triton.next_power_of_2(k.shape[-1])
    block_p = min(triton.next_power_of_2(v.shape[-1]), max(1, 2 * TILE[0] // block_n))
    return {
        "M": v.shape[-2],
        "P": v.shape[-1],
        "N": k.shape[-1],
        "BLOCK_P": block_p,
        "BLOCK_N": block_n,
        # No more than have elements of their own: several would write a sum's parts over another.
        "num_warps": min(TILE[1], max(1, block_p * block_n // 256)),
        "num_stages": 1,
        **OPTIONS,
    }
