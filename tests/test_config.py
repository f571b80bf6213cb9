"""The config: both forms, strictness, and the sizes that follow from it."""

import dataclasses
import json
from pathlib import Path

import pytest

from mamba3.config import Mamba3Config, MambaSizes
from mamba3.fields import coerce, from_mapping
from mamba3.models.lm import Mamba3LM
from mamba3.zoo import MODELS

GOLDENS = Path(__file__).parent / "assets" / "goldens"

# name: d_model, n_layer, d_intermediate, R (0: SISO), MLP width, in_proj rows
OFFICIAL = {
    "siso-187m": (768, 12, 1536, 0, 1536, 3432),
    "siso-443m": (1024, 24, 2048, 0, 2048, 4480),
    "siso-893m": (1536, 24, 3072, 0, 3072, 6576),
    "siso-1.5b": (2048, 24, 4096, 0, 4096, 8672),
    "mimo-187m": (768, 12, 1264, 4, 1280, 4200),
    "mimo-444m": (1024, 24, 1792, 4, 1792, 5248),
    "mimo-894m": (1536, 24, 2800, 4, 2816, 7344),
    "mimo-1.5b": (2048, 24, 3824, 4, 3840, 9440),
}


def official(d_model=64, n_layer=2, d_intermediate=0, rank=0, **ssm):
    """An official config.json with every key that the released ones have."""
    return {
        "d_model": d_model,
        "d_intermediate": d_intermediate,
        "n_layer": n_layer,
        "vocab_size": 128256,
        "ssm_cfg": {
            "layer": "Mamba3",
            "d_state": 128,
            "expand": 2,
            "headdim": 64,
            "ngroups": 1,
            "rope_fraction": 0.5,
            "dt_min": 0.001,
            "dt_max": 0.1,
            "dt_init_floor": 0.0001,
            "A_floor": 0.0001,
            "chunk_size": 16 if rank else 64,
            "is_mimo": bool(rank),
            "mimo_rank": rank or 4,
            "is_outproj_norm": False,
            **ssm,
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }


def read(data, a_activation="heavy_tail"):
    return Mamba3Config.from_dict(data, a_activation=a_activation)


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_sizes(name):
    d_model, n_layer, d_intermediate, rank, mlp_width, in_proj_rows = OFFICIAL[name]
    config = read(official(d_model, n_layer, d_intermediate, rank))
    model = Mamba3LM(config, device="meta")
    weights = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    last = f"backbone.layers.{n_layer - 1}."
    assert f"backbone.layers.{n_layer}.norm.weight" not in weights
    assert weights[last + "mixer.in_proj.weight"] == (in_proj_rows, d_model)
    assert weights[last + "mlp.fc1.weight"] == (2 * mlp_width, d_model)
    assert weights[last + "mlp.fc2.weight"] == (d_model, mlp_width)
    assert weights["backbone.embedding.weight"] == (128256, d_model)

    # The names give the parameters to a last digit that is rounded in some, cut in others.
    size = name.split("-")[1]
    unit = {"m": 1e6, "b": 1e9}[size[-1]]
    last_digit = unit / 10 ** len(size[:-1].partition(".")[2])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert abs(parameters - float(size[:-1]) * unit) < last_digit


def test_official_fields():
    data = official(96, 3, 100, 2, headdim=32, ngroups=3, rope_fraction=1.0, d_state=48)
    data["ssm_cfg"] |= {"dt_min": 0.002, "dt_max": 0.7, "dt_init_floor": 0.003, "A_floor": 0.004}
    data["ssm_cfg"]["is_outproj_norm"] = True
    data |= {"tie_embeddings": False, "residual_in_fp32": False, "pad_vocab_size_multiple": 100}
    assert read(data, "softplus") == Mamba3Config(
        vocab_size=128256,
        d_model=96,
        n_layer=3,
        d_intermediate=100,
        d_state=48,
        headdim=32,
        ngroups=3,
        is_mimo=True,
        mimo_rank=2,
        rope_fraction=1.0,
        is_outproj_norm=True,
        a_activation="softplus",
        a_floor=0.004,
        dt_min=0.002,
        dt_max=0.7,
        dt_init_floor=0.003,
        residual_in_fp32=False,
        tie_embeddings=False,
        pad_vocab_size_multiple=100,
    )


def test_official_absent_padding_means_eight():
    data = official() | {"vocab_size": 50277}
    del data["pad_vocab_size_multiple"]
    assert read(data).padded_vocab_size == 50280


def test_a_activation_is_asked_for_and_overridden():
    with pytest.warns(UserWarning, match="heavy_tail.*softplus"):
        assert Mamba3Config.from_dict(official()).a_activation == "heavy_tail"
    assert read(official(), "softplus").a_activation == "softplus"
    assert Mamba3Config.from_dict(official(a_activation="softplus")).a_activation == "softplus"
    at_top = official() | {"a_activation": "softplus"}
    assert Mamba3Config.from_dict(at_top).a_activation == "softplus"
    assert read(at_top).a_activation == "heavy_tail"
    own = Mamba3Config(vocab_size=9, d_model=32, n_layer=1).to_dict()
    assert read(own, "softplus").a_activation == "softplus"


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDENS.iterdir()))
def test_round_trip(case):
    config = read(json.loads((GOLDENS / case / "config.json").read_text()))
    assert Mamba3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    other = dataclasses.replace(config, a_activation="softplus", dt_max=0.3, norm_eps=3e-6)
    assert Mamba3Config.from_dict(other.to_dict()) == other != config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_modle": 3}, "config has no key 'd_modle'; the nearest is 'd_model'"),
        ({"d_state": 3}, "config has no key 'd_state'"),
        ({"norm_epsilon": 1e-5}, "config has no key 'norm_epsilon'"),
    ],
)
def test_official_unknown_key(change, message):
    with pytest.raises(TypeError, match=message):
        read(official() | change)


