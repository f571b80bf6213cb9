import json
import random
import re
import subprocess
import sys

import pytest

from mamba3.data import arithmetic
from mamba3.data.arithmetic import CurriculumStream, eval_problems, is_held_out
from mamba3.data.problems import Problem


def right_answer(prompt: str) -> str:
    """Worked out from the prompt alone, another way than the generators do."""
    if prompt[0] == "c":
        return prompt[1:]
    if prompt[0] == "r":
        return "".join(prompt[i] for i in range(len(prompt) - 1, 0, -1))
    if prompt[0] == "s":
        return str(int(prompt[1:]) + 1)
    if "?" in prompt:
        a, b = map(int, prompt.split("?"))
        return {-1: "<", 0: "=", 1: ">"}[(a > b) - (a < b)]
    return str(eval(prompt))


def drawn(stages, n_batches=60, seed=0):
    stream = CurriculumStream(stages, arithmetic.tokenizer(), batch_size=100, seed=seed)
    return [p for i in range(n_batches) for p in stream.problems(i)]


def test_answers_are_right():
    problems = drawn([1, 2, 3]) + [p for stage in (1, 2, 3) for p in eval_problems(stage, 400)]
    wrong = [p for p in problems if p.answer != right_answer(p.prompt)]
    assert wrong == []


def test_stage_1_covers_its_cases():
    problems = drawn([1])
    digits = [len(p.prompt) - 1 for p in problems if p.task == "copy"]
    assert {n: round(digits.count(n) / len(digits), 1) for n in set(digits)} == pytest.approx(
        {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}, abs=0.06
    )
    signs = [p.answer for p in problems if p.task == "compare"]
    assert min(signs.count(s) / len(signs) for s in "<>=") > 0.1
    successors = [p.prompt for p in problems if p.task == "successor"]
    assert sum(p.endswith("99") for p in successors) / len(successors) > 0.1
    assert {p.task for p in problems} == {"copy", "reverse", "successor", "compare"}


def test_no_held_out_problem_is_ever_drawn():
    held_out = {p.prompt for stage in (1, 3) for p in eval_problems(stage, 2000)}
    for seed in range(3):
        assert held_out.isdisjoint(p.prompt for p in drawn([1, 2, 3], seed=seed))
    # A different draw of the held-out problems comes from the same set.
    assert all(is_held_out(p) for p in eval_problems(1, 2000, seed=1))


def test_eval_problems_are_distinct_and_even():
    problems = eval_problems(1, 2000)
    assert len({p.prompt for p in problems}) == 2000
    assert {t: sum(p.task == t for p in problems) for t in ("copy", "compare")} == {
        "copy": 500,
        "compare": 500,
    }
    with pytest.raises(ValueError, match="ask for fewer than 8000"):
        eval_problems(1, 8000)


def test_a_tenth_is_held_out():
    share = sum(is_held_out(Problem("copy", f"c{i}", str(i))) for i in range(10_000)) / 10_000
    assert share == pytest.approx(0.1, abs=0.01)


def test_stage_2_is_a_table_of_200_facts_all_trained_on():
    facts = {p.prompt: p.answer for p in eval_problems(2, 1)}
    assert len(facts) == 200
    assert (facts["9+9"], facts["3-9"], facts["7-7"]) == ("18", "-6", "0")
    assert {p.prompt for p in drawn([2])} == set(facts)


def test_batches_depend_on_seed_and_number_alone():
    stream = CurriculumStream([1, 2], arithmetic.tokenizer(), batch_size=8, seed=5)
    later = stream.problems(7)
    [stream.problems(i) for i in range(3)]
    random.seed(0)
    assert stream.problems(7) == later
    assert stream.problems(8) != later
    other = CurriculumStream([1, 2], arithmetic.tokenizer(), batch_size=8, seed=6)
    assert other.problems(7) != later


def test_the_same_problems_in_another_process():
    code = (
        "from mamba3.data import arithmetic as a\n"
        "s = a.CurriculumStream([1, 2], a.tokenizer(), batch_size=20, seed=3)\n"
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
    stream = CurriculumStream([1, 2], arithmetic.tokenizer(), batch_size=20, seed=3)
    here = [p.prompt for p in stream.problems(11)], [p.prompt for p in eval_problems(1, 40)]
    assert outputs == [f"{here[0]} {here[1]}\n"] * 2


def test_the_draws_are_pinned():
    # A change of these changes what "held out" means for every model trained before.
    assert [is_held_out(Problem("copy", f"c{i}", str(i))) for i in range(5, 10)] == [
        False,
        True,
        False,
        False,
        True,
    ]
    stream = CurriculumStream([1, 2], arithmetic.tokenizer(), batch_size=4, seed=0)
    assert [p.prompt for p in stream.problems(0)] == ["s9", "s9", "877?879", "947?938"]
    stream = CurriculumStream([3], arithmetic.tokenizer(), batch_size=4, seed=0)
    assert [p.prompt for p in stream.problems(0)] == ["65+11", "480+101", "603+60", "21+77-84"]


def test_stage_3_has_nothing_to_carry_and_ten_thousand_problems():
    tasks = arithmetic.training_set(3)
    assert {task: len(those) for task, those in tasks.items()} == {
        "plus": 4000, "minus": 4000, "chain": 2000,
    }  # fmt: skip
    every = [p for those in tasks.values() for p in those]
    assert len({p.prompt for p in every}) == 10_000
    for problem in every + eval_problems(3, 300):
        total, *rest = (int(n) for n in re.findall(r"\d+", problem.prompt))
        assert {len(str(n)) for n in (total, *rest)} <= {2, 3}
        for sign, n in zip(re.findall(r"[+-]", problem.prompt), rest, strict=True):
            for a, b in zip(f"{total:03}", f"{n:03}", strict=True):
                assert int(a) + int(b) <= 9 if sign == "+" else int(a) >= int(b)
            total = total + n if sign == "+" else total - n
    assert {p.prompt for p in drawn([3])} <= {p.prompt for p in every}


@pytest.mark.parametrize("stages", [[], [4], [1, 1], ["1"]])
def test_stages_that_do_not_exist(stages):
    with pytest.raises(ValueError, match="stages must be some of"):
        CurriculumStream(stages, arithmetic.tokenizer(), batch_size=1, seed=0)


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
