"""What a run says before its first step."""

from mamba3 import Mamba3LM
from mamba3.train import train
from mamba3.train.loop import make_step
from mamba3.train.panel import start_panel
from mamba3.train.parallel import Ranks
from mamba3.train.tasks import task_of


def test_the_panel_says_what_is_done(make_recipe):
    recipe = make_recipe(
        {
            "model.is_mimo": True,
            "model.layers": ["mamba", "mamba3"],
            "optim.name": "hybrid",
            "step.accumulate": 3,
            "step.recompute": "full",
            "step.precision": "bf16",
        }
    )
    model = Mamba3LM(recipe.architecture(32))
    step = make_step(model, recipe.optim, recipe.step)
    step.ranks = Ranks(1, 2)
    lines = start_panel(recipe, task_of(recipe), step, start=5).splitlines()
    panel = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    total = sum(p.numel() for p in model.parameters())
    form = "hybrid of 1 Mamba-1 and 1 MIMO of rank 4"
    assert panel["model"] == f"{form}, 2 layers of width 16, {total:,} parameters"
    assert panel["data"] == "stages [1, 2], 8 problems a step, 2 ranks (ddp), 3 parts each"
    assert panel["steps"] == "6 to 20, bf16, full recomputation"
    matrices = sum(p.numel for p in step.optimizer.engine.pieces if p.rule == "muon")
    split = f"{matrices:,} parameters by Muon, {total - matrices:,} by AdamW"
    assert panel["optimizer"] == f"Muon and AdamW: {split}; lr 0.01, decay 0.1"
    assert panel["device"].startswith("cpu; ")


def test_it_goes_to_standard_error_if_progress_is_wanted(make_recipe, tmp_path, capsys):
    train(make_recipe({"train.steps": 1}), tmp_path / "quiet", progress=False)
    assert capsys.readouterr() == ("", "")
    train(make_recipe({"train.steps": 1}), tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == ""
    assert "optimizer  AdamW; lr 0.01" in err
