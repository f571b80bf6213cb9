"""Orthogonalisation: the polar factor of matrices, by a few odd polynomials of them.

    X <- a X + (b A + c A^2) X,   A = X X^T,   X_0 = G / (margin ||G||_F)

Every step maps each singular value s to a s + b s^3 + c s^5 and leaves the singular vectors, so
that after a few of them all singular values are near 1 and X is near U V^T of G = U S V^T.

    code            meaning                                                  shape
    x               matrices                                                 (..., m, n)
    maps            coefficients (a, b, c), a step each
    gram            A, over the shorter side                                 (..., k, k)

Sources: keller5, Jordan et al., "Muon" (2024); polar_express5, Amsel et al., arXiv 2505.16932, with
a safety factor of 1.02.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import dispatch
from .symmetric import symmetric_product

Maps = tuple[tuple[float, float, float], ...]


class Preset(NamedTuple):
    """Maps, and what the norm is multiplied by before them."""

    maps: Maps
    margin: float


PRESETS = {
    # Singular values over 1e-2 of the norm end in 0.68 to 1.13.
    "keller5": Preset(((3.4445, -4.7750, 2.0315),) * 5, 1.0),
    # 0.86 to 1.14 down to 3e-3.
    "polar_express5": Preset(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        1.02,
    ),
    # 0.9996 to 1.0004 down to 1e-2, 0.99 at 3e-3. A margin of 1.05 ends where the first map's bound
    # does: a matrix near rank 1 that rounding puts 2e-4 above it grows a thousandfold.
    "anvil6": Preset(
        (
            (3.923798038567, -6.095026865488, 3.905234618423),
            (3.278126713798, -3.328923386476, 0.989127286973),
            (3.505298394150, -5.137358782410, 1.968325560615),
            (2.815058591845, -3.685181239622, 1.417196497642),
            (2.245503932403, -2.443826979899, 0.963091710461),
            (2.256537145403, -2.166840097229, 0.929501253245),
        ),
        1.07,
    ),
}
DEFAULT_PRESET = "polar_express5"
LR_RULES = ("match_rms", "original", "spectral")

# Least norm to divide by: zero stays zero, and any other matrix reaches the maps at its full size.
# Added to the norm, a constant would slow layers whose gradients are small.
LEAST_NORM = 1e-30
# In Gram space rounding grows with every map that is chained: a new Gram matrix after two, but not
# for a single last one.
CHAINED = 2
# Where Gram space is worth its larger number of products: short sides from here on, and ratios of
# the sides. By operations, with half of a symmetric product left out, six maps take 18 r + 6 units
# one after the other and 9 r + 15 so.
GRAM_ROWS, GRAM_ASPECT = 256, 1.5
# fp16 in Gram space: entries of X and of A, times these, stay clear of its smallest numbers.
X_SCALE, GRAM_SCALE = 2.0**8, 2.0**10


def check_preset(name: str) -> Preset:
    """A preset by name; a ValueError names those there are."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is none of {', '.join(PRESETS)}")
    return PRESETS[name]


def lr_factor(rule: str, rows: int, columns: int) -> float:
    """What the learning rate of an orthogonal update (rows = out, columns = in) is multiplied by.

    Args:
        rule: "match_rms", 0.2 sqrt(max(rows, columns)), gives updates the size of AdamW's, so that
            one learning rate serves both (arXiv 2502.16982); "original",
            sqrt(max(1, rows/columns)); "spectral", sqrt(rows/columns).
    """
    if rule == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    if rule == "spectral":
        return math.sqrt(rows / columns)
    raise ValueError(f"lr_rule {rule!r} is none of {', '.join(LR_RULES)}")


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    preset: str = DEFAULT_PRESET,
    *,
    dtype: torch.dtype | None = None,
    trace_norm: bool = False,
    gram: bool | None = None,
    norm: Tensor | None = None,
) -> Tensor:
    """Matrices near U V^T of each matrix U S V^T.

    Args:
        x: (..., m, n), any floating dtype.
        preset: of `PRESETS`.
        dtype: of the products, which accumulate in float32; None is bfloat16 on a GPU and float32
            elsewhere, where half precision is slower; float64 for float64.
        trace_norm: take the norm from the trace of the first Gram matrix, which saves reading x.
        gram: chain maps in two or three as polynomials of the Gram matrix, and apply each chain as
            one product: fewer operations unless the matrices are nearly square. In float16 where
            `dtype` is half precision, so more exact than one map after the other in bfloat16. None
            does it where it pays.
        norm: Frobenius norms of x, one a matrix, where they are known; they are not computed again.

    Returns:
        (..., m, n) in `dtype`, or in float16 from Gram space where that is half precision. A zero
        matrix stays zero.

    Raises:
        ValueError: x is no matrix; an unknown preset; `trace_norm` with `gram`.
    """
    if x.dim() < 2:
        raise ValueError(f"expected matrices (..., m, n), got {tuple(x.shape)}")
    short, long = sorted(x.shape[-2:])
    if gram is None:
        gram = not trace_norm and short >= GRAM_ROWS and long >= GRAM_ASPECT * short
    if gram and trace_norm:
        raise ValueError("gram takes the norm before the first Gram matrix: leave trace_norm out")
    maps, margin = check_preset(preset)
    dtype = product_dtype(x, dtype)
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    # All below has the Gram matrix on the left, over the shorter side.
    tall = shape[-2] > shape[-1]
    if tall:
        x = x.mT
    if gram:
        x = _in_gram_space(x, maps, margin, dtype, norm)
    else:
        x = _in_turn(x, maps, margin, dtype, trace_norm, norm)
    return (x.mT if tall else x).reshape(shape)


