"""Steps replayed from a CUDA graph against eager ones, all numbers changing at every step.

Without a GPU a stand-in calls the device part again: numbers come from device scalars all the same.
"""

import pytest
import torch
from compare import DEVICE, randomise
from torch import nn

from mamba3.optim import ANVIL, HybridOptimizer, Rails
from mamba3.optim.pieces import Numbers

OPTIONS = {
    "default": {},
    "anvil": {**ANVIL, "rails": Rails(engage_step=5)},
    "rows": {"row_equalize": True, "nesterov": False, "preset": "keller5"},
    "heedless": {"skip_nonfinite": False, "decay": "cautious", "equalize": 0.9},
    "extra bits": {"extra_bits": True},
    "anvil, extra bits": {**ANVIL, "rails": Rails(engage_step=5), "extra_bits": True},
}


def model_of(dtype):
    layers = [nn.Linear(24, 40), nn.Linear(40, 24, bias=False), nn.Linear(40, 24), nn.LayerNorm(24)]
    return randomise(nn.ModuleList(layers).to(DEVICE, dtype), scale=0.3)


def fill_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(torch.randn(p.shape, generator=generator))


def set_numbers(optimizer, step):
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 / (step + i + 1)
        group["weight_decay"] = 0.1 * (step + 1)
        group["momentum"] = 0.95 - 0.05 * step


def record(function):
    """What runs a function's work on the device again."""
    if DEVICE == "cpu":
        return function
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_replayed_steps_are_eager_steps(options, monkeypatch):
    dtype = torch.bfloat16 if "extra_bits" in options else torch.float32
    eager, replayed = model_of(dtype), model_of(dtype)
    a, b = (HybridOptimizer(model, **options) for model in (eager, replayed))
    if DEVICE == "cpu":  # where an optimizer takes numbers as they are
        monkeypatch.setattr(
            HybridOptimizer,
            "_numbers",
            lambda self, index, device: Numbers(*self._scalars[index, device].unbind()),
        )
    replay = None
    for step in range(7):
        for model, optimizer in ((eager, a), (replayed, b)):
            fill_gradients(model, step)
            set_numbers(optimizer, step)
        a.step()
        if step < 2:
            b.step()  # compiles and allocates what a graph cannot
            continue
        b.advance()
        if replay is None:
            state = [t.clone() for p in replayed.parameters() for t in (p, *b.state[p].values())]
            replay = record(b.update)
            now = [t for p in replayed.parameters() for t in (p, *b.state[p].values())]
            assert all(torch.equal(t, u) for t, u in zip(state, now, strict=True))
        replay()
        for p, q in zip(eager.parameters(), replayed.parameters(), strict=True):
            assert torch.equal(p, q)
            for name, t in a.state[p].items():
                assert torch.equal(t, b.state[q][name]), name


@pytest.mark.parametrize("options", [{}, ANVIL], ids=["default", "anvil"])
def test_a_replayed_step_without_finite_gradients_changes_nothing(options):
    model = model_of(torch.float32)
    optimizer = HybridOptimizer(model, **options)
    for step in range(2):
        fill_gradients(model, step)
        optimizer.step()
    optimizer.advance()
    replay = record(optimizer.update)
    before = [t.clone() for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    fill_gradients(model, 2)
    model[3].bias.grad[5] = torch.inf
    optimizer.advance()
    replay()
    after = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    assert all(torch.equal(t, u) for t, u in zip(before, after, strict=True))
    assert optimizer.skipped_steps == 1
    fill_gradients(model, 2)
    optimizer.advance()
    replay()
    assert not torch.equal(before[0], model[0].weight)
    assert optimizer.skipped_steps == 1
