"""The hybrid optimizer on two and three ranks against one process on all of their batches.

Three processes, by gloo on the CPU; those of two ranks are a group of the first two.
"""

import contextlib
import datetime
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compare import TOLERANCE, assert_close, randomise
from ranks import spawn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mamba3.optim import ANVIL, HybridOptimizer, Rails, Replicated, Sharded, Tied, banks, exchange
from mamba3.optim.rules import join_bits

WORLD, ROWS, WIDTH, VOCAB = 3, 6, 6, 40
LR = 0.02
RAILS = Rails(engage_step=3)
TIED = Tied("embedding.weight", "lm_head.weight", untie_step=3)
OPTIONS = {
    "default": {},
    "anvil": {**ANVIL, "rails": RAILS},
    "anvil, tied": {**ANVIL, "rails": RAILS, "tied": TIED, "adam_every": 2},
    "rails": {"rails": RAILS},
    "equalize": {"equalize": 0.9},
    "rows": {"row_equalize": True, "nesterov": False},
    "trace": {"trace_norm": True, "preset": "keller5"},
    "cautious": {"decay": "cautious"},
    "with lr": {"decay_with_lr": True, "decay_adjusted": True},
    "every 2": {"adam_every": 2},
    "tied": {"tied": TIED},
}
# Not the default orders, and all that the schedule can do.
SCHEDULE = {
    "scatter_order": ("1x6x10", "adamw", "5x6x6", "embedding.weight", "1x10x6"),
    "work_order": ("embedding.weight", "1x10x6", "adamw", "5x6x6", "1x6x10"),
    "deferred": ("5x6x6", "1x6x10"),
    "sparse": ("embedding.weight",),
}


class Net(nn.Module):
    """Five matrices of one shape, of which the last is not always used, and one of two others."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        randomise(self.to(dtype))

    def forward(self, ids, last):
        x = self.embedding(ids)
        x = x + self.down(torch.tanh(self.up(x)))
        for layer in self.layers if last else self.layers[:-1]:
            x = x + layer(x)
        logits = self.lm_head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batch(step, ranks, rank):
    """A rank's ids, of few rows of the table, and whether it uses the last layer."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB // 4, (ROWS, 5), generator=generator) * 3
    return ids.chunk(ranks)[rank], rank == 0 and step % 2 == 0


def train_alone(model, optimizer, steps, ranks):
    """What the ranks are to do, in one process."""
    for step in steps:
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(*batch(step, ranks, rank)) / ranks).backward()
        optimizer.step()