@pytest.mark.parametrize(
    ("key", "near"), [("a_floor", "A_floor"), ("mimo_ranks", "mimo_rank"), ("d_conv", ".*")]
)
def test_official_unknown_ssm_key(key, near):
    with pytest.raises(TypeError, match=f"ssm_cfg has no key '{key}'; the nearest is '{near}'"):
        read(official(**{key: 1}))


def test_own_unknown_and_missing_keys():
    own = Mamba3Config(vocab_size=9, d_model=32, n_layer=1).to_dict()
    with pytest.raises(TypeError, match="no key 'head_dim'; the nearest is 'headdim'"):
        Mamba3Config.from_dict(own | {"head_dim": 64})
    del own["d_model"], own["vocab_size"]
    with pytest.raises(TypeError, match="lacks vocab_size, d_model"):
        Mamba3Config.from_dict(own)
    with pytest.raises(TypeError, match="lacks d_model"):
        read({key: value for key, value in official().items() if key != "d_model"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "llama", "hidden_size": 8}, "model_type 'llama', expected 'mamba3'"),
        ({"model_type": "mamba2", "ssm_cfg": {}}, "model_type 'mamba2'"),
        (official(layer="Mamba2"), "layer 'Mamba3' or 'Mamba1'"),
        (official() | {"ssm_cfg": None}, "layer 'Mamba3' or 'Mamba1'"),
        (official() | {"attn_layer_idx": [3]}, "attention layers are not supported"),
        (official() | {"rms_norm": False}, "only RMSNorm"),
    ],
)
def test_other_models_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        read(data)


@pytest.mark.parametrize("data", [[], "config", None])
def test_not_a_mapping(data):
    with pytest.raises(TypeError, match="must be a mapping"):
        Mamba3Config.from_dict(data)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d_model": 0}, ValueError, "d_model must be more than 0"),
        ({"n_layer": -1}, ValueError, "n_layer must be more than 0"),
        ({"d_intermediate": -1}, ValueError, "d_intermediate must be 0 or more"),
        ({"mimo_rank": 0}, ValueError, "mimo_rank must be more than 0"),
        ({"dt_init_floor": 0}, ValueError, "dt_init_floor must be more than 0"),
        ({"a_floor": float("inf")}, ValueError, "a_floor must be more than 0 and finite"),
        ({"norm_eps": float("nan")}, TypeError, "norm_eps must be float, got nan"),
        ({"rope_fraction": 1.5}, ValueError, r"rope_fraction must be in \[0, 1\]"),
        ({"rope_fraction": -0.5}, ValueError, "rope_fraction must be 0 or more"),
        ({"headdim": 24}, ValueError, "headdim must divide expand . d_model: got headdim 24"),
        ({"ngroups": 3}, ValueError, "ngroups must divide the number of heads: got ngroups 3"),
        ({"d_state": 7}, ValueError, "d_state must be even"),
        ({"a_activation": "relu"}, ValueError, "a_activation must be one of"),
        ({"dt_max": 1e-4}, ValueError, "dt_max must be at least dt_min"),
        ({"d_model": 64.5}, TypeError, "d_model must be int, got 64.5"),
        ({"d_model": None}, TypeError, "d_model must be int, got None"),
        ({"is_mimo": 1}, TypeError, "is_mimo must be bool, got 1"),
        ({"is_mimo": "false"}, TypeError, "is_mimo must be bool"),
        ({"vocab_size": True}, TypeError, "vocab_size must be int, got True"),
        ({"dt_max": "fast"}, TypeError, "dt_max must be float, got 'fast'"),
    ],
)
def test_bad_values(change, error, message):
    with pytest.raises(error, match=message):
        Mamba3Config(**({"vocab_size": 9, "d_model": 64, "n_layer": 1} | change))


