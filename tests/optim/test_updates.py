"""Kernels of the Muon step against the rules in float64, and one against the other bit for bit."""

import contextlib
import copy
import itertools
import logging
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from compare import DEVICE, TOLERANCE, assert_close, assert_same, randomise
from plain_steps import HALVES, NUMBERS, PLAIN, ROUNDING
from torch import nn

from mamba3.ops import use_backend
from mamba3.optim import ANVIL, HybridOptimizer, Rails, banks, orthogonalize, rules
from mamba3.optim.banks import MuonBank
from mamba3.optim.param_groups import Piece
from mamba3.optim.pieces import Member, Numbers, Options
from mamba3.optim.triton import launch, updates

pytestmark = pytest.mark.usefixtures("kernels")

HALF = HALVES[-1]
# Within a program's elements and a tile, and past them; sizes of which no power of two is a factor.
SHAPES = [(5, 7), (67, 35), (35, 67), (130, 36)]


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def make_bank(shape, stored=torch.float32, **options) -> MuonBank:
    """Three matrices: two of them rows of one parameter, one with numbers of its own."""
    rows, columns = shape
    fused = nn.Parameter(normal(1 + 2 * rows, columns, dtype=stored))
    own = nn.Parameter(normal(rows, columns, seed=1, dtype=stored))
    members = [
        Member(Piece("fused", "a", 1, 1 + rows, shape, "muon", None, 1.0, ""), fused),
        Member(Piece("own", "", 0, rows, shape, "muon", 0.7, 0.5, ""), own),
        Member(Piece("fused", "b", 1 + rows, 1 + 2 * rows, shape, "muon", None, 1.0, ""), fused),
    ]
    bank = MuonBank(members, Options(**vars(PLAIN) | options))
    for i, state in enumerate((bank.fast, bank.slow)):
        if state is not None:
            state.copy_(normal(*state.shape, seed=2 + i))
    if bank.lanes is not None:
        bank.lanes.copy_(normal(*bank.lanes.shape, seed=5).square())
    if bank.low is not None:
        bank.low.copy_(normal(*bank.low.shape, seed=4) * 10000)
    return bank


def exact(bank: MuonBank) -> MuonBank:
    """A copy whose weights and state are float64, which the rules step in plain operations."""
    members = [Member(m.piece, m.parameter.detach().double()) for m in bank.members]
    other = MuonBank(members, bank.options)
    other.fast.copy_(bank.fast)
    if bank.slow is not None:
        other.slow.copy_(bank.slow)
    if bank.lanes is not None:
        other.lanes.copy_(bank.lanes)
    return other


