import numpy as np
import pytest
from numpy.random import Generator, Philox

from mamba3.data.characters import characters, constant, hash_shares, squeezed, texts
from mamba3.data.numbers import numbers, numbers_of, pairs, random_numbers


def rng(seed=0):
    return Generator(Philox(key=seed))


# Characters


def test_texts_and_back():
    words = ["978+145", "c", "", "p0110"]
    assert texts(characters(words)) == words
    with_gaps = np.zeros((4, 20), np.uint8)
    with_gaps[:, [3, 4, 7, 9, 10, 15, 19]] = characters(words)
    assert texts(with_gaps) == words
    assert texts(constant("ab", 3)) == ["ab"] * 3


def test_what_lies_beside_is_squeezed_along():
    chars = characters(["ab", "c"])[:, [0, 0, 1, 1]] * np.array([1, 0, 1, 0], np.uint8)
    beside = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.uint8)
    assert squeezed(beside, 3, by=chars).tolist() == [[1, 3, 0], [5, 0, 0]]


def test_the_hash_is_of_the_text_alone():
    words = [str(n) for n in range(3000)] + [f"{n}+{3 * n}" for n in range(3000)]
    shares = hash_shares(characters(words))
    one_by_one = [hash_shares(characters([word]))[0] for word in words[::50]]
    assert shares[::50].tolist() == one_by_one
    wide = np.zeros((len(words), 40), np.uint8)
    wide[:, 2:40:3][:, : characters(words).shape[1]] = characters(words)
    assert np.array_equal(hash_shares(wide), shares)
    assert len(set(shares.tolist())) == len(words)
    assert 0 <= shares.min() < 0.01 < 0.99 < shares.max() < 1
    counts = np.histogram(shares, bins=20, range=(0, 1))[0]
    assert counts == pytest.approx(len(words) / 20, rel=0.25)


def test_the_hash_is_pinned():
    expected = [0.5454038885249506, 0.10281583477413081, 0.1386560908207516]
    assert hash_shares(characters(["978+145", "c1203", "%((3+4)*2)"])) == pytest.approx(
        expected, abs=1e-15
    )


# Numbers


def test_numbers_of_values():
    values = np.array([0, 7, 10, 120, 999, 1000])
    told = numbers_of(values, 5)
    assert told.values().tolist() == values.tolist()
    assert told.lengths.tolist() == [1, 1, 2, 3, 3, 4]
    assert texts(told.from_first()) == [str(v) for v in values]
    assert texts(told.from_ones()) == [str(v)[::-1] for v in values]
    assert texts(told.from_ones(np.full(6, 5))) == [str(v)[::-1].ljust(5, "0") for v in values]
    other = numbers(told.digits[:, ::-1]).where(values > 7, told)
    assert other.values().tolist() == [0, 7, 120, 10, 7, 0]


def test_random_numbers_have_their_digits():
    lengths = np.repeat([1, 2, 5, 30], 3000)
    words = texts(random_numbers(rng(), lengths, 30).from_first())
    assert [len(word) for word in words] == lengths.tolist()
    assert set(words[:3000]) == set("0123456789")
    assert {int(word) for word in words[3000:6000]} == set(range(10, 100))


@pytest.mark.parametrize("minus", [False, True])
@pytest.mark.parametrize("most", [1, 2, 4, 40])
def test_pairs(most, minus):
    n = 4000
    lengths = rng(1).integers(1, most + 1, n)
    others = 1 + (rng(2).random(n) * lengths).astype(int)
    carries = (rng(3).random(n) * (lengths + 1 - minus)).astype(int)
    drawn = pairs(rng(), lengths, others, carries, most=most, minus=minus)
    first, second, result = (texts(each.from_first()) for each in drawn)
    assert [len(a) for a in first] == lengths.tolist()
    assert [len(b) for b in second] == others.tolist()
    for a, b, c, expected in zip(first, second, result, carries, strict=True):
        assert a == str(int(a))
        assert b == str(int(b))
        assert c == str(int(a) - int(b) if minus else int(a) + int(b))
        assert count_of_carries(a, b, minus) == expected


def count_of_carries(a, b, minus):
    count = carry = 0
    for x, y in zip(a[::-1], b[::-1].ljust(len(a), "0"), strict=True):
        carry = int(x) < int(y) + carry if minus else int(x) + int(y) + carry > 9
        count += carry
    return count


@pytest.mark.parametrize("minus", [False, True])
def test_every_pair_with_its_carries_can_come(minus):
    """All that there are of two digits and one or two, and no others."""
    n = 60_000
    for other in (1, 2):
        for carry in range(3 - minus):
            every = [
                (a, b)
                for a in range(10, 100)
                for b in (range(10) if other == 1 else range(10, 100))
                if a - b >= 0 or not minus
                if count_of_carries(str(a), str(b), minus) == carry
            ]
            each = (np.full(n, value) for value in (2, other, carry))
            drawn = pairs(rng(), *each, most=2, minus=minus)
            got = list(
                zip(drawn.first.values().tolist(), drawn.second.values().tolist(), strict=True)
            )
            assert set(got) == set(every)