MAMBA = {"vocab_size": 9, "d_model": 24, "n_layer": 2, "layers": "mamba"}


def test_kinds_of_layers():
    """One for all or one each; config.json holds what is about those that there are."""
    pure = Mamba3Config(**MAMBA, mamba={"d_state": 8, "dt_min": "1e-4"})
    assert (pure.kinds, pure.form, pure.mamba.dt_min) == (("mamba",) * 2, "Mamba-1", 1e-4)
    assert Mamba3Config(**MAMBA | {"layers": ["mamba", "mamba"]}, mamba=pure.mamba) == pure
    told = pure.to_dict()
    assert told["layers"] == "mamba"
    assert told["mamba"]["d_state"] == 8
    assert told.keys().isdisjoint(("d_state", "headdim", "a_activation", "dt_min"))
    hybrid = Mamba3Config(**MAMBA | {"layers": ("mamba3", "mamba")}, headdim=8, is_mimo=True)
    assert hybrid.form == "hybrid of 1 Mamba-1 and 1 MIMO of rank 4"
    assert hybrid.to_dict()["layers"] == ["mamba3", "mamba"]
    assert hybrid.to_dict()["headdim"] == 8
    for config in (pure, hybrid):
        assert Mamba3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    plain = Mamba3Config(**MAMBA | {"layers": "mamba3"}, headdim=8)
    assert plain.to_dict().keys().isdisjoint(("layers", "mamba"))
    assert dataclasses.replace(plain, layers=["mamba3"] * 2) == plain


def test_the_rank_of_step_sizes_is_the_same_written_down_or_not():
    config = Mamba3Config(**MAMBA, mamba={"dt_rank": 2})
    assert config == Mamba3Config(**MAMBA)
    assert config.mamba.rank(24) == 2
    assert Mamba3Config(**MAMBA, mamba={"dt_rank": 3}).mamba.rank(24) == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layers": "mamba2"}, ValueError, "layers must be one of .*, or a list of these, got"),
        ({"layers": []}, ValueError, "layers names 0 kinds, and the model has 2 layers"),
        ({"layers": ["mamba"] * 3}, ValueError, "layers names 3 kinds, and the model has 2"),
        ({"layers": {"mamba": 2}}, ValueError, "layers must be one of"),
        ({"d_state": 16}, ValueError, "d_state: about Mamba-3 layers.* or say mamba.d_state"),
        ({"is_mimo": True}, ValueError, "is_mimo: about Mamba-3 layers, .*; leave it out$"),
        ({"layers": "mamba3", "headdim": 8, "mamba": {"d_conv": 3}}, ValueError, "has none: leave"),
        ({"mamba": {"d_sate": 3}}, TypeError, "mamba: the group has no key 'd_sate'.*'d_state'"),
        ({"mamba": {"d_conv": 0}}, ValueError, "mamba: d_conv must be more than 0"),
        ({"mamba": {"dt_rank": "auto"}}, TypeError, "mamba: dt_rank must be int | None, got 'auto"),
        ({"mamba": {"dt_max": 1e-5}}, ValueError, "mamba: dt_max must be at least dt_min"),
        ({"mamba": 16}, TypeError, "mamba: the group must be a mapping"),
    ],
)
def test_bad_layers(change, error, message):
    with pytest.raises(error, match=message):
        Mamba3Config(**MAMBA | change)


OFFICIAL_MAMBA = {"d_model": 24, "n_layer": 2, "vocab_size": 9, "ssm_cfg": {}}


def test_official_mamba_1():
    expected = Mamba3Config(**MAMBA, pad_vocab_size_multiple=8)
    assert Mamba3Config.from_dict(OFFICIAL_MAMBA) == expected
    ssm = {"layer": "Mamba1", "dt_rank": "auto", "use_fast_path": True, "dt_init": "random"}
    assert Mamba3Config.from_dict(OFFICIAL_MAMBA | {"ssm_cfg": ssm}) == expected
    ssm = {"d_state": 8, "d_conv": 3, "expand": 1, "dt_rank": 5, "bias": True, "conv_bias": False}
    ssm |= {"dt_min": 0.01, "dt_max": 0.2, "dt_init_floor": 0.003, "dt_scale": 0.5}
    config = Mamba3Config.from_dict(OFFICIAL_MAMBA | {"ssm_cfg": ssm})
    assert config == dataclasses.replace(expected, mamba=MambaSizes(**ssm))
    with pytest.raises(TypeError, match="ssm_cfg has no key 'headdim'"):
        Mamba3Config.from_dict(OFFICIAL_MAMBA | {"ssm_cfg": {"headdim": 8}})


