"""AdamW's kernels against the rules in float64, and one against the other bit for bit."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from compare import DEVICE, assert_close, assert_same
from plain_steps import HALVES, NUMBERS, PLAIN, ROUNDING
from torch import nn

from mamba3.ops import use_backend
from mamba3.optim import rules
from mamba3.optim.adamw import AdamWList
from mamba3.optim.param_groups import Piece
from mamba3.optim.pieces import Member, Options
from mamba3.optim.triton import adamw, launch

pytestmark = pytest.mark.usefixtures("kernels")

BETAS, EPS = (0.9, 0.999), 1e-3
COUNTS = (0.0, 1.0, 7.0, 1000.0, 0.0)
OPTIONS = {
    "plain": {},
    "cautious": {"cautious": True},
    "every 2": {"adam_every": 2},
    "every 2, cautious": {"adam_every": 2, "cautious": True},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def make_list(stored=torch.float32, **options) -> AdamWList:
    """Pieces within a program's elements, as many, and past them; rows of no alignment."""
    fused = nn.Parameter(normal(9, 7, dtype=stored))
    own = [nn.Parameter(normal(*shape, seed=1, dtype=stored))
           for shape in ((3,), (adamw.BLOCK,), (2, adamw.BLOCK + 5), ())]  # fmt: skip
    members = [
        Member(Piece("fused", "a", 2, 5, (3, 7), "adamw", None, 1.0, ""), fused),
        Member(Piece("small", "", 0, 3, (3,), "adamw", 0.7, 0.5, ""), own[0]),
        Member(Piece("block", "", 0, 0, own[1].shape, "adamw", 0.0, 2.0, ""), own[1]),
        Member(Piece("large", "", 0, 2, own[2].shape, "adamw", None, 1.0, ""), own[2]),
        Member(Piece("number", "", 0, 0, (), "adamw", None, 1.0, ""), own[3]),
    ]
    those = AdamWList(members, Options(**vars(PLAIN) | options))
    for i, piece in enumerate(those.pieces):
        piece.average.copy_(normal(*piece.average.shape, seed=10 + i))
        piece.square.copy_(normal(*piece.square.shape, seed=20 + i).square() + 0.1)
        piece.count.fill_(COUNTS[i])
        if piece.kept is not None:
            piece.kept.copy_(normal(*piece.kept.shape, seed=30 + i))
        if piece.low is not None:
            piece.low.copy_(normal(*piece.low.shape, seed=40 + i) * 10000)
    return those


def copy_of(those: AdamWList, dtype: torch.dtype) -> AdamWList:
    """One whose weights are whole parameters in another dtype; those of float64 are torch's."""
    weights = [
        p.member.weight if p.low is None else rules.join_bits(p.member.weight, p.low)
        for p in those.pieces
    ]
    members = [
        Member(replace(member.piece, label=""), weight.to(dtype, copy=True))
        for member, weight in zip(those.members, weights, strict=True)
    ]
    other = AdamWList(members, those.options)
    for mine, theirs in zip(other.pieces, those.pieces, strict=True):
        for name, t in mine.state().items():
            t.copy_(theirs.state()[name])
    return other


def everything(those: AdamWList) -> dict[str, torch.Tensor]:
    """Copies of weights and state."""
    return {
        f"{member.piece.name} {member.piece.start} {name}": t.detach().clone()
        for member, state in those.states()
        for name, t in {"w": member.weight, **state}.items()
    }


def gradients_of(those: AdamWList, dtype=torch.float32) -> list[torch.Tensor]:
    """One as it should be, one of no alignment, one that is stored by column, and others."""
    made = [normal(*p.average.shape, seed=50 + i, dtype=dtype) for i, p in enumerate(those.pieces)]
    made[1] = torch.cat([made[1], made[1]])[3:]
    made[3] = made[3].mT.contiguous().mT
    return made


def step(those, grads, numbers=NUMBERS, active=True, betas=BETAS) -> None:
    given = {id(member): g for member, g in zip(those.members, grads, strict=True)}
    those.step(lambda member: given[id(member)], numbers, betas, EPS, active)


