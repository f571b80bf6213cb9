"""Gradients of two processes, added up at once."""

import torch
import torch.distributed as dist
from ranks import spawn
from torch import nn

from mamba3.train.parallel import GradientSum, Ranks, summing

WORLD, FACTOR = 2, 0.3
SHAPES = [(3, 5), (1,), (129,), (2, 3, 4), (0,), (256,)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float32]


def parameters(rank):
    """Of several shapes and types, with gradients of the rank's own; the fourth has none."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True)):
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        gradient = torch.randn(shape, generator=generator).to(dtype)
        p.grad = None if i == 3 else gradient
        made.append(p)
    return made


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    found = {}
    for dtype in (None, torch.bfloat16):
        own = parameters(rank)
        exchange = GradientSum(own, dtype)
        exchange()
        sums = exchange.sums
        assert [p.grad for p in own] == [None] * len(own)
        assert {t.dtype for t in sums} == {dtype or torch.float32, torch.bfloat16}
        exchange.finish(None)
        found[dtype] = [p.grad for p in own]
        again = parameters(rank)
        exchange = GradientSum(again, dtype)
        exchange()
        exchange.finish(torch.tensor(FACTOR))
        found["scaled", dtype] = [p.grad for p in again]
    torch.manual_seed(rank)
    model = nn.BatchNorm1d(3)  # it has a buffer
    nn.init.normal_(model.weight)
    model.running_mean.fill_(rank)
    model.bias.requires_grad_(False)
    ranks = Ranks(rank, WORLD)
    exchange = summing(model, ranks, "allreduce", "float32")
    found["state"] = model.state_dict()
    found["exchanged"] = len(exchange.parameters), exchange.dtype
    found["others"] = summing(model, ranks, "ddp", "float32")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_are_the_sum_on_all_ranks(tmp_path):
    spawn(work, (str(tmp_path),), WORLD)
    pairs = zip(*(parameters(rank) for rank in range(WORLD)), strict=True)
    exact = [None if a.grad is None else a.grad + b.grad for a, b in pairs]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    for ours in found:
        for got, wanted in zip(ours[None], exact, strict=True):
            assert got is None if wanted is None else torch.equal(got, wanted)
        for got, wanted in zip(ours[torch.bfloat16], exact, strict=True):
            if wanted is not None:
                assert got.dtype == wanted.dtype
                # Each is rounded, and their sum, to 8 bits.
                assert torch.allclose(got, wanted, rtol=2**-7, atol=2**-7)
        assert not torch.equal(ours[torch.bfloat16][0], exact[0])
        for dtype in (None, torch.bfloat16):
            for got, whole in zip(ours["scaled", dtype], ours[dtype], strict=True):
                assert got is None if whole is None else torch.equal(got, whole * FACTOR)
        assert ours["exchanged"] == (1, None)
        assert ours["others"] is None
        assert ours["state"]["running_mean"].tolist() == [0.0] * 3
    for name, t in found[0]["state"].items():
        assert torch.equal(t, found[1]["state"][name]), name
