"""The study of stage 3: what it runs, what it says, and that it reads what it has run."""

import json
import statistics
import sys
from pathlib import Path

import pytest

from mamba3.train import load_recipe

SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = ["data.batch_size=8", "data.eval_problems=6", "model.d_model=16", "model.n_layer=1"]
SMALL += ["model.headdim=8", "model.d_state=8", "model.d_intermediate=0"]


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import study_stage3

    def go(*arguments):
        monkeypatch.setattr(sys, "argv", ["study_stage3.py", *map(str, arguments)])
        study_stage3.main()

    study_stage3.go = go
    return study_stage3


def test_runs_are_made_once_and_told(study, tmp_path, capsys, monkeypatch):
    command = ["--out", tmp_path, "--steps", 6, "--evals", 3, "--seeds", "4", "--jobs", 2]
    command += ["--lrs", "1e-3,4e-2", "--arms", "adamw", "hybrid", "--set", *SMALL]
    study.go(*command)
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "study.json").read_text())
    runs = {(run["arm"], run["lr"]): run for run in found["runs"]}
    assert set(runs) == {(arm, lr) for arm in ("adamw", "hybrid") for lr in (1e-3, 4e-2)}
    for (arm, lr), run in runs.items():
        folder = tmp_path / "runs" / f"{arm}-{lr:.3g}-4-6"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        evals = [line["eval_loss"] for line in lines if "eval_loss" in line]
        assert len(losses) == 6
        assert run["losses"] == pytest.approx(
            [statistics.fmean(losses[:end]) for end in (1, 3, 4, 6)]
        )
        assert len(evals) == 3
        assert run["eval_loss"] == evals[-1]
        recipe = load_recipe(folder / "recipe.yaml")
        assert (recipe.optim.lr, recipe.train.seed, recipe.data.stages) == (lr, 4, [3])
        assert recipe.optim.name == arm
        assert not list(folder.glob("*.safetensors"))
        assert f"| {arm} | {lr:.3g} | 4 | {run['losses'][0]:.4f} |" in printed
    # Same weights and data, other optimizers: the first loss is one, the last ones are not.
    assert runs["adamw", 4e-2]["losses"][0] == runs["hybrid", 4e-2]["losses"][0]
    assert runs["adamw", 4e-2]["losses"][3] != runs["hybrid", 4e-2]["losses"][3]
    for name in ("sweeps", "optimizers", "arms"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000

    monkeypatch.setattr(study.Pool, "make", None)  # nothing is made again
    study.go(*command)
    again = capsys.readouterr().out
    assert again == printed[printed.index("6 steps of 8") :]
    with pytest.raises(ValueError, match="holds a run with"):
        study.go(*command, "optim.weight_decay=0")


def test_arms_are_recipes_and_results_from_before_are_read(study, tmp_path, capsys, monkeypatch):
    """Of anvil6 and fused as well, whose options were no keys of a recipe then."""
    arms = {"hybrid": 0.25, "anvil6": 0.5, "fused": 0.75}
    for arm, loss in arms.items():
        folder = tmp_path / "runs" / f"{arm}-0.004-0-8"
        folder.mkdir(parents=True)
        result = {
            "settings": ["optim.lr=0.004", "train.seed=0"], "status": "done", "seconds": 2.0,
            "parameters": 5, "losses": [loss] * 4, "eval_loss": loss, "exact_match": 0.5,
            "best_exact_match": 0.5, "steps_to_goal": None,
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "metrics.jsonl").write_text('{"step": 8, "loss": 1.0}\n')
    monkeypatch.setattr(study.Pool, "make", None)  # nothing is made
    study.go("--out", tmp_path, "--quick", "--lrs", "1,1,4e-3", "--arms", *arms)
    printed = capsys.readouterr().out
    for arm, loss in arms.items():
        assert f"| {arm} | 0.004 | 0 | {loss:.4f} |" in printed
        optim = load_recipe(tmp_path / "recipes" / f"{arm}.yaml").optim
        assert (optim.name, optim.preset, optim.split) == (
            "hybrid",
            "anvil6" if arm == "anvil6" else None,
            arm != "fused",
        )


def test_what_a_run_came_to(study, tmp_path):
    lines = [{"step": i, "loss": 100.0 - i} for i in range(1, 201)]
    lines += [{"step": 100 * i, "eval_loss": 1 / i, "exact_match": share}
              for i, share in ((1, 0.96), (2, 0.5))]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert study.summary(tmp_path) == {
        "losses": [74.5, 24.5, -25.5, -75.5],
        "eval_loss": 0.5,
        "exact_match": 0.5,
        "best_exact_match": 0.96,
        "steps_to_goal": 100,
    }
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    assert study.summary(tmp_path)["steps_to_goal"] is None


def test_the_best_has_most_right_and_then_the_least_loss(study):
    runs = [("done", 0.5, 1.0), ("done", 0.9, 0.4), ("done", 0.9, 0.3), ("loss is nan", 0.99, 0.1)]
    results = [dict(zip(("status", "exact_match", "eval_loss"), run, strict=True)) for run in runs]
    assert max(results, key=study.merit) is results[2]
