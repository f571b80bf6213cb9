"""HybridOptimizer on DTensor parameters: several processes take the steps that one takes.

On CPUs, and where there are as many GPUs as processes on these. In float64, so that all that is
left between the two is the order of sums.
"""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_close, randomise
from ranks import spawn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mamba3 import Mamba3Config, Mamba3LM, ops
from mamba3.optim import ANVIL, HybridOptimizer, Rails, Tied

# On a GPU learning rates and the like are float32.
TOLERANCE = 1e-6 if torch.cuda.is_available() else 1e-9
IDS = torch.randint(21, (4, 6, 7), generator=torch.Generator().manual_seed(0))
# Steps before a checkpoint, and in all.
SAVED, STEPS = 2, len(IDS)
TIED = Tied("backbone.embedding.weight", "lm_head.weight", untie_step=SAVED + 1)
CASES = {
    "default": ({}, {}),
    "anvil": (
        {**ANVIL, "rails": Rails(engage_step=SAVED + 1), "adam_every": 2, "tied": TIED},
        {"tie_embeddings": False},
    ),
    "rows": (
        {
            "row_equalize": True,
            "decay": "cautious",
            "nesterov": False,
            "overrides": {
                "*0.mixer.in_proj.weight[x]": {"lr_mul": 0},
                "*0.mlp.fc2*": {"lr_mul": 3},
                "*1.mlp.fc2*": {"lr_mul": 0},
            },
        },
        {"is_outproj_norm": True},
    ),
}


def model_of(device="cpu", **options):
    """Rows that no world size divides, blocks that straddle shards, and vectors of 3 elements."""
    config = Mamba3Config(
        vocab_size=21, d_model=9, n_layer=2, d_state=6, headdim=6, d_intermediate=7,
        is_mimo=True, mimo_rank=2, pad_vocab_size_multiple=1, mlp_multiple=1, **options,
    )  # fmt: skip
    return randomise(Mamba3LM(config, device=device, dtype=torch.float64), scale=0.3)


def made(case, mesh=None):
    """A case's model, spread over a mesh or whole, and its optimizer."""
    options, config = CASES[case]
    model = model_of("cpu" if mesh is None else mesh.device_type, **config)
    return spread(model, mesh), optimizer_of(model, **options)


def optimizer_of(model, **options):
    return HybridOptimizer(model, 0.02, weight_decay=0.5, dtype=torch.float64, **options)


def spread(model, mesh):
    if mesh is not None:
        for block in model.backbone.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def backward(model, step, rank=0, world=1):
    """This rank's share of a step's gradients."""
    ids = IDS[step].chunk(world)[rank].to(next(model.parameters()).device)
    model.zero_grad()
    with ops.use_backend("torch"):
        model(ids, labels=ids, return_logits=False).loss.backward()


def train(model, optimizer, steps, rank=0, world=1):
    for step in steps:
        backward(model, step, rank, world)
        optimizer.step()


def whole(t):
    if isinstance(t, DTensor):
        # Neither gloo nor NCCL gathers 16-bit integers.
        t = (t.to(torch.int32) if t.dtype == torch.int16 else t).full_tensor()
    return t.detach().cpu()


def facts(model, optimizer):
    """Weights and state, whole and by name."""
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    found = {name: whole(p) for name, p in model.named_parameters()}
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{names[i]} {key}": whole(t) for key, t in state.items()}
    return found


def assert_same(trained, reference, what):
    assert_close(facts(*trained), facts(*reference), TOLERANCE, what)
    got, expected = (
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for _, optimizer in (trained, reference)
    )
    assert got == expected, what


def meshes(rank, world, folder):
    """Start the processes' group; meshes of one and of two dimensions."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[device]
    dist.init_process_group(
        backend,
        f"file://{folder}/{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),  # processes that part ways would wait for one another
    )
    names = ("replicas", "rows")
    return (
        init_device_mesh(device, (world,)),
        init_device_mesh(device, (1, world), mesh_dim_names=names),
        init_device_mesh(device, (world, 1), mesh_dim_names=names),
    )


def two(rank, world, folder):
    """Train every case beside one process, and save it on the way."""
    mesh, *others = meshes(rank, world, folder)
    for case in CASES:
        reference = made(case)
        model, optimizer = made(case, mesh)
        for step in range(STEPS):
            train(model, optimizer, [step], rank, world)
            train(*reference, [step])
            assert_same((model, optimizer), reference, f"{case}, step {step}")
            if step + 1 == SAVED:
                save(model, optimizer, f"{folder}/{case}")
        check_whole_states(case, (model, optimizer), reference, mesh)
    for other in others:
        reference = made("anvil")
        model, optimizer = made("anvil", other)
        train(model, optimizer, range(SAVED), rank, world)
        train(*reference, range(SAVED))
        assert_same((model, optimizer), reference, f"{other}")
    check_nonfinite(mesh, rank, world)
    check_extra_bits(mesh, folder)
    check_placements(mesh)
    dist.destroy_process_group()


def three(rank, world, folder):
    """Go on from what two processes saved, and end where one does without a stop."""
    mesh, *_ = meshes(rank, world, folder)
    for case in CASES:
        model, optimizer = made(case, mesh)
        load(model, optimizer, f"{folder}/{case}")
        train(model, optimizer, range(SAVED, STEPS), rank, world)
        reference = made(case)
        train(*reference, range(STEPS))
        assert_same((model, optimizer), reference, case)
    dist.destroy_process_group()


def save(model, optimizer, path):
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)


def load(model, optimizer, path):
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )


def check_whole_states(case, trained, reference, mesh):
    """State goes in as it comes out: whole tensors, flattened names, one process's own."""

    def assert_loaded(how, load_into):
        model, optimizer = made(case, mesh)
        set_model_state_dict(model, reference[0].state_dict(), options=whole_tensors)
        load_into(model, optimizer)
        assert_same((model, optimizer), reference, f"{case}, {how}")
        return optimizer

    whole_tensors = StateDictOptions(full_state_dict=True)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for options in (whole_tensors, flat):
        state = get_optimizer_state_dict(*trained, options=options)
        assert_loaded(
            options, partial(set_optimizer_state_dict, optim_state_dict=state, options=options)
        )
    state = reference[1].state_dict()
    optimizer = assert_loaded("one process", lambda _, new: new.load_state_dict(state))
    for turn, error in {(lambda t: t[1:]): "has shape", (lambda t: None): "other options"}.items():
        saved = reference[1].state_dict()
        first = saved["state"][0] | {"z.momentum": turn(saved["state"][0]["z.momentum"])}
        saved["state"][0] = {key: t for key, t in first.items() if t is not None}
        with pytest.raises(ValueError, match=error):
            optimizer.load_state_dict(saved)


