"""Stage 6 against Python's own arithmetic, symbol by symbol."""

import re

import numpy as np
import pytest
from numpy.random import Generator, Philox

from mamba3.data.characters import texts
from mamba3.data.state_tasks import brackets, modular, parity


def drawn(make, lengths, seed=0):
    tracked = make(Generator(Philox(key=seed)), np.asarray(lengths))
    answers = texts(tracked.answers[:, None])
    return tracked, texts(tracked.prompts), answers


@pytest.mark.parametrize("lengths", [[1] * 50, range(1, 300), [256] * 40], ids=["1", "all", "256"])
@pytest.mark.parametrize("make", [parity, modular, brackets])
def test_answers_and_lengths(make, lengths):
    tracked, prompts, answers = drawn(make, lengths)
    for prompt, answer, length, symbols in zip(
        prompts, answers, lengths, tracked.symbols, strict=True
    ):
        wanted = length - (make is modular and length % 2 == 0)
        assert len(prompt) - 1 == symbols == wanted
        right = prompt.count("1") % 2 if make is parity else eval(prompt[1:]) % 5
        assert answer == str(right)


def test_running_parity_and_running_values():
    tracked, prompts, _ = drawn(parity, range(1, 60))
    for prompt, values in zip(prompts, tracked.running, strict=True):
        expected = [prompt[: i + 1].count("1") % 2 for i in range(1, len(prompt))]
        assert bytes(values[1 : len(prompt)]).decode() == "".join(map(str, expected))
        assert not values[0]
        assert not values[len(prompt) :].any()
    tracked, prompts, _ = drawn(modular, range(1, 60))
    for prompt, values in zip(prompts, tracked.running, strict=True):
        # After an operator it is still what was before.
        expected = [eval(prompt[1 : i - (i % 2 == 0) + 1]) % 5 for i in range(1, len(prompt))]
        assert bytes(values[1 : len(prompt)]).decode() == "".join(map(str, expected))


def test_values_of_brackets_are_at_their_ends():
    tracked, prompts, answers = drawn(brackets, np.repeat(np.arange(1, 80), 3))
    for prompt, values, answer in zip(prompts, tracked.running, answers, strict=True):
        opened = []
        for place, char in enumerate(prompt):
            if char == "(":
                opened.append(place)
            elif char == ")":
                assert chr(values[place]) == str(eval(prompt[opened.pop() : place + 1]) % 5)
            elif char.isdigit():
                negative = re.search(r"(^%|[(+*-])-$", prompt[:place])
                assert chr(values[place]) == str((-int(char) if negative else int(char)) % 5)
            else:
                assert not values[place]
        assert not opened
        assert chr(values[len(prompt) - 1]) == answer


def test_what_is_drawn_varies():
    _, prompts, answers = drawn(brackets, [30] * 4000)
    assert len(set(prompts)) > 3990
    assert {op for prompt in prompts for op in re.findall(r"[+*-]", prompt)} == set("+-*")
    depths = [max(np.cumsum([(c == "(") - (c == ")") for c in prompt])) for prompt in prompts]
    assert min(depths) <= 4
    assert max(depths) == 7  # an operation takes at least 4 symbols besides its left side
    for make, chance in ((parity, 1 / 2), (modular, 1 / 5), (brackets, 1 / 5)):
        answers = drawn(make, [41] * 6000)[2]
        shares = [answers.count(str(i)) / 6000 for i in range(round(1 / chance))]
        # Products are 0 more often than not.
        assert shares[1:] == pytest.approx([chance] * (len(shares) - 1), abs=0.06)
        assert shares[0] == pytest.approx(chance, abs=0.13)
