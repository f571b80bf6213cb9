import json
from pathlib import Path

import pytest

from mamba3.train import Recipe


@pytest.fixture
def make_recipe():
    """Builds the smallest recipe, with changes such as {"train.steps": 3}."""

    def make(changes=None):
        values = {
            "model": {"d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8},
            "data": {"stages": [1, 2], "batch_size": 8, "eval_problems": 8, "workers": 0},
            "optim": {"lr": 0.01, "warmup_steps": 3, "decay_steps": 20},
            "step": {},
            "train": {"steps": 20, "save_every": 5, "device": "cpu"},
        }
        for key, value in (changes or {}).items():
            group, _, name = key.partition(".")
            values[group][name] = value
        return Recipe.from_dict(values)

    return make


@pytest.fixture
def read_metrics():
    """Lines of a metrics file; `training=True` keeps the training lines, without their times."""

    def read(out, training=False):
        lines = [
            json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().split("\n")[:-1]
        ]
        if training:
            lines = [line for line in lines if "loss" in line]
            for line in lines:
                del line["tokens_per_s"], line["data_wait_s"]
        return lines

    return read