def check_nonfinite(mesh, rank, world):
    """One process alone has a gradient that is not finite; none moves."""
    model, optimizer = made("default", mesh)
    backward(model, 0, rank, world)
    before = facts(model, optimizer)
    if rank == world - 1:
        model.backbone.embedding.weight.grad.to_local()[-1] = torch.nan
    optimizer.step()
    after = facts(model, optimizer)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert optimizer.skipped_steps == 1


def check_extra_bits(mesh, folder):
    """bfloat16 weights and their low halves, bit for bit, under gradients that both are given.

    On a GPU one process steps by kernels, which round otherwise.
    """
    options = {"extra_bits": True, "equalize": 0.9}
    plain = model_of(mesh.device_type).bfloat16()
    sharded = spread(model_of(mesh.device_type).bfloat16(), mesh)
    both = [(model, optimizer_of(model, **options)) for model in (plain, sharded)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p)
            q.grad = distribute_tensor(p.grad, mesh, q.placements)
        for _, optimizer in both:
            optimizer.step()
    save(*both[1], f"{folder}/bits")
    other = spread(model_of(mesh.device_type).bfloat16(), mesh)
    both.append((other, optimizer_of(other, **options)))
    load(*both[2], f"{folder}/bits")
    alone, expected, loaded = (facts(*each) for each in both)
    assert any(t.count_nonzero() for name, t in expected.items() if name.endswith("low"))
    assert alone.keys() == expected.keys() == loaded.keys()
    for name, t in expected.items():
        assert loaded[name].equal(t.to(loaded[name].dtype)), name
        if mesh.device_type == "cpu":
            assert alone[name].equal(t.to(alone[name].dtype)), name
        elif not name.endswith("low"):
            assert (alone[name] - t).norm() <= 0.02 * t.norm(), name


def check_placements(mesh):
    """Whole weights whose gradients are still to be summed; columns are refused by name."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64).to(mesh.device_type)
    plain, whole_on_each = (nn.Linear(4, 5, bias=False).double() for _ in range(2))
    plain.weight = nn.Parameter(values[0].clone())
    whole_on_each.weight = nn.Parameter(distribute_tensor(values[0], mesh, [Replicate()]))
    optimizers = [optimizer_of(model) for model in (plain, whole_on_each)]
    plain.weight.grad = mesh.size() * values[1]
    whole_on_each.weight.grad = DTensor.from_local(values[1], mesh, [Partial()])
    for optimizer in optimizers:
        optimizer.step()
    assert_same((whole_on_each, optimizers[1]), (plain, optimizers[0]), "Replicate")

    columns = nn.Linear(4, 5, bias=False)
    columns.weight = nn.Parameter(distribute_tensor(columns.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"weight has the placements .*Shard\(dim=1\)"):
        optimizer_of(columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes saved every case, having trained it."""
    path = tmp_path_factory.mktemp("fsdp")
    spawn(two, (2, str(path)), 2)
    return path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_processes_equal_one_which_goes_on_from_them(case, folder):
    model, optimizer = made(case)
    load(model, optimizer, f"{folder}/{case}")
    train(model, optimizer, range(SAVED, STEPS))
    reference = made(case)
    train(*reference, range(STEPS))
    assert_same((model, optimizer), reference, case)


def test_three_processes_go_on_from_two(folder):
    spawn(three, (3, str(folder)), 3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_saves_and_loads(case, tmp_path):
    reference = made(case)
    train(*reference, range(SAVED))
    save(*reference, tmp_path)
    model, optimizer = made(case)
    load(model, optimizer, tmp_path)
    for each in (reference, (model, optimizer)):
        train(*each, range(SAVED, STEPS))
    assert_same((model, optimizer), reference, case)
