"""The curriculum's problems: right, split once and for all, and balanced; and their batches."""

import json
import pickle
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from number_forms import FORMS, named

from mamba3.data import arithmetic
from mamba3.data.arithmetic import CurriculumStream, eval_problems, is_held_out, training_set
from mamba3.data.arithmetic_forms import (
    Form,
    answer_from_model,
    natural,
    prompt_from_model,
)
from mamba3.data.arithmetic_options import ProblemOptions
from mamba3.data.arithmetic_tasks import TASKS
from mamba3.data.byte_tokenizer import ByteTokenizer
from mamba3.data.characters import texts
from mamba3.data.problems import Problem, collate
from mamba3.models.lm import IGNORE

EVERY = list(arithmetic.STAGES)


def right_answer(prompt: str) -> str:
    """Worked out from the prompt in its natural form alone, another way than the generators do."""
    if prompt[0] == "c":
        return prompt[1:]
    if prompt[0] == "r":
        return "".join(prompt[i] for i in range(len(prompt) - 1, 0, -1))
    if prompt[0] == "s":
        return str(int(prompt[1:]) + 1)
    if prompt[0] == "p":
        return str(prompt.count("1") % 2)
    if prompt[0] == "%":
        return str(eval(prompt[1:]) % 5)
    if "?" in prompt:
        a, b = map(int, prompt.split("?"))
        return {-1: "<", 0: "=", 1: ">"}[(a > b) - (a < b)]
    if two_by_two := re.fullmatch(r"(\d\d)\*(\d)(\d)", prompt):
        a, tens, ones = map(int, two_by_two.groups())
        return f"{a * ones}+{a * tens * 10}={a * (10 * tens + ones)}"
    return str(eval(prompt))


def carries_of(prompt: str) -> int:
    """Carries or borrows, place by place, the smaller number being taken from the larger."""
    a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)", prompt).groups()
    a, b = sorted(map(int, (a, b)), reverse=True)
    count = carry = 0
    while a or b:
        a, x = divmod(a, 10)
        b, y = divmod(b, 10)
        carry = x + y + carry > 9 if sign == "+" else x < y + carry
        count += carry
    return count


def stream_of(stages, *, batch_size=100, seed=0, **options):
    return CurriculumStream(
        stages,
        arithmetic.tokenizer(),
        batch_size=batch_size,
        seed=seed,
        options=ProblemOptions(**options),
    )


def drawn(stages, n=6000, **options):
    return stream_of(stages, batch_size=n, **options).problems(0)


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_answers_are_right(form):
    problems = drawn(EVERY, n=20_000, form=form)
    for stage in EVERY:
        problems += eval_problems(stage, 300, options=ProblemOptions(form=form))
    told = [(prompt_from_model(p.prompt, form), p.answer) for p in problems]
    wrong = [
        (prompt, answer)
        for prompt, answer in told
        if answer_from_model(prompt, answer, form) != right_answer(prompt)
    ]
    assert wrong == []
    assert {p.task for p in problems} == set(TASKS)
    assert all(arithmetic.well_formed(p, p.answer, form) for p in problems)


def test_long_answers_are_right():
    for digits in (12, 15, 20, 40, 100):
        problems = eval_problems(4, 200, sizes=[digits])
        assert len(problems) == 200
        assert [p for p in problems if p.answer != right_answer(p.prompt)] == []
        assert {max(map(len, re.findall(r"\d+", p.prompt))) for p in problems} == {digits}
        assert all(dict(p.traits) == {"digits": digits, "carries": carries_of(p.prompt)}
                   for p in problems)  # fmt: skip
    for p in eval_problems(6, 150):
        assert p.answer == right_answer(p.prompt)
        assert len(p.prompt) - 1 == dict(p.traits)["symbols"] == 256 - (p.task == "modular")


# The split


