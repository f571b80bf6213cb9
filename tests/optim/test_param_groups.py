"""Which rule trains what: every row once, by layout, allow-list, marks and overrides."""

import pytest
import torch
from torch import nn

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.layers.layout import Rows
from mamba3.optim import ParamGroupEngine, param_groups


def model_of(**options):
    sizes = {"vocab_size": 16, "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8}
    return Mamba3LM(Mamba3Config(**sizes | {"d_intermediate": 16} | options))


def rules(engine):
    return {piece.title: piece.rule for piece in engine.pieces}


def layer(i, *names):
    return {f"backbone.layers.{i}.{name}" for name in names}


MATRICES = [f"mixer.in_proj.weight[{label}]" for label in ("z", "x", "B", "C", "angle")]
MATRICES += ["mixer.out_proj.weight", "mlp.fc1.weight[value]", "mlp.fc1.weight[gate]"]
MATRICES += ["mlp.fc2.weight"]
SCALARS = [f"mixer.in_proj.weight[{label}]" for label in ("dd_dt", "dd_A", "trap")]


@pytest.mark.parametrize(
    "options",
    [{}, {"is_mimo": True, "is_outproj_norm": True, "ngroups": 2}, {"tie_embeddings": False}],
    ids=["siso", "mimo", "untied"],
)
def test_routes_of_a_language_model(options):
    model = model_of(**options)
    engine = ParamGroupEngine(model)
    muon = {piece.title for piece in engine.pieces if piece.rule == "muon"}
    assert muon == layer(0, *MATRICES) | layer(1, *MATRICES)
    decayed = {piece.title for piece in engine.pieces if piece.weight_decay is None}
    assert decayed == muon | layer(0, *SCALARS) | layer(1, *SCALARS)
    # Every row of every parameter, once.
    for name, parameter in model.named_parameters():
        owned = torch.zeros_like(parameter, dtype=torch.int)
        for piece in engine.of(name):
            piece.of(owned).add_(1)
            assert piece.of(parameter).shape == piece.shape
        assert (owned == 1).all(), name
    heads, maps = model.config.n_heads, 8 * model.config.rank * model.config.ngroups
    counts = {piece.label: piece.stop - piece.start for piece in
              engine.of("backbone.layers.0.mixer.in_proj.weight")}  # fmt: skip
    assert counts == {"z": 32, "x": 32, "B": maps, "C": maps, "angle": 2} | dict.fromkeys(
        ("dd_dt", "dd_A", "trap"), heads
    )


def test_blocks_are_the_rows_that_the_layer_reads():
    """Zeroing a block's rows changes what the layer makes of it, and nothing else."""
    mixer = model_of(is_mimo=True, mimo_rank=2).backbone.layers[0].mixer
    u = torch.randn(3, 16)
    names = ("x", "B", "C", "dd_dt", "dd_A", "trap", "angle", "z")
    before = dict(zip(names, project(mixer, u), strict=True))
    for piece in ParamGroupEngine(mixer).of("in_proj.weight"):
        kept = mixer.in_proj.weight.detach().clone()
        with torch.no_grad():
            piece.of(mixer.in_proj.weight).zero_()
            after = dict(zip(names, project(mixer, u), strict=True))
            mixer.in_proj.weight.copy_(kept)
        changed = [name for name in names if not torch.equal(before[name], after[name])]
        assert changed == [piece.label]


def project(mixer, u):
    x, b, c, dt, a, lam, rate, *_, z = mixer._project(u)[0]
    return [t.detach().clone() for t in (x, b, c, dt, a, lam, rate, z)]


def test_any_module_by_the_allow_list():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 6)
            self.attention = nn.MultiheadAttention(6, 2)
            self.uneven = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, bias=False)
            self.conv = nn.Conv1d(6, 6, 3, groups=6)
            self.norm = nn.LayerNorm(6)
            self.matrix = nn.Parameter(torch.randn(6, 6))
            self.lora_A = nn.Parameter(torch.randn(2, 6))
            self.lora_embedding_A = nn.Parameter(torch.randn(6))
            self.lm_head = nn.Linear(6, 9)

    found = rules(ParamGroupEngine(Odd()))
    assert {name for name, rule in found.items() if rule == "muon"} == {
        *(f"attention.in_proj_weight[{label}]" for label in "qkv"),
        *(f"uneven.{label}_proj_weight" for label in "qkv"),
        "attention.out_proj.weight",
        "uneven.out_proj.weight",
        "lora_A",
    }
    assert found["matrix"] == found["lm_head.weight"] == found["table.weight"] == "adamw"


