"""A jump of the loss is found at its step; falls, noise and odd batches are none."""

import json
import math
import random

import pytest

from mamba3.train.spikes import CONFIRM, LEAST, SpikeDetector


def found(losses, **options):
    """The steps, counted from 1, at which the loss of a run is said to have jumped."""
    detector = SpikeDetector(**options)
    seen = (detector.update(i + 1, loss) for i, loss in enumerate(losses))
    return [(i + 1, step) for i, step in enumerate(seen) if step is not None]


def test_the_limit_by_hand():
    detector = SpikeDetector(window=5, factor=4)
    for i, loss in enumerate([2.0, 2.5, 1.0, 2.2]):
        assert detector.limit == math.inf
        assert detector.update(i, loss) is None
    detector.update(4, 2.1)  # median 2.1, distances 0.1, 0.4, 1.1, 0.1 and 0
    assert detector.limit == pytest.approx(2.1 + 4 * 0.1)
    detector.update(5, 2.2)  # of 2.5, 1.0, 2.2, 2.1, 2.2: median 2.2, distances' 0.1
    assert detector.limit == pytest.approx(2.2 + 4 * 0.1)
    detector.update(6, 9.0)
    assert detector.limit == pytest.approx(2.2 + 4 * 0.1)  # not yet known to be usual
    detector.update(7, 1.8)  # of 2.2, 2.1, 2.2, 9.0, 1.8: median 2.2, distances 0, 0.1, 0, 6.8, 0.4
    assert detector.limit == pytest.approx(2.2 + 4 * 0.1)
    detector.update(8, 1.5)  # of 2.1, 2.2, 9.0, 1.8, 1.5: median 2.1, distances' 0.3
    assert detector.limit == pytest.approx(2.1 + 4 * 0.3)
    flat = SpikeDetector(window=3)
    for i in range(3):
        flat.update(i, 1.5)
    assert flat.limit == 1.5 + LEAST


@pytest.mark.parametrize("at", [70, 200])
def test_a_jump_is_found_at_its_step(at):
    r = random.Random(at)
    losses = [2.0 + r.gauss(0, 0.05) for _ in range(at - 1)]
    losses += [2.8 + 0.1 * i + r.gauss(0, 0.05) for i in range(20)]
    assert found(losses) == [(at + CONFIRM - 1, at)]


def test_after_it_the_losses_are_learnt_anew():
    losses = [1.0] * 8 + [5.0] * 12 + [9.0] * 3
    assert found(losses, window=8) == [(11, 9), (23, 21)]
    assert found([1.0] * 8 + [5.0] * 10 + [9.0] * 3, window=8) == [(11, 9)]


@pytest.mark.parametrize(
    "loss",
    [
        lambda i, r: 1 + 6 * math.exp(-i / 15) + r.gauss(0, 0.2),  # falls at once, in the window
        lambda i, r: 8.0 if i < 300 else 0.01 + r.random() / 100,  # a cliff
        lambda i, r: 2 + r.gauss(0, 0.5),
        lambda i, r: r.expovariate(1),
        lambda i, r: math.exp(r.gauss(0, 1)),
        lambda i, r: 1e-4 * math.exp(r.gauss(0, 2)),  # all is known, but for some
        lambda i, r: 2 + 0.002 * i + r.gauss(0, 0.02),  # a rise that is slow
        lambda i, r: 2 + r.gauss(0, 0.02) + 5 * (i % 40 in (20, 21)),  # two odd batches at a time
    ],
)
def test_what_is_no_spike(loss):
    for seed in range(3):
        r = random.Random(seed)
        assert found(loss(i, r) for i in range(1500)) == []


def test_the_first_steps_are_never_one():
    rising = [2.0**i for i in range(63)]
    assert found(rising) == []
    assert found([1.0] * 32 + [50.0] * 100) == []  # too few to say what is usual
    assert found([1.0] * 64 + [50.0] * 40) == [(67, 65)]


def test_losses_that_are_not_finite():
    usual = [1.0, 1.1] * 10
    bad = [usual, [math.nan], usual, [9.0, math.inf, 9.0, 9.0]]
    losses = [loss for part in bad for loss in part]
    # They are neither usual nor suspicious, unless asked for; and then at once.
    assert found(losses, window=8) == [(45, 42)]
    assert found(losses, window=8, nonfinite=True) == [(21, 21), (43, 42)]
    assert found([math.nan], nonfinite=True) == [(1, 1)]


def test_a_run_that_continues_finds_the_same():
    losses = [1.0, 1.1] * 6 + [3.0, 3.1, 3.2] + [3.0] * 30 + [9.0] * 3
    for stop in range(len(losses)):
        first = SpikeDetector(window=8)
        seen = [first.update(i, loss) for i, loss in enumerate(losses[:stop])]
        second = SpikeDetector(window=8)
        second.update(0, 77.0)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        seen += [second.update(stop + i, loss) for i, loss in enumerate(losses[stop:])]
        assert [step for step in seen if step is not None] == [12, 45]


def test_options_out_of_range():
    with pytest.raises(ValueError, match="window must be at least 2, got 1"):
        SpikeDetector(window=1)
    with pytest.raises(ValueError, match="factor must be more than 1, got nan"):
        SpikeDetector(factor=math.nan)
