"""Norms of gradients, updates and weights by group, against sums by hand, and on two ranks."""

import datetime
import math

import pytest
import torch
import torch.distributed as dist
from compare import DEVICE, randomise
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.ops import use_backend
from mamba3.optim import HybridOptimizer
from mamba3.train.norms import GroupNorms

IDS = torch.randint(19, (2, 4, 7), generator=torch.Generator().manual_seed(0))


def model_of(device=DEVICE, dtype=torch.float64):
    """Rows that two ranks do not share evenly, and vectors of three elements."""
    config = Mamba3Config(
        vocab_size=19, d_model=9, n_layer=2, d_state=6, headdim=6, d_intermediate=7,
        pad_vocab_size_multiple=1, mlp_multiple=1,
    )  # fmt: skip
    model = Mamba3LM(config, device=device, dtype=torch.float64)
    return randomise(model, scale=0.3).to(dtype)


def make_step(model, optimizer, ids, clip=0.2):
    optimizer.zero_grad()
    ids = ids.to(next(model.parameters()).device)
    with use_backend("torch"):
        model(ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def by_hand(model, before, rules):
    """The norms by plain sums over rows, given the rule of every parameter that has one rule."""
    squares = {}
    for name, p in model.named_parameters():
        labels, start = rules(model, name), 0
        for rows, group in labels:
            part = slice(start, None if rows is None else start + rows)
            start += rows or 0
            t = p.detach()[part].double()
            own = {
                "grad_norm": p.grad[part].double(),
                "update_norm": t - before[name][part].double(),
                "weight_norm": t,
            }
            for what, value in own.items():
                key = f"{what}/{group}"
                squares[key] = squares.get(key, 0.0) + float(value.square().sum())
    return {key: math.sqrt(value) for key, value in squares.items()}


def hybrid_rules(model, name):
    """(rows, group) of the blocks of a parameter: None is all the rows that are left."""
    last = name.split(".")[-2]
    if last == "in_proj":
        config = model.config
        maps = config.ngroups * config.d_state
        matrices = 2 * config.d_inner + 2 * maps
        return [
            (matrices, "matrices"), (3 * config.n_heads, "decayed"), (None, "matrices"),
        ]  # fmt: skip
    matrix = last in ("out_proj", "fc1", "fc2")
    return [(None, "matrices" if matrix else "undecayed")]


# The norms of blocks have a decay of their own.
ADAMW = {"*": "adamw", "*layers.*.norm*.weight": {"weight_decay": 0.1}}


def adamw_rules(model, name):
    decays = name.split(".")[-2] in ("in_proj", "out_proj", "fc1", "fc2", "norm", "norm2")
    return [(None, "decayed" if decays else "undecayed")]


@pytest.mark.parametrize(
    ("options", "rules"),
    [({}, hybrid_rules), ({"overrides": ADAMW}, adamw_rules)],
    ids=["hybrid", "adamw"],
)
def test_norms_by_hand(options, rules):
    model = model_of()
    optimizer = HybridOptimizer(model, 0.02, weight_decay=0.5, **options)
    norms = GroupNorms(optimizer)
    for ids in IDS:  # the second step's gradients and updates are not the first one's
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        norms.before()
        make_step(model, optimizer, ids)
        found = norms.after()
        expected = by_hand(model, before, rules)
        assert found.keys() == expected.keys()
        for key, t in found.items():
            assert t.dtype == torch.float64
            assert t.shape == ()
            assert t.item() == pytest.approx(expected[key], rel=1e-12), key
    total = sum(t.item() ** 2 for key, t in found.items() if key.startswith("grad_norm"))
    assert math.sqrt(total) == pytest.approx(0.2, rel=1e-5)  # what it was clipped to


def test_half_precision_is_summed_in_float32():
    """bfloat16 weights with a few in float32; a norm rounded to bfloat16 would be off by 1e-3."""
    model = model_of(dtype=torch.bfloat16)
    optimizer = HybridOptimizer(model, 0.02, extra_bits=True)
    norms = GroupNorms(optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms.before()
    make_step(model, optimizer, IDS[0])
    found, expected = norms.after(), by_hand(model, before, hybrid_rules)
    for key, t in found.items():
        assert t.dtype == torch.float32
        # Updates of bfloat16 weights are differences in bfloat16.
        rel = 2e-3 if key.startswith("update") else 1e-5
        assert t.item() == pytest.approx(expected[key], rel=rel), key


def test_a_step_that_is_left_out_and_what_has_no_gradient():
    model = model_of()
    model.backbone.embedding.weight.requires_grad_(False)  # with it the head, which is the same
    overrides = {"*mixer.D": {"lr_mul": 0}}
    optimizer = HybridOptimizer(model, 0.02, overrides=overrides)
    norms = GroupNorms(optimizer)
    norms.before()
    ids = IDS[0].to(DEVICE)
    model(ids, labels=ids).loss.backward()
    model.backbone.layers[0].mlp.fc1.weight.grad.fill_(math.nan)
    for block in model.backbone.layers:
        block.mixer.in_proj.weight.grad = None
        block.mixer.D.grad.fill_(1e6)  # of nothing that is trained
    optimizer.step()
    found = norms.after()
    assert math.isnan(found["grad_norm/matrices"])
    assert found["grad_norm/decayed"] == 0
    assert 0 < found["grad_norm/undecayed"] < 1e3
    assert [found[f"update_norm/{name}"].item() for name in ("matrices", "decayed")] == [0, 0]
    assert found["weight_norm/decayed"] > 0


def test_it_changes_nothing_and_keeps_no_copy():
    plain, measured = model_of(), model_of()
    for model, measures in ((plain, False), (measured, True)):
        optimizer = HybridOptimizer(model, 0.02)
        norms = GroupNorms(optimizer)
        for ids in IDS:
            if measures:
                norms.before()
            make_step(model, optimizer, ids)
            if measures:
                norms.after()
    for (name, p), q in zip(plain.named_parameters(), measured.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(p.grad, q.grad), name
    with pytest.raises(RuntimeError, match=r"call before\(\) ahead of it"):
        norms.after()


def on_two_ranks(rank, folder):
    """Spread over both, and spread over one and the same on both: the norms of the whole."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/ranks",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    for shape in ((2,), (2, 1)):
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        found = []
        for spread in (False, True):
            model = model_of(device)
            if spread:
                for block in model.backbone.layers:
                    fully_shard(block, mesh=mesh)
                fully_shard(model, mesh=mesh)
            optimizer = HybridOptimizer(model, 0.02, dtype=torch.float64)
            norms = GroupNorms(optimizer)
            for ids in IDS:
                norms.before()
                make_step(model, optimizer, ids.chunk(2)[rank] if spread else ids)
                found.append({key: t.item() for key, t in norms.after().items()})
        assert len(found[0]) == 9
        for alone, shared in zip(found[:2], found[2:], strict=True):
            assert shared == pytest.approx(alone, rel=1e-6)
    dist.destroy_process_group()


def test_spread_parameters(tmp_path):
    spawn(on_two_ranks, (str(tmp_path),), 2)
