"""`mamba3 solve`: what models read and say, whatever form is inside."""

import json

import pytest

from mamba3 import Mamba3Config, Mamba3LM, load_model, load_tokenizer
from mamba3 import solve as solving
from mamba3.cli import main
from mamba3.data import arithmetic
from mamba3.generate_text import Completion, generate_text
from mamba3.solve import Skill, choose, solve

CARRY = "{stages: [2, 4], answer_order: lsd_first, operands: interleaved, digits: 6}"
PRODUCTS = "{stages: [5], answer_order: lsd_first, operands: reversed}"
STATE = "{stages: [6], symbols: 9}"
# What models of these read, and what is right to write.
WRITTEN = {
    "+857491": "3211",
    "-580709": "379-",
    "+7101": "81",
    "-89": "1-",
    "74*63": "282+0141=2961",
    "p011": "0",
}


def save(folder, data):
    config = Mamba3Config(vocab_size=32, d_model=8, n_layer=1, d_state=4, headdim=8)
    Mamba3LM(config).save_pretrained(folder, tokenizer=arithmetic.tokenizer())
    (folder / "recipe.yaml").write_text(
        f"model: {{d_model: 8, n_layer: 1, headdim: 8}}\ndata: {data}\n"
        "optim: {lr: 1e-3}\ntrain: {steps: 1}\n"
    )
    return str(folder)


@pytest.fixture
def skills(tmp_path):
    datas = {"carry": CARRY, "products": PRODUCTS, "state": STATE}
    return [Skill.of(save(tmp_path / name, data)) for name, data in datas.items()]


@pytest.fixture
def oracle(monkeypatch):
    """Models are right about what they are known to read; returns what they were given."""
    seen = []

    def right(model, tokenizer, prompts, **options):
        for ids in prompts:
            prompt = tokenizer.decode(ids).removesuffix("=")
            seen.append(prompt)
            answer = WRITTEN.get(prompt, "")
            assert len(answer) < options["max_new_tokens"]
            yield Completion(answer, "eos" if answer else "length", [])

    monkeypatch.setattr(solving, "completions", right)
    return seen


def test_a_file_is_answered_line_by_line_in_natural_form(oracle, skills, tmp_path, capsys):
    (tmp_path / "f.txt").write_text("978+145\n\n5 - 978 =\n007+11\n8-9\n")
    command = ["solve", "--model", str(skills[0].folder), "--file", str(tmp_path / "f.txt")]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.out == "1123\n-973\n18\n-1\n"
    assert printed.err == ""
    assert oracle == ["-89", "+7101", "+857491", "-580709"]  # by length


def test_blanks_are_a_part_of_the_answer(monkeypatch, tmp_path, capsys):
    """A model that writes 7 into every blank, and then a sign."""
    folder = save(tmp_path / "columns", CARRY.replace("interleaved", "columns"))
    seven, sign = arithmetic.tokenizer().encode("7-")

    def fill(model, rows, blanks, batch_size):
        told = zip(rows, blanks, strict=True)
        return [[seven if i in at else t for i, t in enumerate(row)] for row, at in told]

    def completions(model, tokenizer, prompts, **options):
        assert [tokenizer.decode(ids) for ids in prompts] == ["+987=", "-014598,017457987="]
        return [Completion("", "eos", []), Completion("-", "eos", [sign])]

    monkeypatch.setattr(solving, "fill", fill)
    monkeypatch.setattr(solving, "completions", completions)
    assert main(["solve", "--model", folder, "940-851", "9+8"]) == 0
    assert capsys.readouterr().out == "-777\n7\n"