def product_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that `orthogonalize` multiplies in, of its arguments of these names."""
    if dtype is not None:
        return dtype
    if x.is_cuda and x.dtype != torch.float64:
        return torch.bfloat16
    return torch.promote_types(x.dtype, torch.float32)


def frobenius(x: Tensor) -> Tensor:
    """Norms (K, 1, 1) of matrices (K, m, n), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)


def _inverse(norm: Tensor, margin: float) -> Tensor:
    """What matrices (K, m, n) are multiplied by before the maps, (K, 1, 1)."""
    return 1 / (margin * norm.reshape(-1, 1, 1)).clamp_min(LEAST_NORM)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x (K, m, n) times factors (K, 1, 1), in a dtype, with no copy in a wider one in between."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel() and dispatch.on_kernels(x, out) and (x.is_contiguous() or x.mT.is_contiguous()):
        from .triton.updates import scale

        return scale(x, factor, out)
    return torch.mul(x, factor, out=out)


def _in_turn(
    x: Tensor,
    maps: Maps,
    margin: float,
    dtype: torch.dtype,
    trace_norm: bool,
    norm: Tensor | None,
) -> Tensor:
    """The maps one after the other, x (K, k, n) with k <= n."""
    gram = None
    if trace_norm and norm is None:
        x = x.to(dtype)
        gram = symmetric_product(x, x)
        wide = torch.promote_types(dtype, torch.float32)
        trace = gram.diagonal(dim1=-2, dim2=-1).to(wide).sum(-1)
        inverse = _inverse(trace.sqrt(), margin)
        # Both factors, one after the other: the square of one may leave the dtype's range.
        x, gram = scaled(x, inverse, dtype), (gram * inverse * inverse).to(dtype)
    else:
        x = scaled(x, _inverse(frobenius(x) if norm is None else norm, margin), dtype)
    for a, b, c in maps:
        if gram is None:
            gram = symmetric_product(x, x)
        step = symmetric_product(gram, gram, alpha=c, add=gram, beta=b)
        x = torch.baddbmm(x, step, x, beta=a)
        gram = None
    return x


def _in_gram_space(
    x: Tensor, maps: Maps, margin: float, dtype: torch.dtype, norm: Tensor | None
) -> Tensor:
    """The same maps as a few products Q x, Q a polynomial of A = x x^T; x (K, k, n), k <= n.

    All polynomials of A are symmetric and commute, so every product among them is symmetric too.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    inner = torch.float16 if half else dtype
    x_scale, scale = (X_SCALE, GRAM_SCALE) if half else (1.0, 1.0)
    x = scaled(x, x_scale * _inverse(frobenius(x) if norm is None else norm, margin), inner)
    starts = range(0, max(len(maps) - 1, 1), CHAINED)
    for first, last in zip(starts, (*starts[1:], len(maps)), strict=True):
        q = None
        gram = symmetric_product(x, x, alpha=scale / x_scale**2)
        for i in range(first, last):
            a, b, c = maps[i]
            z = symmetric_product(
                gram, gram, alpha=c / scale**2, add=gram, beta=b / scale, diagonal=a
            )
            q = z if q is None else symmetric_product(z, q)
            if i + 1 < last:
                gram = symmetric_product(z, symmetric_product(z, gram))
        # x has its scale until the last product.
        x = torch.baddbmm(x, q, x, beta=0, alpha=1.0 if last < len(maps) else 1 / x_scale)
    return x


def singular_values(s: Sequence[float] | Tensor, preset: str = DEFAULT_PRESET) -> Tensor:
    """Where a preset takes singular values, given over the norm; in float64."""
    maps, margin = check_preset(preset)
    s = torch.as_tensor(s, dtype=torch.float64) / margin
    for a, b, c in maps:
        s = a * s + b * s**3 + c * s**5
    return s