@each_option
@pytest.mark.parametrize("betas", [BETAS, (0.0, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_are_the_rules(dtype, betas, options, kernels):
    those = make_list(**options)
    same, grads = copy_of(those, torch.float64), gradients_of(those, dtype)
    assert those.skips
    assert not same.on_kernels
    step(those, grads, betas=betas)
    assert kernels == [adamw._numbers_kernel, adamw._adamw_kernel]
    step(same, [g.double() for g in grads], betas=betas)
    assert_close(everything(those), everything(same), ROUNDING)
    fused, left = those.members[0].parameter, make_list().members[0].parameter
    assert torch.equal(fused[:2], left[:2])  # rows that are in no piece
    assert torch.equal(fused[5:], left[5:])


@each_option
def test_pieces_without_a_gradient(options):
    """They are left, unless an earlier step has kept one."""
    those = make_list(**options)
    same, grads = copy_of(those, torch.float64), gradients_of(those)
    before = everything(those)
    given = [g if i in (0, 3) else None for i, g in enumerate(grads)]
    step(those, given)
    step(same, [None if g is None else g.double() for g in given])
    after = everything(those)
    assert_close(after, everything(same), ROUNDING)
    left = [torch.equal(t, before[name]) for name, t in after.items() if name.startswith("block")]
    assert all(left) != ("adam_every" in options)


def test_gradients_are_kept():
    those = make_list(adam_every=2)
    same, grads = copy_of(those, torch.float64), gradients_of(those)
    for active, given in ((False, grads), (False, [None, *grads[1:]]), (True, grads)):
        before = everything(those)
        step(those, given, active=active)
        step(same, [None if g is None else g.double() for g in given], active=active)
        after = everything(those)
        assert_close(after, everything(same), ROUNDING)
        changed = {
            name.split()[-1] for name, t in after.items() if not torch.equal(t, before[name])
        }
        assert changed == ({"w", "exp_avg", "exp_avg_sq", "step", "kept"} if active else {"kept"})


@each_option
@pytest.mark.parametrize("dtype", HALVES)
def test_half_weights_are_rounded_once(dtype, options):
    those = make_list(dtype, **options)
    whole, grads = copy_of(those, torch.float32), gradients_of(those, dtype)
    step(those, grads)
    step(whole, grads)
    for mine, theirs in zip(those.members, whole.members, strict=True):
        assert torch.equal(mine.weight, theirs.weight.to(dtype))


@each_option
def test_extra_bits_are_float32_weights(options):
    those = make_list(torch.bfloat16, extra_bits=True, **options)
    whole = copy_of(those, torch.float32)
    for seed in range(3):
        grads = [normal(*p.average.shape, seed=seed, dtype=torch.bfloat16) for p in those.pieces]
        step(those, grads)
        step(whole, grads)
    for mine, theirs in zip(those.pieces, whole.pieces, strict=True):
        high, low = rules.split_bits(theirs.member.weight)
        assert torch.equal(mine.member.weight, high)
        assert torch.equal(mine.low, low)


# Those of numpy, with which the interpreter computes.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_step_is_left_out(stored, active):
    those = make_list(stored, extra_bits=True, adam_every=2, cautious=True)
    before = everything(those)
    bad = [torch.full_like(g, fault) for g, fault in zip(
        gradients_of(those), (torch.nan, torch.inf, 1.0, torch.nan, 1.0), strict=True)]  # fmt: skip
    step(those, bad, NUMBERS._replace(skip=1.0), active)
    assert_same(everything(those), before)


def test_gradients_of_several_dtypes():
    those = make_list()
    same, grads = copy_of(those, torch.float64), gradients_of(those)
    dtypes = itertools.cycle([torch.bfloat16, torch.float16])
    grads = [g.to(dtype) for g, dtype in zip(grads, dtypes, strict=False)]
    step(those, grads)
    step(same, [g.double() for g in grads])
    assert_close(everything(those), everything(same), ROUNDING)


def test_a_piece_with_no_rows_here_counts_its_steps():
    empty = nn.Parameter(torch.empty(0, 3, device=DEVICE))
    those = AdamWList([Member(Piece("w", "", 0, 0, (4, 3), "adamw", None, 1.0, ""), empty)], PLAIN)
    step(those, [torch.empty_like(empty)])
    step(those, [None])
    assert those.pieces[0].count == 1


def test_offsets_past_32_bits():
    """The last program of a piece of 3 * 2^30 elements, of which no other is there."""
    first, size = 3 << 20, 5  # programs before, elements that are left
    start = first * adamw.BLOCK
    w, g, m, v = (normal(size, seed=i) for i in range(4))
    v.square_()
    same = [t.double() for t in (w, m, v)]

    def table(*values):
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    def address(t):
        return t.data_ptr() - start * t.element_size()

    layout = table(address(m), address(v), 0, 0, start + size, -first)
    owners, scalars = table(0), torch.tensor([0.1, 0.9, EPS], device=DEVICE)
    tensors = [layout, owners, table(address(w)), table(address(g)), table(start + size), scalars]
    constants = {
        "DTYPE": launch.DTYPES[w.dtype], "GRAD": launch.DTYPES[g.dtype], "ALIGNED": False,
        "CAUTIOUS": False, "LOW": False, "KEEPS": False, "STEPS": True, "BLOCK": adamw.BLOCK,
    }  # fmt: skip
    launch.launch(adamw._adamw_kernel, 1, tensors, (1, 0.1, 0.05), constants)
    expected = dict(zip("wmv", same, strict=True))
    expected["m"].lerp_(g.double(), 0.1)
    expected["v"].lerp_(g.double().square(), 0.05)
    expected["w"].mul_(0.9).sub_(0.1 * expected["m"] / (expected["v"].sqrt() + EPS))
    assert_close({"w": w, "m": m, "v": v}, expected, ROUNDING)


def test_the_first_steps_of_a_slow_average():
    """1 - beta^t keeps its digits."""
    betas = (0.9999, 0.99999)
    those = make_list()
    those.counts.zero_()
    same, grads = copy_of(those, torch.float64), gradients_of(those)
    for _ in range(2):
        step(those, grads, betas=betas)
        step(same, [g.double() for g in grads], betas=betas)
    assert_close(everything(those), everything(same), ROUNDING)
    assert math.isclose(those.counts.sum().item(), 2 * len(grads))


@pytest.mark.parametrize("weight_by_column", [False, True])
@pytest.mark.parametrize("gradient_by_column", [False, True])
def test_torch_takes_whatever_is_stored_by_column(gradient_by_column, weight_by_column, kernels):
    def stored(t, by_column):
        return t.mT.contiguous().mT if by_column else t

    found = []
    for by_column in (False, True):
        weight = stored(normal(4, 7), by_column and weight_by_column)
        piece = Piece("w", "", 0, 0, (4, 7), "adamw", None, 1.0, "")
        those = AdamWList([Member(piece, weight)], PLAIN)
        with use_backend("torch"):
            assert not those.skips
            # Betas that float32 has exactly: torch's kernel on a GPU rounds others before 1 - beta.
            grads = [stored(normal(4, 7, seed=1), by_column and gradient_by_column)]
            step(those, grads, betas=(0.5, 0.75))
        found.append(everything(those))
    assert not kernels
    assert_close(found[1], found[0], ROUNDING)