def test_brackets_are_worked_out_on_the_way(monkeypatch, tmp_path, capsys):
    folder = save(tmp_path / "nested", "{stages: [6], tasks: [brackets], brackets: working}")
    encode = arithmetic.tokenizer().encode

    def fill(model, rows, blanks, batch_size):
        assert blanks == [[], [8, 9, 10, 14, 15, 16]]
        written = dict(zip(blanks[1], encode("3+22*4"), strict=True))
        return [rows[0], [written.get(i, t) for i, t in enumerate(rows[1])]]

    def completions(model, tokenizer, prompts, **options):
        assert [tokenizer.decode(ids) for ids in prompts] == ["%-1=", "%((3+4)3+2*2)2*4="]
        return [Completion("4", "eos", encode("4"))] * 2

    monkeypatch.setattr(solving, "fill", fill)
    monkeypatch.setattr(solving, "completions", completions)
    assert main(["solve", "--model", folder, "((3+4)*2) % 5", "%-1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "4\n4\n"
    assert "2 symbols, trained on 3 to 40" in printed.err


def test_json_has_the_working(oracle, skills, capsys):
    assert main(["solve", "--model", str(skills[1].folder), "--json", "47*36"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "problem": "47*36",
        "answer": "1692",
        "written": "282+1410=1692",
        "model": "products",
        "outside": None,
        "ended": True,
    }


def test_what_was_not_trained_is_answered_and_said(oracle, skills, capsys):
    folder = str(skills[0].folder)
    long = "1" * 40 + "+1"
    assert main(["solve", "--model", folder, long, "1" * 40 + "+2", "978+145", "p011"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "\n\n1123\n0\n"
    lines = printed.err.splitlines()
    assert all(line.startswith("mamba3: warning: ") for line in lines)
    told = [line.removeprefix("mamba3: warning: ") for line in lines]
    start = "1" * 37 + "... and 1 more: "
    assert told == [
        f"{start}a number of 40 digits, trained on up to 6; carry may be wrong",
        f"{start}the answer does not end; carry may be wrong",
        "p011: 'p011' is no problem of what was trained: add, subtract, sum, difference; carry may "
        "be wrong",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{carry}", "8/2"], "carry cannot read the problem '8/2': character '/' at"),
        (["--model", "{carry}", "="], "the problem '=': it is empty. It was trained on add, sub"),
        (["--model", "{carry}", "1_+2"], "cannot read the problem '1_+2': character '_' at"),
        (["--model", "{tmp}", "1+1"], "has no recipe.yaml"),
        (["--model", "no-such", "1+1"], "'no-such' is neither"),
        (["--file", "{tmp}/empty"], "holds no problem"),
        ([], "give problems or --file, one of them"),
        (["1+1", "--file", "{tmp}/empty"], "give problems or --file, one of them"),
    ],
)
def test_errors(skills, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").write_text("\n")
    values = {"carry": skills[0].folder, "tmp": tmp_path}
    assert main(["solve", *(text.format(**values) for text in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_a_model_of_something_else_is_refused(tmp_path):
    folder = save(tmp_path / "m", "{kind: tokens, path: x.bin, length: 8}")
    with pytest.raises(ValueError, match="not trained on the curriculum, but tokens"):
        Skill.of(folder)
    (tmp_path / "m" / "recipe.yaml").unlink()
    with pytest.raises(ValueError, match="has no recipe"):
        Skill.of(folder)


def test_the_best_of_a_run_has_the_recipe_of_the_run(tmp_path):
    save(tmp_path / "run", CARRY)
    save(tmp_path / "run" / "best", CARRY)
    (tmp_path / "run" / "best" / "recipe.yaml").unlink()
    skill = Skill.of(tmp_path / "run" / "best")
    assert skill.data.operands == "interleaved"
    assert skill.name == "run"


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        ("978+145", "carry"),
        ("7*123", "products"),
        ("p0110", "state"),
        ("(3+4)%5", "state"),
        ("p" + "01" * 90, "state"),
        ("9" * 90 + "-1", "carry"),
        ("1" * 20 + "*3", "products"),
        ("c12", "products"),  # all can read it, none was trained on it
    ],
)
def test_who_answers(skills, problem, name):
    assert choose(problem, skills).name == name


def test_the_model_that_ships_answers_as_it_generates(capsys):
    problems = ["8+7", "s1299", "3-9", "57?64", "r120"]
    model, tokenizer = load_model("arithmetic-tiny"), load_tokenizer("arithmetic-tiny")
    expected = generate_text(model, tokenizer, problems, max_new_tokens=8)
    assert expected == ["15", "1300", "-6", "<", "021"]
    assert main(["solve", *problems]) == 0
    assert capsys.readouterr().out.split() == expected
    assert [answer.answer for answer in solve(problems, "arithmetic-tiny")] == expected
