from pathlib import Path

import pytest

from mamba3.train import load_recipe, train

CONFIGS = Path(__file__).parents[2] / "configs"
SHORTER = ["train.steps=2", "data.eval_problems=8", "data.batch_size=8"]


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONFIGS))
)
def test_a_config_runs(path, tmp_path, read_metrics):
    result = train(load_recipe(path, SHORTER), tmp_path / "run", progress=False)
    assert [line["step"] for line in read_metrics(tmp_path / "run", training=True)] == [1, 2]
    assert result.steps == 2


def test_debug_is_quick(tmp_path):
    recipe = load_recipe(CONFIGS / "debug.yaml")
    result = train(recipe, tmp_path / "run", progress=False)
    assert result.seconds < 30
    assert result.loss < 2.5  # that of guessing among 32 tokens is 3.5