def norms(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def weights(bank: MuonBank) -> torch.Tensor:
    return torch.stack([member.weight for member in bank.members])


def everything(bank: MuonBank) -> dict[str, torch.Tensor]:
    """Copies of weights and state."""
    named = {"w": weights(bank)}
    for name in ("fast", "slow", "lanes", "low"):
        if getattr(bank, name) is not None:
            named[name] = getattr(bank, name).clone()
    return named


def gradients_of(shape, dtype):
    """One as it should be, one of no alignment, one stored by column."""
    rows, columns = shape
    yield normal(rows, columns, seed=10, dtype=dtype)
    yield normal(rows * columns + 1, seed=11, dtype=dtype)[1:].view(rows, columns)
    yield normal(columns, rows, seed=12, dtype=dtype).T


# momentum


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rails", [None, Rails(slow=0.97)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_momentum_is_the_rules(shape, dtype, rails, nesterov, kernels):
    bank = make_bank(shape, rails=rails, nesterov=nesterov)
    same = exact(bank)
    part, grads = slice(0, 3), list(gradients_of(shape, dtype))
    u, norm = bank.momentum_and_norm(part, grads, NUMBERS)
    assert len(kernels) == 1
    expected = same.average(part, torch.stack(grads).double(), NUMBERS)
    assert_close(u, expected, ROUNDING)
    assert_close(bank.fast, same.fast, ROUNDING)
    if rails:
        assert_close(bank.slow, same.slow, ROUNDING)
    assert_close(norm, norms(expected), ROUNDING)


def test_a_share_of_one_is_the_fast_rail():
    bank = make_bank((5, 7), rails=Rails(), nesterov=False)
    numbers = NUMBERS._replace(share=1.0)
    u, _ = bank.momentum_and_norm(slice(0, 3), list(gradients_of((5, 7), torch.float32)), numbers)
    assert torch.equal(u, bank.fast)


@pytest.mark.parametrize("dtype", HALVES)
def test_momentum_is_rounded_once(dtype):
    whole, rounded = make_bank((67, 35)), make_bank((67, 35))
    grads = [normal(67, 35, seed=10 + i) for i in range(3)]
    u, norm = updates.momentum(whole, slice(0, 3), grads, NUMBERS, torch.float32, True)
    half, same = updates.momentum(rounded, slice(0, 3), grads, NUMBERS, dtype, True)
    assert half.dtype == dtype
    assert torch.equal(half, u.to(dtype))
    assert_close(same, norm, ROUNDING)


@pytest.mark.parametrize(
    ("options", "dtype", "has_norm"),
    [
        ({"dtype": torch.bfloat16}, torch.bfloat16, True),
        ({"dtype": torch.float16}, torch.float32, True),
        ({"dtype": torch.bfloat16, "trace_norm": True}, torch.bfloat16, False),
        ({"dtype": torch.bfloat16, "row_equalize": True}, torch.float32, False),
        ({"dtype": None}, torch.bfloat16 if DEVICE == "cuda" else torch.float32, True),
    ],
)
def test_what_the_orthogonalisation_gets(options, dtype, has_norm):
    bank = make_bank((5, 7), **options)
    # float16 would take these to infinity.
    grads = [1e6 * g for g in gradients_of((5, 7), torch.float32)]
    u, norm = bank.momentum_and_norm(slice(0, 3), grads, NUMBERS)
    assert u.dtype == dtype
    assert u.isfinite().all()
    assert (norm is not None) == has_norm
    if has_norm:
        assert_close(norm, norms(u.double()), 1e-2)


def test_gradients_of_several_dtypes():
    bank = make_bank((5, 7))
    same = exact(bank)
    dtypes = (torch.bfloat16, torch.float16, torch.bfloat16)
    grads = [normal(5, 7, seed=i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    u, _ = bank.momentum_and_norm(slice(0, 3), grads, NUMBERS)
    expected = same.average(slice(0, 3), torch.stack([g.double() for g in grads]), NUMBERS)
    assert_close(u, expected, ROUNDING)


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("shape", [(3, 20, 33), (33, 20)])
def test_known_norms_are_not_computed_again(shape, gram, monkeypatch):
    x = normal(*shape)
    expected = orthogonalize(x, gram=gram, dtype=torch.float32)
    monkeypatch.delattr(sys.modules[orthogonalize.__module__], "frobenius")
    got = orthogonalize(x, gram=gram, norm=norms(x), dtype=torch.float32)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 7), (67, 35)])
def test_scaling_is_a_product(shape, given, dtype, kernels):
    factor = normal(3, 1, 1, seed=30)
    scaled = sys.modules[orthogonalize.__module__].scaled
    for x in updates_of(shape, given):
        got = scaled(x, factor, dtype)
        assert torch.equal(got, (x.float() * factor).to(dtype))
        assert got.stride() == torch.empty_like(x).stride()
    assert kernels == [updates._scale_kernel] * 2  # a part of something larger is left to torch


# weights


def updates_of(shape, dtype):
    """Orthogonal updates by where they are: by row, by column, and part of something larger."""
    rows, columns = shape
    yield normal(3, rows, columns, seed=20, dtype=dtype)
    yield normal(3, columns, rows, seed=21, dtype=dtype).mT
    yield normal(3, rows + 1, columns + 2, seed=22, dtype=dtype)[:, 1:, 1:-1]


DECAYS = {
    "decoupled": {},
    "adjusted": {"decay_adjusted": True, "lr_rule": "original"},
    "as the update": {"cautious": True},
    "as the slow rail": {"cautious": True, "rails": Rails()},
}
each_decay = pytest.mark.parametrize("options", DECAYS.values(), ids=DECAYS)


@each_decay
@pytest.mark.parametrize("shape", SHAPES)
def test_apply_is_the_rules(shape, options, kernels):
    for u in updates_of(shape, torch.float32):
        bank = make_bank(shape, **options)
        w = weights(bank).double()
        same = exact(bank)
        bank.apply(slice(0, 3), u, NUMBERS)
        expected = same.changed(slice(0, 3), w, u.double(), NUMBERS)
        assert_close(weights(bank), expected, ROUNDING)
        changed = bank.members[0].parameter[0]  # a row that is in no matrix
        assert torch.equal(changed, make_bank(shape).members[0].parameter[0])
    assert len(kernels) == 3