# As released, with what a conversion left in it.
TRANSFORMERS_MAMBA = {
    "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "d_inner": 1536,
    "d_model": 768, "eos_token_id": 0, "expand": 2, "fused_add_norm": True, "hidden_act": "silu",
    "hidden_size": 768, "initializer_range": 0.1, "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-05, "model_type": "mamba", "n_layer": 24, "num_hidden_layers": 24,
    "pad_token_id": 0, "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False,
    "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16,
    "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
    "time_step_min": 0.001, "time_step_rank": 48, "time_step_scale": 1.0,
    "torch_dtype": "float32", "transformers_version": "4.39.0.dev0", "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "vocab_size": 50280,
}  # fmt: skip
FALCON_MAMBA = {
    "_name_or_path": "./", "architectures": ["FalconMambaForCausalLM"], "bos_token_id": 0,
    "conv_kernel": 4, "eos_token_id": 11, "expand": 16, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon_mamba", "num_hidden_layers": 64,
    "pad_token_id": 11, "rescale_prenorm_residual": False, "residual_in_fp32": True,
    "state_size": 16, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001,
    "time_step_rank": 256, "time_step_scale": 1.0, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_bias": False, "use_cache": True,
    "use_conv_bias": True, "vocab_size": 65024,
}  # fmt: skip


def test_configs_of_transformers_are_those_of_the_named_models():
    assert Mamba3Config.from_dict(TRANSFORMERS_MAMBA) == MODELS["mamba-130m-hf"].config()
    assert Mamba3Config.from_dict(FALCON_MAMBA) == MODELS["falcon-mamba-7b"].config()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_act": "gelu"}, ValueError, "only 'silu' is supported"),
        ({"intermediate_size": 1000}, ValueError, "must be a multiple of hidden_size, got 1000"),
        ({"state_size": "many"}, TypeError, "mamba: d_state must be int, got 'many'"),
    ],
)
def test_what_cannot_be_read_of_transformers(change, error, message):
    with pytest.raises(error, match=message):
        Mamba3Config.from_dict(TRANSFORMERS_MAMBA | change)


def test_frozen():
    config = Mamba3Config(vocab_size=9, d_model=32, n_layer=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 64


def test_numbers_of_other_types():
    config = Mamba3Config(vocab_size=9, d_model=32.0, n_layer="1", dt_min="1e-4", norm_eps=1)
    assert (config.d_model, config.n_layer, config.dt_min, config.norm_eps) == (32, 1, 1e-4, 1.0)
    assert [type(v) for v in (config.d_model, config.n_layer, config.dt_min, config.norm_eps)] == [
        int,
        int,
        float,
        float,
    ]


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1e3", "int", 1000),
        (2**60 + 1, "int", 2**60 + 1),
        (None, "float | None", None),
        ("0.5", "float | None", 0.5),
        (float("inf"), "float", float("inf")),
        ("yes", "str", "yes"),
        ([1], "list[int]", [1]),
    ],
)
def test_coerce(value, annotation, expected):
    result = coerce(value, annotation, "x")
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [(10**400, "float"), (float("inf"), "int"), (3, "str"), ("", "bool"), ([], "int"), (0, "bool")],
)
def test_coerce_refuses(value, annotation):
    with pytest.raises(TypeError, match=f"x must be {annotation}, got"):
        coerce(value, annotation, "x")


def test_from_mapping_wants_a_mapping():
    with pytest.raises(TypeError, match="recipe must be a mapping"):
        from_mapping(Mamba3Config, ["d_model"], where="recipe")


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"d_intermediate": 1264}, "mlp_width", 1280),
        ({"d_intermediate": 1264, "mlp_multiple": 16}, "mlp_width", 1264),
        ({}, "mlp_width", 0),
        ({"vocab_size": 16}, "padded_vocab_size", 16),
        ({"vocab_size": 17}, "padded_vocab_size", 32),
        ({"mimo_rank": 3}, "rank", 1),
        ({"mimo_rank": 3, "is_mimo": True}, "rank", 3),
        ({"expand": 3, "headdim": 16}, "n_heads", 12),
        ({"d_state": 64, "rope_fraction": 0.3}, "n_angles", 9),
        ({"rope_fraction": 1.0}, "n_angles", 64),
        ({"rope_fraction": 0.0}, "n_angles", 0),
    ],
)
def test_derived_sizes(change, name, expected):
    config = Mamba3Config(**({"vocab_size": 9, "d_model": 64, "n_layer": 1} | change))
    assert getattr(config, name) == expected
