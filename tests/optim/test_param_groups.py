import pytest
import torch
from torch import nn

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.optim.param_groups import check_groups, param_groups


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


def test_a_tied_weight_marked_under_either_name_is_exempt():
    class Tied(nn.Module):
        def __init__(self, marked):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            self.no_weight_decay_names = lambda: {marked}

    for marked in ("a.weight", "b.weight"):
        [group] = param_groups(Tied(marked), 0.1)
        assert group["weight_decay"] == 0.0


def test_names_that_the_model_does_not_have_are_an_error():
    wrapped = nn.ModuleDict({"module": model_of()})
    wrapped.no_weight_decay_names = wrapped["module"].no_weight_decay_names
    with pytest.raises(ValueError, match=r"backbone\.embedding\.weight.*the model itself"):
        param_groups(wrapped, 0.1)


def test_a_parameter_in_no_group_or_in_two_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": [model[0].weight, model[0].bias, model[1].bias]}]
    groups += [{"params": [model[0].bias]}]
    with pytest.raises(ValueError, match=r"wrong for 0\.bias \(2\), 1\.weight \(0\)"):
        check_groups(model, groups)