@pytest.mark.parametrize("stages", [[stage] for stage in EVERY] + [EVERY], ids=str)
def test_no_held_out_problem_is_ever_drawn(stages):
    measured = {p.prompt for stage in stages if stage != 2 for p in eval_problems(stage, 2000)}
    assert all(map(is_held_out, measured))
    other = {p.prompt for stage in stages if stage != 2 for p in eval_problems(stage, 300, seed=1)}
    assert all(map(is_held_out, other))
    for seed in range(3):
        prompts = {p.prompt for p in drawn(stages, n=30_000, seed=seed)}
        assert measured.isdisjoint(prompts)
        assert not any(map(is_held_out, prompts))


@pytest.mark.parametrize("form", FORMS[1:], ids=named)
def test_the_split_is_the_same_in_every_form(form):
    prompts = [prompt_from_model(p.prompt, form) for p in drawn([3, 4, 5], form=form)]
    assert not any(map(is_held_out, prompts))
    measured = eval_problems(4, 300, options=ProblemOptions(form=form))
    assert all(is_held_out(prompt_from_model(p.prompt, form)) for p in measured)
    assert len(measured) == 300


def test_all_others_of_a_small_space_are_drawn():
    every = {f"{a}*{b}" for a in range(10, 100) for b in range(10, 100)}
    trained = {p.prompt for p in drawn([5], n=150_000, tasks=("product",))}
    assert trained == {prompt for prompt in every if not is_held_out(prompt)}
    measured = {
        p.prompt for p in eval_problems(5, 2000, options=ProblemOptions(tasks=("product",)))
    }
    assert measured == every - trained
    every = {f"p{bits:0{n}b}" for n in range(3, 9) for bits in range(2**n)}
    trained = {p.prompt for p in drawn([6], n=20_000, tasks=("parity",), symbols=8)}
    assert trained == {prompt for prompt in every if not is_held_out(prompt)}


def test_a_tenth_is_held_out():
    for letter in "crs":
        share = sum(is_held_out(f"{letter}{i}") for i in range(10_000)) / 10_000
        assert share == pytest.approx(0.1, abs=0.01)


def test_facts_are_never_held_out():
    for signs, stage in (("+-", 2), ("+-", 4), ("*", 5)):
        facts = {f"{a}{sign}{b}" for sign in signs for a in range(10) for b in range(10)}
        assert not any(map(is_held_out, facts))
        assert facts <= {p.prompt for p in drawn([stage], n=60_000)}
    assert any(is_held_out(f"{a}?{b}") for a in range(10) for b in range(10))


def test_the_draws_are_pinned():
    # A change of these changes what "held out" means for every model trained before.
    assert [i for i in range(40) if is_held_out(f"c{i}")] == [12, 15, 22, 26, 28]
    assert [i for i in range(40) if is_held_out(f"{i}+145")] == [8, 18, 24]
    prompts = [[p.prompt for p in stream_of(st).problems(0)[:4]] for st in ([1, 2], [3])]
    assert prompts[0] == ["c1153", "1?3", "2-9", "1?6834"]
    assert prompts[1] == ["62+535", "679-113", "30+824", "875-831"]


# What is drawn


def test_stage_1_covers_its_cases():
    problems = drawn([1])
    digits = [len(p.prompt) - 1 for p in problems if p.task == "copy"]
    assert {n: digits.count(n) / len(digits) for n in set(digits)} == pytest.approx(
        {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}, abs=0.06
    )
    signs = [p.answer for p in problems if p.task == "compare"]
    assert min(signs.count(s) / len(signs) for s in "<>=") > 0.1
    successors = [p.prompt for p in problems if p.task == "successor"]
    assert sum(p.endswith("99") for p in successors) / len(successors) > 0.1
    assert "s9999" not in successors
    pairs = [p.prompt.split("?") for p in problems if p.task == "compare"]
    near = sum(len(a) == len(b) > 2 and a[:2] == b[:2] and a != b for a, b in pairs)
    assert near / len(pairs) > 0.1


def test_stage_2_is_a_table_of_200_facts_all_trained_on():
    facts = {p.prompt: p.answer for p in eval_problems(2, 1)}
    assert len(facts) == 200
    assert (facts["9+9"], facts["3-9"], facts["7-7"]) == ("18", "-6", "0")
    assert {p.prompt for p in drawn([2])} == set(facts)