def train(model, optimizer, steps, group, run=None, scale=None):
    """A rank's part of it."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for step in steps:
        optimizer.zero_grad()
        loss = (run or model)(*batch(step, ranks, rank))
        (loss if scale is None else loss * scale).backward()
        before = gradients(model)
        optimizer.step()
        assert_close(gradients(model), before, 0, "gradients are not written")


def gradients(model):
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.nan_to_num(7).clone() for name, grad in grads.items()}


def results(model, optimizer):
    """All weights and all state, by name."""
    state = optimizer.state_dict()
    found = {
        f"{state['param_groups'][0]['name']} {place} {name}": tensor
        for place, tensors in state["state"].items()
        for name, tensor in tensors.items()
    }
    return {name: t.clone() for name, t in {**model.state_dict(), **found}.items()}


def expected(options, steps, ranks):
    model = Net()
    optimizer = HybridOptimizer(model, LR, **options)
    train_alone(model, optimizer, steps, ranks)
    return results(model, optimizer), optimizer.state_dict()["param_groups"]


@contextlib.contextmanager
def all_reduced():
    """Counts elements of all-reduces, by dtype."""
    counts, call = Counter(), dist.all_reduce

    def spy(tensor, *args, **kwargs):
        counts[tensor.dtype] += tensor.numel()
        return call(tensor, *args, **kwargs)

    dist.all_reduce = spy
    yield counts
    dist.all_reduce = call


# checks, each run by every rank of a group


def check_sharded(group, folder):
    for name, options in OPTIONS.items():
        wanted, groups = expected(options, range(5), dist.get_world_size(group))
        for setting in ({}, {**SCHEDULE, "overlap": True}):
            model = Net()
            sharded = Sharded(group, **setting)
            optimizer = HybridOptimizer(model, LR, **options, distributed=sharded)
            train(model, optimizer, range(5), group)
            assert_close(results(model, optimizer), wanted, TOLERANCE[torch.float64], name)
            assert optimizer.state_dict()["param_groups"] == groups


def check_shares(group, folder):
    """State of a rank's matrices alone; all of them in state_dict(), all shared out."""
    model = Net()
    optimizer = HybridOptimizer(model, LR, distributed=Sharded(group))
    assert optimizer.bank_labels == ("1x10x6", "1x6x10", "5x6x6")
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1 and len(p) != VOCAB}
    own = [name for name, p in model.named_parameters() if "momentum" in optimizer.state[p]]
    everywhere = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, own, group=group)
    assert Counter(name for names in everywhere for name in names) == Counter(matrices)
    assert max(map(len, everywhere)) <= 2 + -(-5 // len(everywhere))


def check_extra_bits(group, folder):
    """bfloat16 weights, gradients that bfloat16 sums exactly, masters compared."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    options = {**ANVIL, "rails": RAILS, "extra_bits": True}
    alone, model = Net(torch.bfloat16), Net(torch.bfloat16)
    one = HybridOptimizer(alone, LR, **options)
    many = HybridOptimizer(model, LR, **options, distributed=Sharded(group, **SCHEDULE))
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(alone.parameters(), model.parameters(), strict=True):
            every = torch.randint(-8, 9, (ranks, *a.shape), generator=generator).bfloat16()
            a.grad, b.grad = every.sum(0) / ranks, every[rank]
        one.step()
        many.step()
    assert_close(masters(many), masters(one), TOLERANCE[torch.float32])


def masters(optimizer):
    """Weights with their extra bits."""
    state = optimizer.state_dict()["state"]
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return {i: join_bits(p, state[i]["low"]) for i, p in enumerate(parameters)}


def check_replicated(group, folder):
    banks.PART_ELEMENTS = 2 * WIDTH * WIDTH  # banks in parts, of which some ranks have nothing
    for name in ("default", "anvil, tied", "rows"):
        options = OPTIONS[name]
        wanted, groups = expected(options, range(4), dist.get_world_size(group))
        model = Net()
        run = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        optimizer = HybridOptimizer(model, LR, **options, distributed=Replicated(group))
        train(model, optimizer, range(4), group, run)
        assert_close(results(model, optimizer), wanted, TOLERANCE[torch.float64], name)
        assert optimizer.state_dict()["param_groups"] == groups


def check_deferred(group, folder):
    """Weights on their way are there at the next forward of their modules, and wherever asked."""
    ranks = dist.get_world_size(group)
    model, alone = Net(), Net()
    train_alone(alone, HybridOptimizer(alone, LR), range(1), ranks)
    setting = Sharded(group, deferred=("5x6x6",))

    def stepped():
        model = Net()
        optimizer = HybridOptimizer(model, LR, distributed=setting)
        train(model, optimizer, range(1), group)
        others = [
            layer for layer, mine in zip(model.layers, alone.layers, strict=True)
            if not torch.allclose(layer.weight, mine.weight)
        ]  # fmt: skip
        assert others  # not there yet
        return model, optimizer, others[-1]

    def assert_there(model):
        assert_close(dict(model.named_parameters()), dict(alone.named_parameters()), 1e-11)

    model, optimizer, other = stepped()
    optimizer.wait()
    assert_there(model)
    model, optimizer, other = stepped()
    optimizer.state_dict()
    assert_there(model)
    model, optimizer, other = stepped()
    assert_close(model.state_dict(), alone.state_dict(), 1e-11)
    model, optimizer, other = stepped()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    place = [*model.layers].index(other)
    assert_close(other(x), alone.layers[place](x), 1e-11)
    model, optimizer, other = stepped()
    model.load_state_dict(Net().state_dict())
    optimizer.wait()
    assert_close(model.state_dict(), Net().state_dict(), 0)


def check_sparse(group, folder):
    """Only rows that some rank touched are exchanged, and of tied tables the head alone."""
    ranks = dist.get_world_size(group)
    rows = torch.cat([batch(0, ranks, rank)[0] for rank in range(ranks)]).unique().numel()
    assert rows < VOCAB / 3
    model = Net()
    table = padded(VOCAB * WIDTH)
    rest = sum(padded(p.numel()) for p in model.parameters() if p.dim() == 1)
    wanted = {
        Sharded(group): rest + 2 * table,
        Sharded(group, sparse=("embedding.weight",)): rest + table + rows * WIDTH,
    }
    for setting, count in wanted.items():
        optimizer = HybridOptimizer(model, LR, distributed=setting)
        with all_reduced() as counts:
            train(model, optimizer, range(1), group)
        assert counts[torch.float64] == count
    optimizer = HybridOptimizer(model, LR, tied=TIED, distributed=Sharded(group))
    with all_reduced() as counts:
        train(model, optimizer, range(1), group)
    assert counts[torch.float64] == rest + table


def padded(count):
    """What a tensor of so many elements takes of a buffer."""
    return -(-count // exchange.ALIGNED) * exchange.ALIGNED


def check_nonfinite(group, folder):
    """NaN on one rank changes nothing on any, and is forgotten."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    wanted, _ = expected({}, (0, 2), ranks)
    for setting in ({}, {**SCHEDULE, "overlap": True}):
        model = Net()
        optimizer = HybridOptimizer(model, LR, distributed=Sharded(group, **setting))
        train(model, optimizer, (0,), group)
        before = results(model, optimizer)
        bad = float("nan") if rank == ranks - 1 else 1.0
        train(model, optimizer, (1,), group, scale=bad)
        assert optimizer.skipped_steps == 1
        assert_close(results(model, optimizer), before, 0)
        train(model, optimizer, (2,), group)
        assert_close(results(model, optimizer), wanted, TOLERANCE[torch.float64])


def check_recorded(group, folder):
    """A recorded step asks like any other, takes the answer of the one before, and is that step."""
    wanted, _ = expected({}, (0, 2, 4), dist.get_world_size(group))
    model = Net()
    optimizer = HybridOptimizer(model, LR, distributed=Sharded(group))
    with all_reduced() as eager:
        train(model, optimizer, (0,), group)
    assert optimizer.recordable
    with mock.patch.object(exchange, "capturing", return_value=True):
        with all_reduced() as recorded, mock.patch.object(torch.Tensor, "tolist", None):
            train(model, optimizer, (2,), group)
        train(model, optimizer, (4,), group)
    assert recorded == eager
    assert_close(results(model, optimizer), wanted, TOLERANCE[torch.float64])
    model.layers[0].weight.grad = None
    with (
        mock.patch.object(exchange, "capturing", return_value=True),
        pytest.raises(RuntimeError, match="after one that ran with the same gradients"),
    ):
        optimizer.step()
    optimizer.step()
    for setting in ({"sparse": ("embedding.weight",)}, {"deferred": ("5x6x6",)}):
        assert not HybridOptimizer(model, distributed=Sharded(group, **setting)).recordable


def check_clipping(group, folder):
    """Norms are those of the averaged gradients, whoever has them, and clipped as torch does."""
    ranks = dist.get_world_size(group)
    alone = Net()
    optimizer = HybridOptimizer(alone, LR, **ANVIL)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(ranks):
            (alone(*batch(step, ranks, rank)) / ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(alone.parameters(), 0.05))
        optimizer.step()
    assert min(norms) > 0.05
    for setting in ({}, SCHEDULE):
        model = Net()
        sharded = Sharded(group, **setting, max_norm=0.05)
        many = HybridOptimizer(model, LR, **ANVIL, distributed=sharded)
        for step, norm in enumerate(norms):
            train(model, many, (step,), group)
            assert_close({"norm": many.grad_norm}, {"norm": norm}, 1e-6)  # stored in float32
        assert_close(results(model, many), results(alone, optimizer), 1e-6)


def check_added_group(group, folder):
    """A group that comes later is stepped, too, and in no order that was given."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    adapters = [nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(2)]
    models = Net(), Net()
    for model, adapter, distributed in zip(models, adapters, (None, Sharded(group)), strict=True):
        optimizer = HybridOptimizer(model, LR, distributed=distributed)
        optimizer.add_param_group({"params": [("adapter", adapter)], "rule": "muon", "lr": 0.5})
        mean = (ranks + 1) / 2
        scale = mean if distributed is None else rank + 1
        for _ in range(2):
            adapter.grad = scale * torch.arange(36.0, dtype=torch.float64).view(6, 6)
            optimizer.step()
    assert optimizer.bank_labels[-1] == "1x6x6"
    assert_close(adapters[1], adapters[0], TOLERANCE[torch.float64])


def check_errors(group, folder):
    def make(**setting):
        return HybridOptimizer(Net(), distributed=Sharded(group, **setting))

    labels = ["5x6x6", "1x10x6", "1x6x10", "adamw"]
    for name in ("scatter_order", "work_order"):
        with pytest.raises(ValueError, match=f"{name}.*missing: 1x6x10, adamw"):
            make(**{name: labels[:2]})
        with pytest.raises(ValueError, match=f"{name}.*more than once: 5x6x6"):
            make(**{name: [*labels, "5x6x6"]})
        with pytest.raises(ValueError, match=f"{name}.*unknown: 9x9x9"):
            make(**{name: [*labels, "9x9x9"]})
    with pytest.raises(ValueError, match="adamw is no bank; banks are"):
        make(deferred=("adamw",))
    with pytest.raises(ValueError, match=r"no table up\.weight.*embedding\.weight"):
        make(sparse=("up.weight",))
    with pytest.raises(ValueError, match=r"no table norm\.weight"):
        make(sparse=("norm.weight",))
    model = Net()
    with torch.no_grad():
        model.norm.weight.add_(dist.get_rank(group))
    with pytest.raises(ValueError, match=r"norm\.weight differ between ranks"):
        HybridOptimizer(model, distributed=Sharded(group))
    model = Net()
    optimizer = HybridOptimizer(model, distributed=Sharded(group, overlap=True))
    ids, _ = batch(0, 1, 0)
    model(ids, True).backward()
    with pytest.raises(RuntimeError, match="after its reduction was launched"):
        model(ids, True).backward()
    optimizer = HybridOptimizer(model, distributed=Sharded(group))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(ids, True)).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)


def check_state(group, folder):
    """Two ranks save, three and one go on."""
    options, steps = {**OPTIONS["anvil"], "adam_every": 2}, (5, 7)
    wanted = uninterrupted(options)
    model = Net()
    optimizer = HybridOptimizer(model, LR, **options, distributed=Sharded(group, **SCHEDULE))
    path = folder / "two.pt"
    if dist.get_world_size(group) == 2:
        train(model, optimizer, (1, 3), group)
        saved = model.state_dict(), optimizer.state_dict()
        if dist.get_rank(group) == 0:
            torch.save(saved, path)
    else:
        weights, state = torch.load(path, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        del state["state"][0]
        with pytest.raises(ValueError, match=r"the state of up\.weight has \[\]"):
            optimizer.load_state_dict(state)
    train(model, optimizer, steps, group)
    assert_close(results(model, optimizer), wanted, TOLERANCE[torch.float64])


def uninterrupted(options):
    return expected(options, (1, 3, 5, 7), 1)[0]


CHECKS = {
    "sharded": (check_sharded, check_shares, check_extra_bits, check_added_group, check_state),
    "schedule": (
        check_deferred,
        check_sparse,
        check_nonfinite,
        check_clipping,
        check_recorded,
        check_errors,
    ),
    "replicated": (check_replicated,),
}


def work(rank, folder, names):
    """One process: the checks with two ranks, and with all three."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    two = dist.new_group([0, 1])
    for name in names:
        for check in CHECKS[name]:
            if rank < 2:
                check(two, folder)
            dist.barrier()
            check(None, folder)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CHECKS)
def test_ranks(name, tmp_path):
    spawn(work, (tmp_path, [name]), WORLD)
    if check_state in CHECKS[name]:
        model = Net()
        options = {**OPTIONS["anvil"], "adam_every": 2}
        optimizer = HybridOptimizer(model, LR, **options)
        weights, state = torch.load(tmp_path / "two.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train_alone(model, optimizer, (5, 7), 1)
        assert_close(results(model, optimizer), uninterrupted(options), TOLERANCE[torch.float64])


def test_there_must_be_a_group():
    with pytest.raises(RuntimeError, match="torchrun"):
        HybridOptimizer(Net(), distributed=Sharded())
    with pytest.raises(TypeError, match="Replicated"):
        HybridOptimizer(Net(), distributed="sharded")
