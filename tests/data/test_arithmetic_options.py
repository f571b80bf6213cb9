import pytest

from mamba3.data.arithmetic import STAGES, CurriculumStream, eval_problems, tokenizer
from mamba3.data.arithmetic_options import ProblemOptions
from mamba3.data.arithmetic_tasks import TASKS

STATE = {"stages": [6], "symbols": 40, "grow_to": 160}


@pytest.mark.parametrize(
    ("prompt", "stages", "reason"),
    [
        ("978+145", [4], None),
        ("978+145", [3], "something to carry"),
        ("918+145", [3], "something to carry"),
        ("911-922", [3], "something to carry"),
        ("312+57", [3], None),
        ("31+57-80", [3], None),
        ("31+57-89", [3], "something to carry"),
        ("31+69-80", [3], "something to carry"),
        ("978+145", [1, 2], "'978\\+145' is no problem of what was trained: copy, reverse"),
        ("3+9", [2], None),
        ("12345678901+1", [4], "a number of 11 digits, trained on up to 10"),
        ("1-12345678901", [4], "a number of 11 digits, trained on up to 10"),
        ("123456789*7", [5], "a number of 9 digits, trained on up to 8"),
        ("12345678*7", [5], None),
        ("47*36", [5], None),
        ("147*36", [5], "is no problem"),
        ("c1234", [1], None),
        ("c12345", [1], "a number of 5 digits, trained on up to 4"),
        ("s9999", [1], "is no problem"),
        ("s999", [1], None),
        ("p0110", [6], None),
        ("p01", [6], "2 symbols, trained on 3 to 160"),
        ("p" + "01" * 81, [6], "162 symbols, trained on 3 to 160"),
        ("%3+4*2", [6], None),
        ("%3+7", [6], "is no problem"),
        ("%((3+4)*2)", [6], None),
        ("%(-3--2)", [6], None),
        ("%((-3)-(2))", [6], None),
        ("%(3+4)*2", [6], "not just a pair of brackets around each operation"),
        ("%((3+4)", [6], "not just a pair of brackets around each operation"),
        ("%((3))", [6], "not just a pair of brackets around each operation"),
        ("hello", list(STAGES), "is no problem"),
        ("", list(STAGES), "is no problem"),
    ],
)
def test_outside(prompt, stages, reason):
    options = ProblemOptions(symbols=40, grow_to=160)
    if reason is None:
        assert options.outside(prompt, stages) is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(options.outside(prompt, stages))


def test_what_is_drawn_is_not_outside():
    options = ProblemOptions(digits=6, symbols=24)
    for stage in STAGES:
        stream = CurriculumStream([stage], tokenizer(), batch_size=2000, seed=0, options=options)
        for p in stream.problems(0) + (eval_problems(stage, 100, options=options) * (stage < 6)):
            assert options.outside(p.prompt, [stage]) is None, p
            others = ProblemOptions(tasks=(p.task,), digits=6, symbols=24)
            assert others.outside(p.prompt, [stage]) is None, p


def test_sizes_of_batches_and_of_measuring():
    options = ProblemOptions(digits=7, symbols=40, grow_to=100, grow_batches=60)
    assert options.sizes(TASKS["sum"]) == (1, 7)
    assert options.sizes(TASKS["times"], 50) == (1, 8)
    assert [options.sizes(TASKS["parity"], batch) for batch in (0, 1, 16, 17, 59, 60, 10**9)] == [
        (3, most) for most in (40, 56, 56, 72, 100, 100, 100)
    ]
    assert options.sizes(TASKS["copy"]) == (0, 0)
    assert list(options.measured_sizes(TASKS["sum"])) == [2, 3, 4, 5, 6, 7]
    assert list(options.measured_sizes(TASKS["brackets"])) == [256]
    assert list(options.measured_sizes(TASKS["chain"])) == []


def test_probabilities():
    assert ProblemOptions().probabilities([2, 3]) == pytest.approx(
        [1 / 7, 1 / 7, 2 / 7, 2 / 7, 1 / 7]
    )
    shares = ProblemOptions(shares=(1, 3)).probabilities([2, 3])
    assert shares == pytest.approx([0.125, 0.125, 0.3, 0.3, 0.15])
    chosen = ProblemOptions(tasks=("chain", "add"), shares=(1, 1)).probabilities([3, 2])
    assert chosen == [0.5, 0.5]


def test_chosen_tasks_are_measured_stage_by_stage():
    options = ProblemOptions(tasks=("copy", "parity"), symbols=10)
    assert {p.task for p in eval_problems(1, 20, options=options)} == {"copy"}
    assert {p.task for p in eval_problems(6, 20, options=options, sizes=[12])} == {"parity"}
    with pytest.raises(ValueError, match=r"no task is left of stages \[2\]"):
        eval_problems(2, 1, options=options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ("copy", "sum", "add")}, "tasks must be some of copy, .*, got 'sum'"),
        ({"tasks": ("copy",)}, r"no task is left of stages \[2\]"),
        ({"shares": (1,)}, r"one for each of stages \[1, 2\], got \[1\]"),
        ({"shares": (1, 0)}, "shares must be positive"),
        ({"digits": 0}, "digits must be at least 1, got 0"),
        ({"symbols": 2}, "symbols must be at least 3, got 2"),
        ({"grow_to": 39}, "grow_to must be at least symbols=40, got 39"),
        ({"grow_batches": 0}, "grow_batches must be at least 1"),
        ({"state_labels": "all"}, "state_labels must be one of answer, running, got 'all'"),
    ],
)
def test_options_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        ProblemOptions(**values).probabilities([1, 2])