def test_stage_3_has_nothing_to_carry_and_ten_thousand_problems():
    every = []
    for name, size in (("plus", 4000), ("minus", 4000), ("chain", 2000)):
        prompts = texts(training_set(name).natural)
        assert len(set(prompts)) == len(prompts) == size
        every += prompts
    assert not any(map(is_held_out, every))
    for prompt in every + [p.prompt for p in eval_problems(3, 300)]:
        total, *rest = (int(n) for n in re.findall(r"\d+", prompt))
        assert {len(str(n)) for n in (total, *rest)} <= {2, 3}
        for sign, n in zip(re.findall(r"[+-]", prompt), rest, strict=True):
            for a, b in zip(f"{total:03}", f"{n:03}", strict=True):
                assert int(a) + int(b) <= 9 if sign == "+" else int(a) >= int(b)
            total = total + n if sign == "+" else total - n
    assert {p.prompt for p in drawn([3])} <= set(every)


@pytest.mark.parametrize("task", ["sum", "difference"])
def test_stage_4_is_balanced_over_digits_and_carries(task):
    problems = drawn([4], n=40_000, tasks=(task,))
    counts = np.zeros((11, 11))
    for p in problems:
        numbers = re.findall(r"\d+", p.prompt)
        counts[max(map(len, numbers)), carries_of(p.prompt)] += 1
    for digits in range(1, 11):
        carries = digits + (task == "sum")
        share = counts[digits].sum() / len(problems)
        assert share == pytest.approx(0.1, abs=0.01)
        if digits > 1:  # facts are never held out, nor drawn anew
            assert counts[digits, :carries].sum() == counts[digits].sum()
            expected = counts[digits].sum() / carries
            assert counts[digits, :carries] == pytest.approx(expected, rel=0.35)
    shorter = sum(len(set(map(len, re.findall(r"\d+", p.prompt)))) == 2 for p in problems)
    assert 0.3 < shorter / len(problems) < 0.5
    if task == "difference":
        assert sum(p.answer[0] == "-" for p in problems) / len(problems) == pytest.approx(
            0.48, abs=0.03
        )


def test_shares_of_stages_and_chosen_tasks():
    problems = drawn([1, 4], n=20_000, shares=(1, 3))
    of_stage_1 = sum(TASKS[p.task].stage == 1 for p in problems) / len(problems)
    assert of_stage_1 == pytest.approx(0.25, abs=0.02)
    assert {p.task for p in drawn([1, 6], tasks=("parity", "copy"))} == {"copy", "parity"}


# Batches


@pytest.mark.parametrize("form", [FORMS[0], *FORMS[-3:]], ids=named)
@pytest.mark.parametrize("stages", [[1], [2, 3], [4], [6], EVERY], ids=str)
def test_batches_are_the_problems(stages, form):
    stream = stream_of(stages, batch_size=50, seed=4, form=form)
    lengths = set()
    for index in (0, 3, 41):
        batch, expected = stream(index), collate(stream.problems(index), stream.tokenizer)
        n = expected.input_ids.shape[1]
        lengths.add(batch.input_ids.shape[1])
        assert torch.equal(batch.input_ids[:, :n], expected.input_ids)
        assert torch.equal(batch.labels[:, :n], expected.labels)
        assert (batch.input_ids[:, n:] == stream.tokenizer.pad_token_id).all()
        assert (batch.labels[:, n:] == IGNORE).all()
        assert batch.n_tokens == expected.n_tokens
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert len(lengths) == 1


def test_batches_are_no_longer_than_problems_can_be():
    for stages, longest in (([1], "8888?8888=>"), ([2], "3-9=-6"), ([3], "111+222-333=222"),
                            ([4], f"{'9' * 10}+{'9' * 10}=1{'9' * 10}")):  # fmt: skip
        assert stream_of(stages)(0).input_ids.shape[1] == len(longest) + 2


