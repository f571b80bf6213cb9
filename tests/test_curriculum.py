"""`mamba3 curriculum`: what starts from what, gates, and going on."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from mamba3 import curriculum, load_model
from mamba3.cli import main
from mamba3.commands.curriculum import _stages
from mamba3.data import arithmetic
from mamba3.eval.exact_match import ExactMatch, exact_match
from mamba3.train import load_recipe

SMALL = ["model.d_model=16", "model.n_layer=1", "model.headdim=8", "model.d_state=8"]
SMALL += ["model.d_intermediate=0", "data.batch_size=8", "data.eval_problems=12", "train.steps=2"]
SMALL += ["optim.decay_steps=null", "train.device=cpu"]


def go(*options, changes=()):
    return main(["curriculum", "--out", "out", *options, "--set", *SMALL, *changes])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps of each of three stages."""
    folder, before = tmp_path_factory.mktemp("curriculum"), Path.cwd()
    os.chdir(folder)
    try:
        assert go("--stages", "1-3", "--go-on") == 0
    finally:
        os.chdir(before)
    return folder / "out"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def out(whole, here):
    """A copy of the three stages."""
    shutil.copytree(whole, here / "out")
    return here / "out"


def told(out):
    return json.loads((out / "curriculum.json").read_text())


def test_each_stage_starts_from_the_best_of_the_last_and_is_measured(whole):
    results = told(whole)
    assert [result["name"] for result in results] == ["digits", "facts", "arithmetic"]
    assert load_recipe(whole / "digits" / "recipe.yaml").train.init_from is None
    for before, after in (("digits", "facts"), ("facts", "arithmetic")):
        recipe = load_recipe(whole / after / "recipe.yaml")
        assert recipe.train.init_from == f"./out/{before}/best"
        assert recipe.model["d_model"] == 16
    model = load_model(whole / "arithmetic" / "best")
    data = load_recipe(whole / "arithmetic" / "recipe.yaml").data
    problems = arithmetic.eval_problems(3, 12, seed=1, options=data.problems)
    expected = exact_match(model, arithmetic.tokenizer(), problems)
    assert results[2]["exact_match"] == expected.overall
    assert results[2]["per_task"] == expected.per_task
    assert (results[2]["n"], results[2]["steps"], results[2]["problems"]) == (12, 2, 16)
    assert results[2]["gates"][0]["wanted"] == 0.999


def test_a_missed_gate_stops_it(here, capsys):
    assert go("--stages", "1-2") == 0
    printed = capsys.readouterr().out
    assert "stage 1 (digits): exact match 0.00 %, gate 99.90 %: MISSED" in printed
    assert "not trained, since a gate was missed: stages 2 (--go-on" in printed
    assert "| 1 digits | 2 | 16 |" in printed
    assert not (here / "out" / "facts").exists()


def test_what_reached_its_gate_is_left_out_and_the_rest_goes_on(whole, out, capsys, monkeypatch):
    results = told(out)
    results[0]["reached"] = True
    (out / "curriculum.json").write_text(json.dumps(results))
    trained = []
    train = curriculum.train

    def spy(recipe, folder, **options):
        trained.append((folder.name, options))
        return train(recipe, folder, **options)

    monkeypatch.setattr(curriculum, "train", spy)
    monkeypatch.setitem(curriculum.GATES, 2, 0.0)  # which anything reaches
    assert go("--stages", "1-3", "--resume", changes=["train.steps=3"]) == 0
    assert trained == [("facts", {"resume": True}), ("arithmetic", {"resume": True})]
    found = told(out)
    assert [result["steps"] for result in found] == [2, 3, 3]
    assert [result["reached"] for result in found] == [True, True, False]
    assert found[2]["seconds"] > results[2]["seconds"]
    assert "stage 2 (facts): exact match 0.00 %, gate 0.00 %: reached" in capsys.readouterr().out


def test_a_run_that_is_there_is_not_replaced(out, capsys):
    weights = (out / "digits" / "model.safetensors").read_bytes()
    assert go("--stages", "1") == 2
    assert "already holds config.json" in capsys.readouterr().err
    assert (out / "digits" / "model.safetensors").read_bytes() == weights


def test_stages_that_have_nothing_to_start_from(here, capsys):
    assert go("--stages", "3-4") == 2
    assert "stage 3 starts from ./out/facts/best, which is not there" in capsys.readouterr().err
    assert go("--stages", "7") == 2
    assert "stages must be some of [1, 2, 3, 4, 5, 6], got [7]" in capsys.readouterr().err


def test_the_best_weights_are_measured_not_the_last(out, monkeypatch):
    model = load_model(out / "facts" / "best")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(out / "facts" / "best")

    class Seen(Exception):
        pass

    def measure(model, *_, **__):
        raise Seen(any(bool(parameter.any()) for parameter in model.parameters()))

    monkeypatch.setattr(curriculum, "measure_stage", measure)
    with pytest.raises(Seen) as seen:
        go("--stages", "2", "--resume")
    assert seen.value.args == (False,)


def exact(overall, scaled=()):
    return ExactMatch(overall, {}, 2000, {}, 0, [], scaled=dict(scaled))


def test_gates():
    assert [gate.reached for gate in curriculum.gates(1, exact(0.999))] == [True]
    [missed] = curriculum.gates(2, exact(1 - 1e-6))
    assert str(missed) == "exact match 99.99 %, gate 100.00 %: MISSED"
    state = curriculum.gates(6, exact(0.9, {"parity": 1.0, "brackets": 0.934}))
    assert list(map(str, state)) == [
        "parity, scaled accuracy 100.00 %, gate 100.00 %: reached",
        "brackets, scaled accuracy 93.40 %, gate 93.50 %: MISSED",
    ]


@pytest.mark.parametrize(
    ("text", "stages"), [("1-5", [1, 2, 3, 4, 5]), ("6", [6]), ("1-3,6", [1, 2, 3, 6])]
)
def test_stages_as_text(text, stages):
    assert _stages(text) == stages


def test_stages_as_text_that_is_none():
    with pytest.raises(ValueError, match="such as 1-3 or 1-3,6, got 'all'"):
        _stages("all")


def test_recipes_are_found_or_said_to_be_missing(tmp_path, monkeypatch):
    root = Path(curriculum.__file__).parents[1] / "configs" / "curriculum"
    monkeypatch.chdir(tmp_path)
    assert curriculum.find_recipes() == root
    shutil.copytree(root, tmp_path / "configs" / "curriculum")
    assert curriculum.find_recipes() == Path("configs/curriculum")
    with pytest.raises(FileNotFoundError, match="no part of an installed package"):
        curriculum.find_recipes(tmp_path)