@each_decay
@pytest.mark.parametrize("shape", [(67, 35), (130, 36)])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_weights_are_rounded_once(dtype, shape, options):
    for u in updates_of(shape, HALF):
        bank, whole = make_bank(shape, dtype, **options), make_bank(shape, **options)
        for mine, theirs in zip(bank.members, whole.members, strict=True):
            theirs.weight.copy_(mine.weight)
        bank.apply(slice(0, 3), u, NUMBERS)
        whole.apply(slice(0, 3), u, NUMBERS)
        assert torch.equal(weights(bank), weights(whole).to(dtype))


@each_decay
@pytest.mark.parametrize("shape", [(67, 35), (130, 36)])
def test_extra_bits_are_float32_weights(shape, options):
    for u in updates_of(shape, torch.bfloat16):
        bank = make_bank(shape, torch.bfloat16, extra_bits=True, **options)
        whole = make_bank(shape, **options)
        for mine, low, theirs in zip(bank.members, bank.low, whole.members, strict=True):
            theirs.weight.copy_(rules.join_bits(mine.weight, low))
        for _ in range(3):
            bank.apply(slice(0, 3), u, NUMBERS)
            whole.apply(slice(0, 3), u, NUMBERS)
        high, low = rules.split_bits(weights(whole))
        assert torch.equal(weights(bank), high)
        assert torch.equal(bank.low, low)


# lanes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (36, 130), (70, 70)])
def test_lane_squares_are_means(shape, dtype):
    for u in updates_of(shape, dtype):
        expected = u.double().square().mean(-1 if shape[0] >= shape[1] else -2)
        assert_close(updates.lane_squares(u), expected, ROUNDING)


@each_decay
@pytest.mark.parametrize("shape", [*SHAPES, (36, 130), (70, 70)])
def test_equalized_updates_are_the_rules(shape, options, kernels):
    for u in updates_of(shape, torch.float32):
        bank = make_bank(shape, equalize=0.9, **options)
        w, same, part = weights(bank).double(), exact(bank), slice(0, 3)
        bank.finish(part, u, NUMBERS)
        expected = same.changed(part, w, same.equalized(part, u.double()), NUMBERS)
        assert_close(weights(bank), expected, ROUNDING)
        assert_close(bank.lanes, same.lanes, ROUNDING)
    assert kernels == [updates._lanes_kernel, updates._apply_kernel] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("equalize", [None, 0.9])
def test_half_updates_are_read_as_they_are(equalize, dtype):
    for u in updates_of((67, 35), dtype):
        bank, whole = (make_bank((67, 35), equalize=equalize) for _ in range(2))
        bank.finish(slice(0, 3), u, NUMBERS)
        whole.finish(slice(0, 3), u.float(), NUMBERS)
        assert_same(everything(bank), everything(whole))


# the whole step


def test_matrices_without_a_gradient_are_left():
    options = {"rails": Rails(), "equalize": 0.9, "cautious": True, "extra_bits": True}
    bank = make_bank((9, 6), torch.bfloat16, **options)
    before = everything(bank)
    grads = list(gradients_of((9, 6), torch.bfloat16))
    given = {id(bank.members[i]): grads[i] for i in (0, 2)}
    bank.step(lambda member: given.get(id(member)), NUMBERS)
    after = everything(bank)
    for name, t in after.items():
        assert torch.equal(t[1], before[name][1]), name
        assert not torch.equal(t[0], before[name][0]), name


def test_parts_of_a_bank_are_the_whole(monkeypatch):
    # Libraries' products depend on how many matrices there are, in their last bits.
    monkeypatch.setattr(MuonBank, "orthogonal", lambda self, u, norm: u / norm)
    found = []
    for matrices in (1, 3):
        monkeypatch.setattr(banks, "PART_ELEMENTS", matrices * 9 * 6)
        bank = make_bank((9, 6), rails=Rails(), equalize=0.9)
        grads = zip(bank.members, gradients_of((9, 6), torch.float32), strict=True)
        given = {id(member): g for member, g in grads}
        bank.step(lambda member, given=given: given[id(member)], NUMBERS)
        found.append(everything(bank))
    assert_close(found[0].pop("w"), found[1].pop("w"), ROUNDING)
    assert_same(*found)


