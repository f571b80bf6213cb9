from itertools import pairwise

import pytest

from mamba3.data.shuffle import Shuffled

PINNED = [[5, 0, 2, 4, 7, 6, 1, 10, 8, 9, 3], [1, 10, 2, 3, 6, 5, 4, 9, 7, 8, 0]]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 64, 255, 1000, 1025])
def test_an_epoch_is_every_number_once(n):
    order = Shuffled(n, seed=7)
    for epoch in range(3):
        assert sorted(order(i) for i in range(epoch * n, (epoch + 1) * n)) == list(range(n))


def test_orders_are_pinned():
    """A run that goes on with another version sees the same data."""
    order = Shuffled(11, seed=3)
    assert [order(i) for i in range(11)] == PINNED[0]
    assert [order(i) for i in range(11, 22)] == PINNED[1]
    other = Shuffled(11, seed=4)
    assert [other(i) for i in range(11)] not in PINNED


def test_every_number_comes_first_equally_often():
    n, epochs = 7, 7000
    order = Shuffled(n, seed=0)
    for place in (0, 3):
        counts = [0] * n
        for epoch in range(epochs):
            counts[order(epoch * n + place)] += 1
        chi_squared = sum((count - epochs / n) ** 2 / (epochs / n) for count in counts)
        assert chi_squared < 22.5  # 6 degrees of freedom, p = 0.001


def test_neighbours_are_parted():
    """Numbers that follow one another are as far apart as two drawn at random: n / 3."""
    n = 3000
    order = Shuffled(n, seed=1)
    numbers = [order(i) for i in range(n)]
    apart = sum(abs(a - b) for a, b in pairwise(numbers)) / (n - 1)
    assert apart == pytest.approx(n / 3, rel=0.05)


def test_a_place_far_away_costs_the_same():
    order = Shuffled(10**12 + 1, seed=5)
    numbers = [order(i) for i in range(10**15, 10**15 + 100)]
    assert len(set(numbers)) == 100
    assert max(numbers) > 0.9e12


def test_nothing_to_shuffle():
    with pytest.raises(ValueError, match="at least 1"):
        Shuffled(0, seed=0)
