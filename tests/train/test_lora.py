"""Adapters are what is trained, and the saved model computes what the trained one did."""

import json
import sys

import pytest
import torch
from compare import DEVICE, assert_close, randomise
from safetensors.torch import load_file

from mamba3 import Mamba3Config, Mamba3LM, load_model
from mamba3.train import finetune, train
from mamba3.train.checkpoint import Checkpoints
from mamba3.train.lora import TARGETS, add_adapters, merged
from mamba3.train.tensor_files import read_tensors

SIZES = {"vocab_size": 21, "d_model": 16, "n_layer": 2, "d_state": 6, "headdim": 8}


@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_model_computes_the_same(tied):
    """Of both kinds of layers."""
    config = Mamba3Config(
        **SIZES,
        layers=["mamba3", "mamba"],
        d_intermediate=12,
        is_mimo=True,
        tie_embeddings=tied,
    )
    model = randomise(Mamba3LM(config, device=DEVICE), scale=0.3)
    ids = torch.randint(21, (2, 9), device=DEVICE)
    base = model(ids).logits
    add_adapters(model, 3, 5.0)
    assert_close({"logits": model(ids).logits}, {"logits": base}, 0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * (len(TARGETS) + len(TARGETS) - len({"x_proj", "dt_proj"}))
    assert all(".lora_" in name for name in trained)
    randomise(model, scale=0.3)
    wanted = model(ids).logits
    plain = merged(model)
    assert type(plain) is Mamba3LM
    assert plain.state_dict().keys() == Mamba3LM(config, device="meta").state_dict().keys()
    assert (plain.lm_head.weight is plain.backbone.embedding.weight) == tied
    assert_close({"logits": plain(ids).logits}, {"logits": wanted}, 1e-5)
    assert (plain(ids).logits - base).norm() > 0.01 * base.norm()
    assert merged(plain) is plain


def test_a_merge_that_goes_wrong_is_refused(monkeypatch):
    model = randomise(Mamba3LM(Mamba3Config(**SIZES), device=DEVICE), scale=0.3)
    add_adapters(model, 3, 5.0)
    randomise(model, scale=0.3)
    own = type(model.backbone.layers[0].mixer.in_proj)
    monkeypatch.setattr(own, "get_delta_weight", lambda self, adapter: 0.1 * self.weight)
    with pytest.raises(RuntimeError, match="changed the logits by"):
        merged(model)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    pairs = [(a, b) for a in range(9) for b in range(5)]
    rows = [{"prompt": f"{a}+{b}", "completion": str(a + b + 1)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_fine_tune_trains_adapters_alone(rows, tmp_path):
    out = tmp_path / "out"
    options = {"lora_rank": 2, "steps": 6, "batch_size": 8, "progress": False}
    result = finetune("arithmetic-tiny", rows, out, **options)
    base, tuned = (load_model(which).state_dict() for which in ("arithmetic-tiny", out))
    changed = {name for name in base if not torch.equal(base[name], tuned[name].to(base[name]))}
    assert changed
    assert {name.split(".")[-2] for name in changed} == set(TARGETS) - {"x_proj", "dt_proj"}
    for name in changed:  # by something of rank 2
        difference = tuned[name].double() - base[name].double()
        values = torch.linalg.svdvals(difference)
        assert values[2] < 1e-5 * values[0]
    assert result.steps == 6
    # The state holds the adapters, too.
    names = read_tensors(Checkpoints(out).load().folder)
    assert sum(".lora_" in name and name.startswith("model.") for name in names) == 2 * 2 * 4


def test_10_and_10_steps_of_adapters_are_20(make_recipe, rows, tmp_path, read_metrics):
    values = make_recipe({"train.init_from": "arithmetic-tiny", "train.lora_rank": 2}).to_dict()
    values |= {"model": None, "data": {"kind": "rows", "path": str(rows), "batch_size": 8}}
    recipe = type(make_recipe()).from_dict
    train(recipe(values), tmp_path / "whole", progress=False)
    shorter = values | {"train": values["train"] | {"steps": 10}}
    train(recipe(shorter), tmp_path / "halves", progress=False)
    train(recipe(values), tmp_path / "halves", resume=True, progress=False)
    lines = [read_metrics(tmp_path / out, training=True) for out in ("halves", "whole")]
    assert lines[0] == lines[1]
    weights = [load_file(tmp_path / out / "model.safetensors") for out in ("halves", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_does_not_go_together_is_said(make_recipe, monkeypatch):
    message = r"lora_rank needs step\.parallel ddp or allreduce, got fsdp"
    with pytest.raises(ValueError, match=message):
        make_recipe({"train.lora_rank": 2, "step.parallel": "fsdp"})
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RuntimeError, match=r"need peft, which is not installed .*mamba3\[lora\]"):
        add_adapters(Mamba3LM(Mamba3Config(**SIZES)), 2, 4)