def test_matrices_that_are_replaced_are_found():
    bank = make_bank((5, 7))
    before = weights(bank)
    own = bank.members[1].parameter
    old, own.data = own.data, own.data.clone()
    kept = old.clone()
    bank.apply(slice(0, 3), normal(3, 5, 7), NUMBERS)
    assert torch.equal(old, kept)
    assert not torch.equal(own.detach(), before[1])


def test_weights_stored_by_column_are_left_to_torch(kernels):
    members = [Member(Piece("w", "", 0, 5, (5, 7), "muon", None, 1.0, ""), normal(7, 5).T)]
    bank = MuonBank(members, PLAIN)
    bank.step(lambda _: normal(5, 7, seed=3), NUMBERS)
    assert not set(kernels) & {updates._momentum_kernel, updates._apply_kernel}
    same = MuonBank([Member(members[0].piece, normal(7, 5).T.contiguous())], PLAIN)
    same.step(lambda _: normal(5, 7, seed=3), NUMBERS)
    assert_close(weights(bank), weights(same), ROUNDING)


def test_tables_are_kept_while_addresses_are():
    a, b, c = normal(4, 4), normal(4, 4), normal(17)[1:].view(4, 4)
    table, aligned = launch.table([a, None, b], a.device)
    assert table.tolist() == [a.data_ptr(), 0, b.data_ptr()]
    assert aligned
    assert launch.table([a, None, b], a.device)[0] is table
    other, aligned = launch.table([a, c], a.device)
    assert other.tolist() == [a.data_ptr(), c.data_ptr()]
    assert not aligned
    empty, aligned = launch.table([a[:0].clone()], a.device)
    assert empty.tolist() != [0]
    assert aligned


def test_offsets_past_32_bits():
    """The last matrix of a bank of over 2^31 elements, of which no other is touched."""
    count = (1 << 31) // 64**2 + 2
    memory = torch.empty(count * 64**2, device=DEVICE)
    rail = memory.view(count, 64, 64)
    low = memory.view(torch.int16)[-rail.numel() :].view(count, 64, 64)
    weight, factors = normal(64, 64, dtype=torch.bfloat16), torch.ones(count, device=DEVICE)
    bank = SimpleNamespace(
        shape=rail.shape, members=[SimpleNamespace(weight=weight)] * count, fast=rail, slow=None,
        low=low, options=PLAIN, lr_mul=factors, decay_mul=factors, follows=factors,
        own_decay=factors,
    )  # fmt: skip
    last, u, g = slice(count - 1, count), normal(1, 64, 64, seed=1), normal(64, 64, seed=2)
    low[-1] = 77
    master = rules.join_bits(weight, low[-1])
    updates.apply(bank, last, u, NUMBERS)
    expected = master.double() * (1 - 0.02 * 1.3) - 0.02 * u[0].double()
    assert_close(rules.join_bits(weight, low[-1]), expected, ROUNDING)
    rail[-1] = u[0]
    updates.momentum(bank, last, [g], NUMBERS, torch.float32, False)
    assert_close(rail[-1], torch.lerp(u[0], g, 0.2), ROUNDING)


# steps that are left out


# Those of numpy, with which the interpreter computes.
nan_is_valid = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@nan_is_valid
@pytest.mark.parametrize("extra_bits", [False, True])
def test_a_bank_leaves_a_step_out(extra_bits):
    dtype = torch.bfloat16 if extra_bits else torch.float32
    options = {"rails": Rails(), "equalize": 0.9, "cautious": True, "extra_bits": extra_bits}
    bank = make_bank((35, 67), dtype, **options)
    bank.lanes.copy_(normal(*bank.lanes.shape).square())
    assert bank.skips
    before = everything(bank)
    bad = [g.fill_(bad) for g, bad in zip(
        gradients_of((35, 67), dtype), (torch.nan, torch.inf, 1.0), strict=True)]  # fmt: skip
    given = {id(member): g for member, g in zip(bank.members, bad, strict=True)}
    bank.step(lambda member: given[id(member)], NUMBERS._replace(skip=1.0))
    assert_same(everything(bank), before)


def layers(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 10), nn.LayerNorm(10))
    return randomise(model.to(DEVICE, dtype))


def give_gradients(model, step):
    for i, p in enumerate(model.parameters()):
        p.grad = normal(*p.shape, seed=100 * step + i, dtype=p.dtype)


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


