"""How tests compare tensors, and how they make inputs with nothing left at a default."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mamba3.ops import Mamba3State
from mamba3.ops.dispatch import default_device

# Where kernels are tested: interpreted on a CPU if there is no GPU.
DEVICE = default_device()
# Largest RMS error over RMS of the reference, by the dtype that was computed in. Gradients are
# allowed twice as much.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 5e-3,
}


def error(got: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of what is expected; infinite if anything is not finite."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} against {tuple(expected.shape)}"
    got, expected = got.detach().double(), expected.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    scale = expected.norm().item()
    return (got - expected).norm().item() / (scale or 1.0)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Tensors of the same names and the same bits."""
    assert a.keys() == b.keys()
    for name, t in a.items():
        assert torch.equal(t, b[name]), name


def assert_close(got, expected, tolerance: float, what: str = "") -> None:
    """Compare tensors, or tuples or dicts of them, and name the worst one that is off."""
    if isinstance(got, Tensor):
        got, expected = {what: got}, {what: expected}
    elif not isinstance(got, dict):
        got, expected = dict(enumerate(got)), dict(enumerate(expected))
    assert got.keys() == expected.keys()
    errors = {name: error(t, expected[name]) for name, t in got.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, f"{what} {worst}: {errors[worst]:.1e} > {tolerance:.1e}"


def turned(state: Mamba3State) -> Mamba3State:
    """The state with its phase as a point on the circle, since angles compare modulo 2 pi."""
    return state._replace(
        phase=torch.view_as_real(torch.polar(torch.ones_like(state.phase), state.phase))
    )


def randomise(module: nn.Module, seed: int = 0, scale: float = 0.5) -> nn.Module:
    """Give every parameter a random value; an init of 1 hides faults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * scale)
    return module


def scan_inputs(
    batch: int = 2,
    length: int = 13,
    heads: int = 4,
    headdim: int = 6,
    d_state: int = 10,
    rank: int = 1,
    groups: int = 1,
    angles: int = 3,
    *,
    mimo: bool = False,
    norm: bool = False,
    gate: bool = True,
    sequences: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict]:
    """Random arguments of `mamba3_scan`: (tensors that need gradients by name, call arguments).

    Args:
        sequences: number of initial states; None means one a row.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    count = sequences or batch
    tensors = {
        "x": normal(batch, length, heads, headdim),
        "b": normal(batch, length, rank, groups, d_state),
        "c": normal(batch, length, rank, groups, d_state),
        "dt": uniform(batch, length, heads),
        "a": -3 * uniform(batch, length, heads),
        "lam": uniform(batch, length, heads),
        "rate": 3 * normal(batch, length, angles),
        "b_bias": normal(heads, rank, d_state),
        "c_bias": normal(heads, rank, d_state),
        "d": normal(heads),
    }
    if gate:
        tensors["z"] = normal(batch, length, heads, headdim)
    if mimo:
        tensors |= {f"mimo_{s}": normal(heads, rank, headdim) for s in "xzo"}
    if norm:
        tensors["norm_weight"] = normal(heads, headdim)
    tensors |= {
        "state.h": normal(count, heads, headdim, d_state),
        "state.phase": normal(count, heads, angles),
        "state.k": normal(count, rank, heads, d_state),
        "state.x": normal(count, heads, headdim),
    }
    for t in tensors.values():
        t.requires_grad_()
    return tensors, call_arguments(tensors)


def call_arguments(tensors: dict[str, Tensor]) -> dict:
    """From tensors by name to the keyword arguments of `mamba3_scan`."""
    call = {k: t for k, t in tensors.items() if not k.startswith(("state.", "mimo_"))}
    if "mimo_x" in tensors:
        call["mimo"] = tuple(tensors[f"mimo_{s}"] for s in "xzo")
    call["state"] = Mamba3State(*(tensors[f"state.{f}"] for f in Mamba3State._fields))
    return call


def gradients(outputs, tensors: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Gradients of a random projection of the outputs, by name; zeros where nothing flows."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs
    ]
    found = torch.autograd.grad(list(outputs), list(tensors.values()), weights, allow_unused=True)
    return {
        name: torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(tensors.items(), found, strict=True)
    }
