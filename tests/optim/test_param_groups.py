import pytest
import torch

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.optim.param_groups import param_groups


def model_of(**options):
    sizes = {"vocab_size": 16, "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8}
    return Mamba3LM(Mamba3Config(**sizes | {"d_intermediate": 16} | options))


def decayed_names(model, groups):
    decayed = {id(p) for g in groups if g["weight_decay"] > 0 for p in g["params"]}
    return {n for n, p in model.named_parameters() if id(p) in decayed}


@pytest.mark.parametrize(
    "options",
    [{}, {"is_mimo": True, "is_outproj_norm": True}, {"tie_embeddings": False}],
    ids=["siso", "mimo", "untied"],
)
def test_the_projections_decay_and_nothing_else(options):
    model = model_of(**options)
    groups = param_groups(model, 0.1)
    projections = ("mixer.in_proj", "mixer.out_proj", "mlp.fc1", "mlp.fc2")
    assert decayed_names(model, groups) == {
        f"backbone.layers.{i}.{name}.weight" for i in range(2) for name in projections
    }
    every = [id(p) for group in groups for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_decay_reaches_the_projections_alone():
    model = model_of(is_mimo=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(param_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    decayed = decayed_names(model, optimizer.param_groups)
    assert decayed
    for name, old in before.items():
        torch.testing.assert_close(after[name], old * (0.95 if name in decayed else 1.0))


def test_frozen_parameters_are_left_out():
    model = model_of()
    model.backbone.layers[0].requires_grad_(False)
    every = {id(p) for group in param_groups(model, 0.1) for p in group["params"]}
    assert every == {id(p) for p in model.parameters() if p.requires_grad}
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        param_groups(model, 0.1)
