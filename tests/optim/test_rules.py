"""The optimizer's rules against closed forms and plain float64 loops."""

import pytest
import torch

from mamba3.optim import Rails, rules


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def test_rails_under_a_constant_gradient():
    rails = Rails(engage_step=6, fast=0.8, fast_from=0.5, fast_to=0.9, slow=0.97, blend=0.4)
    g = normal(2, 3, 4)
    fast, slow = torch.zeros_like(g), torch.zeros_like(g)
    left_fast = left_slow = 1.0  # of the way from 0 to g
    for step in range(1, 12):
        beta, share = rails.at(step)
        engaged = step >= 6
        assert beta == pytest.approx(0.8 if engaged else 0.5 + 0.4 * (step - 1) / 5)
        assert share == (0.4 if engaged else 1.0)
        got = rules.rails_(g, fast, slow, beta, rails.slow, share, 0.95, True)
        left_fast, left_slow = left_fast * beta, left_slow * 0.97
        blend = share * (1 - left_fast) + (1 - share) * (1 - left_slow)
        torch.testing.assert_close(got, g * (1 + 0.95 * (blend - 1)))
        torch.testing.assert_close(fast, g * (1 - left_fast))
        torch.testing.assert_close(slow, g * (1 - left_slow))
    plain = rules.rails_(g, fast, slow, 0.8, 0.97, 0.4, 0.95, False)
    torch.testing.assert_close(plain, 0.4 * fast + 0.6 * slow)


def test_one_rail_is_momentum():
    g, v = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    for nesterov in (True, False):
        fast = v.clone()
        got = rules.momentum_(g, fast, 0.9, 0.7, nesterov)
        average = 0.9 * v + 0.1 * g
        torch.testing.assert_close(fast, average)
        torch.testing.assert_close(got, 0.3 * g + 0.7 * average if nesterov else average)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_lane_equaliser(shape):
    lanes = torch.zeros(3, max(shape), dtype=torch.float64)
    average = [[0.0] * max(shape) for _ in range(3)]
    for step in range(4):
        u = normal(3, *shape, seed=step) * torch.linspace(0.1, 3, shape[1], dtype=torch.float64)
        got = rules.equalize_lanes_(u, lanes, 0.9)
        for k in range(3):
            expected = torch.empty_like(u[k])
            # Rows are lanes where they are the longer side, or both are one.
            along = u[k] if shape[0] >= shape[1] else u[k].T
            for i, lane in enumerate(along):
                average[k][i] = 0.9 * average[k][i] + 0.1 * lane.square().mean().item()
                scaled = lane / (average[k][i] + rules.LANE_EPS) ** 0.5
                (expected if shape[0] >= shape[1] else expected.T)[i] = scaled
            expected *= u[k].norm() / expected.norm()
            torch.testing.assert_close(got[k], expected)
            assert got[k].norm() == pytest.approx(u[k].norm().item(), rel=1e-4)
    zero = rules.equalize_lanes_(torch.zeros(1, *shape), torch.zeros(1, max(shape)), 0.9)
    assert torch.equal(zero, torch.zeros(1, *shape))


def test_lane_equaliser_of_bfloat16_keeps_the_norm():
    u = normal(2, 40, 70, dtype=torch.bfloat16)
    got = rules.equalize_lanes_(u, torch.zeros(2, 70), 0.95)
    ratio = got.norm(dim=(1, 2)) / u.float().norm(dim=(1, 2))
    torch.testing.assert_close(ratio, torch.ones(2), atol=1e-4, rtol=0)


def test_rows_of_one_norm():
    u = normal(2, 3, 4)
    u[0, 1] = 0
    norms = rules.equalize_rows(u).norm(dim=-1)
    expected = torch.ones(2, 3, dtype=torch.float64)
    expected[0, 1] = 0
    torch.testing.assert_close(norms, expected)


def test_decay_only_where_signs_agree():
    w = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0, 2.0]])
    with_sign = torch.tensor([[1.0, -2.0, -1.0, 1.0, 1.0, 0.0]])
    rules.decay_(w, 0.25, with_sign)
    assert w.tolist() == [[0.75, -0.75, 1.0, -1.0, 0.0, 1.5]]
    rules.decay_(w, 0.5, None)
    assert w.tolist() == [[0.375, -0.375, 0.5, -0.5, 0.0, 0.75]]


def test_extra_bits_are_exact_and_unbiased():
    magnitudes = torch.logspace(-30, 30, 50001, dtype=torch.float64).float()
    special = torch.tensor([0.0, -0.0, 1.0, 1 + 2.0**-9, 1 + 2.0**-8, -1 - 2.0**-9, torch.inf])
    master = torch.cat([special, magnitudes, -magnitudes])
    high, low = rules.split_bits(master)
    assert torch.equal(rules.join_bits(high, low).view(torch.int32), master.view(torch.int32))
    nearest = master.bfloat16()
    assert high[len(special) - 1] == torch.inf
    as_near = (master - high.float()).abs() == (master - nearest.float()).abs()
    assert as_near[master.isfinite()].all()
    relative = (high.float() / master - 1)[len(special) :].double()
    assert relative.mean().abs() < 1e-5
    assert relative.abs().max() <= 2.0**-8


def test_bfloat16_with_extra_bits_is_float32_over_1000_steps():
    w, u = normal(4, 5, dtype=torch.float32), normal(1000, 4, 5, seed=1, dtype=torch.float32)
    high, low = rules.split_bits(w)
    for change in u:
        rules.decay_(w, 1e-4, None)
        w -= 1e-4 * change
        master = rules.join_bits(high, low)
        rules.decay_(master, 1e-4, None)
        master -= 1e-4 * change
        high, low = rules.split_bits(master)
    assert torch.equal(rules.join_bits(high, low), w)
    assert not torch.equal(high.float(), w)


@pytest.mark.parametrize("cautious", [False, True])
def test_adamw(cautious):
    w, step = normal(7), torch.zeros(())
    mine = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
    expected, m, v = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 6):
        g = normal(7, seed=t)
        rules.adamw_(mine[0], g, *mine[1:], step, 0.1, 0.02, (0.8, 0.9), 1e-3, cautious)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        mask = m * expected >= 0 if cautious else 1
        expected = expected - 0.02 * mask * expected
        m_hat, v_hat = m / (1 - 0.8**t), v / (1 - 0.9**t)
        expected = expected - 0.1 * m_hat / (v_hat.sqrt() + 1e-3)
        torch.testing.assert_close(mine[0], expected, rtol=1e-6, atol=1e-6)
    assert step == 5