def test_small_batches_and_rare_tasks():
    """Some tasks have no problem at all among those drawn at once."""
    stream = stream_of(EVERY, batch_size=1, shares=(1, 1, 1, 1, 1, 500), state_labels="running")
    names = [p.task for index in range(300) for p in stream.problems(index)]
    assert names.count("parity") > 60
    assert stream(299).input_ids.shape[0] == 1
    for task in TASKS.values():
        nothing = task.draw(np.random.default_rng(0), 0, Form(), np.zeros(0, int))
        assert len(nothing.prompts) == len(nothing.answers) == len(nothing.natural) == 0


def test_other_tokenizers():
    stream = CurriculumStream([1, 4], ByteTokenizer(), batch_size=6, seed=1)
    batch, expected = stream(2), collate(stream.problems(2), ByteTokenizer())
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.labels, expected.labels)


def test_problems_grow():
    stream = stream_of([6], batch_size=512, symbols=40, grow_to=160, grow_batches=400)
    lengths = [stream(index).input_ids.shape[1] for index in range(0, 500, 16)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 40 + 5
    assert lengths[-1] == 160 + 5
    assert set(lengths) == {*range(40 + 5, 160, 16), 160 + 5}
    assert max(len(p.prompt) for p in stream.problems(0)) == 41
    assert max(len(p.prompt) for p in stream.problems(450)) > 150


def test_running_values():
    """After each symbol the label is the value so far; that of brackets is at their end."""
    tokenizer = arithmetic.tokenizer()
    options = {"state_labels": "running", "symbols": 24}
    stream = stream_of([1, 6], seed=2, **options)
    plain = stream_of([1, 6], seed=2, symbols=24)
    for p, ids, labels, others in zip(
        stream.problems(1), stream(1).input_ids, stream(1).labels, plain(1).labels, strict=True
    ):
        at = len(p.prompt) + 2  # of the answer
        assert torch.equal(labels[at:], others[at:])
        assert tokenizer.decode(ids[:at]) == p.prompt + "="
        told = ["" if i == IGNORE else tokenizer.decode([i]) for i in labels[2:at].tolist()]
        assert told == running_values(p.prompt)
        assert labels[:2].tolist() == [IGNORE] * 2


def running_values(prompt):
    """The value after each character, "" where there is none."""
    values, opened = [""], []
    if prompt[0] not in "p%":
        return [""] * len(prompt)
    for place, char in enumerate(prompt[1:], start=1):
        if prompt[0] == "p":
            values.append(right_answer(prompt[: place + 1]))
        elif "(" not in prompt and not re.search(r"[+*-]-|%-", prompt):
            values.append(right_answer(prompt[: place + char.isdigit()]))
        elif char == "(":
            opened.append(place)
            values.append("")
        elif char == ")":
            values.append(right_answer("%" + prompt[opened.pop() : place + 1]))
        elif char.isdigit():
            negative = prompt[place - 1] == "-" and prompt[place - 2] in "(%+-*"
            values.append(right_answer(f"%{'-' * negative}{char}"))
        else:
            values.append("")
    return values


def test_batches_depend_on_seed_and_number_alone():
    stream = stream_of([1, 2, 3, 4], batch_size=300, seed=5)
    later = stream(7)
    [stream(i) for i in range(3)]
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, what is tested is that it is not used
    assert torch.equal(stream(7).input_ids, later.input_ids)
    assert not torch.equal(stream(8).input_ids, later.input_ids)
    other = stream_of([1, 2, 3, 4], batch_size=300, seed=6)
    assert not torch.equal(other(7).input_ids, later.input_ids)
    sent = pickle.loads(pickle.dumps(stream))
    assert torch.equal(sent(7).labels, later.labels)
    assert len(pickle.dumps(stream)) < 5000  # what was drawn stays here


def test_what_is_done_to_a_batch_stays_out_of_the_stream():
    stream = stream_of([2])
    stream(0).input_ids.zero_()
    stream(0).labels.zero_()
    assert stream(0).input_ids.any()
    assert (stream(0).labels == IGNORE).any()


def test_the_same_problems_in_another_process():
    code = (
        "from mamba3.data import arithmetic as a\n"
        "s = a.CurriculumStream(a.STAGES, a.tokenizer(), batch_size=20, seed=3)\n"
        "print([p.prompt for p in s.problems(11)], [p.prompt for p in a.eval_problems(1, 40)])\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    stream = stream_of(EVERY, batch_size=20, seed=3)
    here = [p.prompt for p in stream.problems(11)], [p.prompt for p in eval_problems(1, 40)]
    assert outputs == [f"{here[0]} {here[1]}\n"] * 2


# Measuring


def test_eval_problems_are_distinct_and_even():
    problems = eval_problems(1, 2000)
    assert len({p.prompt for p in problems}) == 2000
    assert {t: sum(p.task == t for p in problems) for t in ("copy", "compare")} == {
        "copy": 500,
        "compare": 500,
    }
    # There are not as many: nearly all that are held out come.
    copies = {p.prompt for p in eval_problems(1, 8000) if p.task == "copy"}
    held_out = {f"c{i}" for i in range(10_000) if is_held_out(f"c{i}")}
    assert copies <= held_out
    assert len(copies) > 0.95 * len(held_out)


def test_eval_problems_of_stage_4_are_even_over_digits():
    problems = eval_problems(4, 2000)
    assert {p.group for p in problems} >= {
        "sum, 7 digits, 3 carries",
        "difference, 10 digits, 0 carries",
    }
    digits = [dict(p.traits)["digits"] for p in problems]
    assert min(digits.count(n) for n in range(2, 11)) > 0.7 * len(digits) / 9
    assert digits.count(1) == 0
    for p in problems[::7]:
        assert dict(p.traits)["carries"] == carries_of(p.prompt)
    mixed = eval_problems(4, 200, sizes=[12, 20])
    assert {dict(p.traits)["digits"] for p in mixed} == {12, 20}
    with pytest.raises(ValueError, match=r"no problem of the task sum at sizes \[1\] is held out"):
        eval_problems(4, 10, sizes=[1])


@pytest.mark.parametrize(
    ("task", "answer", "expected"),
    [
        ("sum", "1123", True),
        ("sum", "", False),
        ("sum", "1-1", False),
        ("sum", "0123", False),
        ("difference", "-833", True),
        ("compare", "<", True),
        ("compare", "<<", False),
        ("product", "282+1410=1692", True),
        ("product", "1692", False),
        ("modular", "5", False),
    ],
)
def test_well_formed(task, answer, expected):
    assert arithmetic.well_formed(Problem(task, "47*36", "0"), answer) is expected


def test_well_formed_as_the_model_writes():
    form = Form(answer_order="lsd_first")
    problem = Problem("difference", "145-978", "338-")
    assert arithmetic.well_formed(problem, "338-", form)
    assert not arithmetic.well_formed(problem, "-338", form)


@pytest.mark.parametrize("stages", [[], [7], [1, 1], ["1"]])
def test_stages_that_do_not_exist(stages):
    with pytest.raises(ValueError, match="stages must be some of"):
        CurriculumStream(stages, arithmetic.tokenizer(), batch_size=1, seed=0)


def test_prompts_are_natural():
    assert all(natural(p.prompt) == p.prompt for p in drawn(EVERY))


def test_skill_rows():
    rows = arithmetic.skill_rows(300)
    assert len({row["prompt"] for row in rows}) == 300
    assert rows == arithmetic.skill_rows(300)
    assert rows != arithmetic.skill_rows(300, seed=1)
    assert [r for r in rows if r["completion"] != "".join(sorted(r["prompt"][1:]))] == []
    arithmetic.tokenizer().encode("".join(row["prompt"] for row in rows))


def test_the_bundled_file_is_what_the_function_makes():
    with open(arithmetic.SKILL_FILE, encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == arithmetic.skill_rows(500)