OPTIONS = {
    "default": {},
    "anvil": {**ANVIL, "rails": Rails(engage_step=2)},
    "rows": {"row_equalize": True, "nesterov": False},
    "trace": {"trace_norm": True, "decay": "cautious"},
    "overrides": {"overrides": {"1.weight": {"lr_mul": 0.5, "weight_decay": 0.4}}},
    "extra bits": {"extra_bits": True},
    "anvil, every 2": {**ANVIL, "adam_every": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_hybrid_steps_as_without_kernels(options, kernels):
    dtype = torch.bfloat16 if "extra_bits" in options else torch.float32
    found = []
    for backend in ("torch", "triton"):
        model = layers(dtype)
        with use_backend(backend):
            optimizer = HybridOptimizer(
                model, lr=0.05, weight_decay=0.3, dtype=torch.float32, **options
            )
            for step in range(3):
                give_gradients(model, step)
                optimizer.step()
            states = [optimizer.state[p] for p in model.parameters()]
            found.append(parameters(model))
            if dtype == torch.bfloat16:
                pairs = zip(found[-1].items(), states, strict=True)
                found[-1] = {n: rules.join_bits(w, state["low"]) for (n, w), state in pairs}
            found[-1] |= {f"{i}.{name}": t for i, state in enumerate(states)
                          for name, t in state.items() if name != "low"}  # fmt: skip
        assert bool(kernels) == (backend == "triton")
    assert_close(found[1], found[0], TOLERANCE[torch.float32])


@contextlib.contextmanager
def no_waiting():
    """On a GPU, whatever makes the host wait for it is an error."""
    if DEVICE == "cpu":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@nan_is_valid
@pytest.mark.parametrize("options", [
    {"rails": Rails(engage_step=2), "equalize": 0.9},
    {**ANVIL, "adam_every": 2},
    {**ANVIL, "extra_bits": True},
], ids=["rails", "anvil, every 2", "anvil, extra bits"])  # fmt: skip
def test_a_hybrid_leaves_steps_out_and_tells_later(options, caplog):
    caplog.set_level(logging.WARNING)
    dtype = torch.bfloat16 if "extra_bits" in options else torch.float32
    models = layers(dtype), layers(dtype)
    optimizers = [HybridOptimizer(model, lr=0.05, **options) for model in models]
    for step in range(4):
        bad = step in (1, 2)
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(model, step)
            if bad and model is models[0]:
                model[3].bias.grad[1] = torch.nan
                before = parameters(model), copy.deepcopy(optimizer.state_dict()["state"])
            if bad and model is models[1]:
                optimizer.advance()
                continue
            with no_waiting():
                optimizer.step()
        if bad:
            assert_same(parameters(models[0]), before[0])
            for key, state in optimizers[0].state_dict()["state"].items():
                assert_same(state, before[1][key])
        assert not caplog.records or step > 2
    assert_same(parameters(models[0]), parameters(models[1]))
    assert [optimizer.skipped_steps for optimizer in optimizers] == [2, 0]
    [record] = caplog.records
    assert "a step before the last one was left out" in record.getMessage()


def test_what_the_device_cannot_leave_out_the_host_does(caplog):
    for fault in (lambda w: w.double(), lambda w: w.mT.contiguous().mT):
        model = layers()
        model[0].weight.data = fault(model[0].weight.data)
        optimizer = HybridOptimizer(model, lr=0.05)
        give_gradients(model, 0)
        optimizer.step()
        before, state = parameters(model), copy.deepcopy(optimizer.state_dict()["state"])
        give_gradients(model, 1)
        model[3].bias.grad[1] = torch.nan
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            optimizer.step()
        assert_same(parameters(model), before)
        for key, tensors in optimizer.state_dict()["state"].items():
            assert_same(tensors, state[key])
        assert "the gradient of 3.bias is not finite" in caplog.text
        assert optimizer.skipped_steps == 1


def test_numbers_of_a_device_are_one_tensor():
    given = torch.arange(1.0, 13.0, device=DEVICE)
    views = Numbers(*given[6:].unbind())
    assert views.packed(DEVICE).data_ptr() == given[6:].data_ptr()
    assert views.packed(DEVICE).tolist() == [float(x) for x in views]
    assert list(itertools.islice(NUMBERS.packed(DEVICE).tolist(), 2)) == pytest.approx([0.02, 0.3])
