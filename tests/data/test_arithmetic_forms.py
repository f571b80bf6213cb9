"""What a user writes, and what a model reads and writes."""

import random
import re

import pytest
from number_forms import FORMS, answer_to_model, named

from mamba3.data import arithmetic
from mamba3.data.arithmetic import CurriculumStream
from mamba3.data.arithmetic_forms import (
    Form,
    answer_from_model,
    natural,
    prompt_from_model,
    prompt_to_model,
    result_of,
)
from mamba3.data.arithmetic_options import ProblemOptions
from mamba3.data.problems import BLANK


def form(order="lsd_first", operands="interleaved"):
    return Form(answer_order=order, operands=operands)


@pytest.mark.parametrize(
    ("prompt", "answer", "form", "read", "written"),
    [
        ("978+145", "1123", Form(), "978+145", "1123"),
        ("978+145", "1123", form("lsd_first", "plain"), "978+145", "3211"),
        ("978+145", "1123", form("msd_first", "reversed"), "879+541", "1123"),
        ("978+145", "1123", form(), "+857491", "3211"),
        ("145-978", "-833", form(), "-584719", "338-"),
        ("8-120", "-112", form(), "-800201", "211-"),
        ("120-8", "112", form("lsd_first", "reversed"), "021-8", "211"),
        ("31+57-80", "8", form(), "+-170358", "8"),
        ("3+9", "12", form(), "+39", "21"),
        ("47*36", "282+1410=1692", form(), "74*63", "282+0141=2961"),
        ("47*36", "282+1410=1692", form("msd_first"), "74*63", "282+1410=1692"),
        ("978+145", "1123", form(operands="columns"), "+85_74_91_", "3211"),
        ("978+5", "983", form(operands="columns"), "+85_70_90_", "389"),
        ("145-978", "-833", form(operands="columns"), "-584719,58_47_19_", "338-"),
        ("978-945", "33", form(operands="columns"), "-857499,85_74_99_", "330"),
        ("7-7", "0", form(operands="columns"), "-77,77_", "0"),
        ("3+9", "12", form(operands="columns"), "+39_", "21"),
        ("31+57-80", "8", form(operands="columns"), "+-170_358_", "80"),
        ("47*36", "282+1410=1692", form(operands="columns"), "74*63", "282+0141=2961"),
        ("978*5", "4890", form(operands="columns"), "*85_75_95_", "0984"),
        ("40*2", "80", form(operands="columns"), "*02_42_", "08"),
        ("863*0", "0", form(operands="columns"), "*30_60_80_", "000"),
        ("3*7", "21", form(operands="columns"), "*37_", "12"),
        ("c1203", "1203", form(operands="columns"), "c1203", "1203"),
        ("c1203", "1203", form(), "c1203", "1203"),
        ("r120", "021", form(), "r120", "021"),
        ("120?45", ">", form(), "120?45", ">"),
        ("%3+4*2", "1", form(), "%3+4*2", "1"),
        ("%((3+4)*2)", "4", form(), "%((3+4)*2)", "4"),
        ("%((3+4)*2)", "4", Form(brackets="working"), "%((3+4)___*2)___", "3+22*44"),
        ("%(-3)", "2", Form(brackets="working"), "%(-3)___", ",,22"),
        ("%-3", "2", Form(brackets="working"), "%-3", "2"),
        ("978+145", "1123", Form(brackets="working"), "978+145", "1123"),
        ("p0110", "0", form(), "p0110", "0"),
    ],
)
def test_by_hand(prompt, answer, form, read, written):
    assert prompt_to_model(prompt, form) == read
    assert prompt_from_model(read, form) == prompt
    assert answer_to_model(prompt, answer, form) == written
    assert answer_from_model(prompt, written, form) == answer


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_round_trips(form):
    rng = random.Random(0)
    for _ in range(2000):
        count, most = rng.choice((2, 2, 3)), rng.choice((1, 3, 10, 100))
        numbers = [str(rng.randrange(10 ** rng.randint(1, most))) for _ in range(count)]
        signs = rng.choice(("+", "-", "+-", "-+") if count == 3 else ("+", "-", "*"))
        prompt = numbers[0] + "".join(
            sign + number for sign, number in zip(signs.ljust(2, "+"), numbers[1:], strict=False)
        )
        read = prompt_to_model(prompt, form)
        assert prompt_from_model(read, form) == prompt
        assert natural(prompt) in (prompt, "*".join(reversed(prompt.split("*"))))
        answer = str(eval(prompt))
        assert answer_from_model(prompt, answer_to_model(prompt, answer, form), form) == answer
        if form.operands == "interleaved" and "*" not in prompt:
            longest = max(map(len, re.findall(r"\d+", prompt)))
            assert len(read) == (longest + 1) * (len(numbers)) - 1
        if form.operands == "columns" and ("*" not in prompt or len(numbers[1]) == 1):
            assert read.count(BLANK) == max(map(len, re.findall(r"\d+", prompt)))


@pytest.mark.parametrize("form", FORMS[1:], ids=named)
def test_drawn_problems_have_the_form_of_texts(form):
    """The same problems, laid out as matrices while drawn, and as texts afterwards."""
    plain, other = (
        CurriculumStream(
            arithmetic.STAGES,
            arithmetic.tokenizer(),
            batch_size=3000,
            seed=0,
            options=ProblemOptions(form=each),
        ).problems(0)
        for each in (Form(), form)
    )
    for p, q in zip(plain, other, strict=True):
        assert q.prompt == prompt_to_model(p.prompt, form)
        assert q.answer == answer_to_model(p.prompt, p.answer, form)


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("978+145", "978+145"),
        (" 978 + 145 = ", "978+145"),
        ("007+0", "7+0"),
        ("00-100", "0-100"),
        ("7*123", "123*7"),
        ("12*34", "12*34"),
        ("c0120", "c0120"),
        ("p 0110", "p0110"),
        ("(3+4*2)%5", "%3+4*2"),
        ("3 + 4 * 2 % 5", "%3+4*2"),
        ("((3+4)*2) % 5 =", "%((3+4)*2)"),
        ("%3+4*2", "%3+4*2"),
        ("what?", "what?"),
        ("", ""),
        ("%5", "%5"),
    ],
)
def test_natural(written, known):
    assert natural(written) == known


def test_the_result_is_what_comes_last():
    assert result_of("282+1410=1692") == "1692"
    assert result_of("-833") == "-833"


def test_a_wrong_sign_stays_wrong():
    """What a model writes in front, where it should write it at the end, is not put right."""
    assert answer_from_model("1-2", "-1", form()) == "1-"


@pytest.mark.parametrize(
    "values", [{"answer_order": "up"}, {"operands": "mixed"}, {"brackets": "round"}]
)
def test_forms_that_do_not_exist(values):
    with pytest.raises(ValueError, match="must be one of"):
        Form(**values)