def test_a_head_that_the_model_names_is_no_matrix():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unembed = nn.Linear(4, 4), nn.Linear(4, 9)

        def get_output_embeddings(self):
            return self.unembed

    found = rules(ParamGroupEngine(Named()))
    assert found["body.weight"] == "muon"
    assert found["unembed.weight"] == "adamw"


def test_a_weight_with_two_roles_is_no_matrix_if_one_says_so():
    class Declares(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.own = nn.Linear(4, 4, bias=False)
            self.parameter_layout = lambda: {"own.weight": rows}

    vector, matrix = (Rows(),), (Rows(rule="muon", decay=True),)
    for first, second in ((vector, matrix), (matrix, vector), (matrix, matrix)):
        model = nn.Sequential(Declares(first), Declares(second))
        model[1].own.weight = model[0].own.weight
        [piece] = ParamGroupEngine(model).pieces
        assert piece.rule == ("muon" if first == second else "adamw")
    tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert rules(ParamGroupEngine(tied)) == {"0.weight": "adamw"}
    for name in ("0.weight", "1.weight"):  # by either of its names
        [piece] = ParamGroupEngine(tied, {name: {"rule": "muon", "lr_mul": 2}}).pieces
        assert (piece.rule, piece.lr_mul) == ("muon", 2)


def test_lora_around_a_fused_projection():
    """The base weight is frozen and its layout of no use; the adapters are matrices."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base.requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
            self.out_features = base.out_features

        @property
        def weight(self):
            return self.base_layer.weight

        def forward(self, x):
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    model = model_of()
    for block in model.backbone.layers:
        block.mixer.in_proj = Adapted(block.mixer.in_proj)
    engine = ParamGroupEngine(model)
    name = "backbone.layers.0.mixer.in_proj."
    assert rules(engine)[f"{name}lora_A.default.weight"] == "muon"
    assert rules(engine)[f"{name}lora_B.default.weight"] == "muon"
    assert f"{name}base_layer.weight" in engine.frozen
    model.backbone.layers[0].mixer.in_proj.base_layer.requires_grad_(True)
    assert len(ParamGroupEngine(model).of(f"{name}base_layer.weight")) == 8


def test_overrides_and_marks():
    model = model_of()
    layers = model.backbone.layers
    layers[0].mixer.out_proj.weight._no_weight_decay = True
    layers[1].mixer.out_proj.weight._optim = {"rule": "adamw", "lr_mul": 0.1}
    engine = ParamGroupEngine(
        model,
        {
            "*[angle]": "adamw",
            "*.1.*.in_proj.weight": {"weight_decay": 0.3},
            "*layers.1*[angle]": {"rule": "muon", "weight_decay": None},
        },
    )
    found = {piece.title: piece for piece in engine.pieces}

    def facts(name):
        piece = found[f"backbone.layers.{name}"]
        return piece.rule, piece.weight_decay, piece.lr_mul

    assert facts("0.mixer.in_proj.weight[angle]") == ("adamw", None, 1.0)
    assert facts("1.mixer.in_proj.weight[angle]") == ("muon", None, 1.0)
    assert facts("1.mixer.in_proj.weight[x]") == ("muon", 0.3, 1.0)
    assert facts("1.mixer.in_proj.weight[trap]") == ("adamw", 0.3, 1.0)
    assert facts("0.mixer.in_proj.weight[x]") == ("muon", None, 1.0)
    assert facts("0.mixer.out_proj.weight") == ("muon", 0.0, 1.0)
    assert facts("1.mixer.out_proj.weight") == ("adamw", None, 0.1)
    assert "override *[angle]" in engine.plan()


def test_the_plan_names_everything():
    model = model_of()
    model.backbone.layers[0].mlp.requires_grad_(False)
    plan = ParamGroupEngine(model).plan().splitlines()
    assert plan[0].split()[:3] == ["parameter", "shape", "rule"]
    row = next(line for line in plan if line.startswith("backbone.layers.1.mixer.in_proj.weight[B"))
    assert row.split()[1:5] == ["8x16", "muon", "yes", "1"]
    frozen = [line.split()[0] for line in plan if " frozen " in f"{line} " and "," not in line]
    assert frozen == [f"backbone.layers.0.mlp.fc{i}.weight" for i in (1, 2)]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    muon, adamw = (int(plan[-1].split()[i].replace(",", "")) for i in (1, 4))
    assert muon + adamw == trainable


def test_whole_parameters_on_request():
    engine = ParamGroupEngine(model_of(), split=False)
    assert {piece.label for piece in engine.pieces} == {""}
    assert rules(engine)["backbone.layers.0.mixer.in_proj.weight"] == "muon"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"*.in_porj*": "adamw"}, r"'\*.in_porj\*' matches no trainable parameter; .*in_proj"),
        ({"*": "sgd"}, r"asks for the rule 'sgd', expected one of \('muon', 'adamw'\)"),
        ({"*": {"decay": 0.1}}, r"sets 'decay'; the nearest that there is: 'weight_decay'"),
        ({"*": {"lr_mul": -1}}, r"lr_mul must be at least 0, got -1"),
        ({"*.D": "muon"}, r"layers.0.mixer.D has shape \(4,\), and the rule 'muon'"),
        ({"*B_bias": "muon"}, r"B_bias has shape \(4, 1, 8\), and the rule 'muon'"),
    ],
)
def test_override_errors(overrides, message):
    with pytest.raises(ValueError, match=message):
        ParamGroupEngine(model_of(), overrides)


def test_layouts_that_do_not_fit_are_errors():
    class Wrong(nn.Module):
        def __init__(self, layout):
            super().__init__()
            self.proj = nn.Linear(4, 6, bias=False)
            self.parameter_layout = lambda: layout

    for layout, message in (
        ({"proj.weight": (Rows("a", 3, "muon"), Rows("b", 2))}, "gives proj.weight 5 rows, .* 6"),
        ({"proj.weight": (Rows("a", 3), Rows("a", 3))}, "names a block of proj.weight twice"),
        ({"prj.weight": (Rows(),)}, "Wrong names prj.weight, which it does not have"),
    ):
        with pytest.raises(ValueError, match=message):
            ParamGroupEngine(Wrong(layout))
    with pytest.raises(ValueError, match="nothing to train"):
        ParamGroupEngine(nn.Linear(2, 2).requires_grad_(False))


# groups for torch's optimizers


def decayed_names(model, groups):
    decayed = {id(p) for g in groups if g["weight_decay"] > 0 for p in g["params"]}
    return {n for n, p in model.named_parameters() if id(p) in decayed}


def test_decay_reaches_the_projections_alone():
    model = model_of(is_mimo=True, is_outproj_norm=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(param_groups(model, 0.5), lr=0.1)
    projections = ("mixer.in_proj", "mixer.out_proj", "mlp.fc1", "mlp.fc2")
    decayed = decayed_names(model, optimizer.param_groups)
    assert decayed == {f"backbone.layers.{i}.{n}.weight" for i in range(2) for n in projections}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name] * (0.95 if name in decayed else 1.0))


def test_groups_hold_every_trainable_parameter_once():
    model = model_of()
    model.backbone.layers[0].requires_grad_(False)
    model.backbone.embedding.weight._optim = {"weight_decay": 0.25}
    groups = param_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.25, 0.0]
    every = [id(p) for group in groups for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters() if p.requires_grad)
