"""A run of a model with both kinds of layers."""

from compare import assert_same

from mamba3 import load_model
from mamba3.train import load_recipe, train

CHANGES = {
    "model.layers": ["mamba", "mamba3"],
    "model.mamba": {"d_state": 4, "expand": 1},
    "optim.name": "hybrid",
    "train.steps": 6,
    "train.save_every": 3,
}


def test_a_hybrid_trains_and_resumes_exactly(make_recipe, tmp_path, read_metrics):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(make_recipe(CHANGES), whole, progress=False)
    train(make_recipe(CHANGES | {"train.steps": 3}), halves, progress=False)
    train(make_recipe(CHANGES), halves, resume=True, progress=False)
    assert read_metrics(whole, training=True) == read_metrics(halves, training=True)
    model = load_model(whole)
    assert model.config.kinds == ("mamba", "mamba3")
    assert model.config.mamba.d_state == 4
    assert_same(model.state_dict(), load_model(halves).state_dict())
    recipe = load_recipe(whole / "recipe.yaml")
    assert recipe.architecture(model.config.vocab_size) == model.config
