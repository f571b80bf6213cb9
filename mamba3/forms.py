"""The config.json of a model in the forms of other packages; what a form cannot say is an error.

    form         config.json               weights
    mamba3       this package's            safetensors
    mamba_ssm    with an ssm_cfg           pytorch_model.bin
    fla          with a hidden_size        safetensors

Source of the form fla: the Mamba-3 of flash-linear-attention 0.6.0.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .config import Mamba3Config

FORMS = ("mamba_ssm", "mamba3", "fla")
ROPE_FRACTIONS = (0.5, 1.0)  # those that mamba_ssm and fla have
# Not of the trained model: only how a new one is initialised, or written another way.
_NO_MATTER = {"angle_init_scale", "d_intermediate", "mlp_multiple"}
# Ours, by fla's name.
_FLA_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "state_size": "d_state",
    "expand": "expand",
    "head_dim": "headdim",
    "n_groups": "ngroups",
    "is_mimo": "is_mimo",
    "mimo_rank": "mimo_rank",
    "rope_fraction": "rope_fraction",
    "is_outproj_norm": "is_outproj_norm",
    "A_floor": "a_floor",
    "dt_min": "dt_min",
    "dt_max": "dt_max",
    "dt_init_floor": "dt_init_floor",
    "norm_eps": "norm_eps",
    "residual_in_fp32": "residual_in_fp32",
    "tie_word_embeddings": "tie_embeddings",
}


def form_of(data: Any, file: Path) -> str:
    """Which of `FORMS` a parsed config.json is of.

    Raises:
        ValueError: it is no mapping; `file` is for the message.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{file} holds a {type(data).__name__}, expected keys and values")
    if "ssm_cfg" in data:
        return "mamba_ssm"
    return "fla" if "hidden_size" in data and "d_model" not in data else "mamba3"


def to_official(config: Mamba3Config) -> dict[str, Any]:
    """The config.json of an official (`state-spaces/mamba`) checkpoint.

    It says which activation the decay has, under a key of ssm_cfg that the official code passes
    over.

    Raises:
        ValueError: the official form cannot express this model; the message names what.
    """
    _check_rope_fraction(config, "mamba_ssm")
    ssm = {
        "layer": "Mamba3",
        **{name: getattr(config, name) for name in ("d_state", "expand", "headdim", "ngroups")},
        "rope_fraction": config.rope_fraction,
        **{name: getattr(config, name) for name in ("dt_min", "dt_max", "dt_init_floor")},
        "A_floor": config.a_floor,
        # The official kernels' tile; it changes no number.
        "chunk_size": max(8, 64 // config.rank),
        "is_mimo": config.is_mimo,
        "mimo_rank": config.mimo_rank,
        "is_outproj_norm": config.is_outproj_norm,
        "a_activation": config.a_activation,
    }
    data = {
        "d_model": config.d_model,
        "d_intermediate": config.mlp_width,
        "n_layer": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": False,
        "pad_vocab_size_multiple": config.pad_vocab_size_multiple,
        "tie_embeddings": config.tie_embeddings,
    }
    _check_expressed(config, Mamba3Config.from_official(data), "mamba_ssm")
    return data


def to_fla(config: Mamba3Config) -> dict[str, Any]:
    """The config.json of flash-linear-attention's `Mamba3ForCausalLM`.

    The vocabulary becomes the padded one, since fla pads none. Ids of special tokens are left
    open, as the tokenizer has them.

    Raises:
        ValueError: fla cannot express this model: its Mamba-3 has no MLP, and its decay is
            softplus.
    """
    if config.mlp_width:
        raise ValueError(
            f"fla's Mamba-3 has no MLP, and this model has one of width {config.mlp_width}"
        )
    if config.a_activation != "softplus":
        raise ValueError(
            f"fla's Mamba-3 computes the decay by softplus, and this model's a_activation is "
            f"{config.a_activation!r}: fla would give other numbers. If the weights were trained "
            "with softplus, say a_activation='softplus'"
        )
    _check_rope_fraction(config, "fla")
    data = {
        "architectures": ["Mamba3ForCausalLM"],
        "model_type": "mamba3",
        **{theirs: getattr(config, ours) for theirs, ours in _FLA_FIELDS.items()},
        "vocab_size": config.padded_vocab_size,
        "chunk_size": max(8, 64 // config.rank),
        "hidden_act": "silu",
        "use_bias": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    expected = dataclasses.replace(
        config, vocab_size=config.padded_vocab_size, pad_vocab_size_multiple=1
    )
    _check_expressed(expected, from_fla(data), "fla")
    return data


def from_fla(data: dict[str, Any], *, a_activation: str | None = None) -> Mamba3Config:
    """Read the config.json of flash-linear-attention's Mamba-3.

    Args:
        data: the parsed file.
        a_activation: None takes softplus, which is what fla computes.

    Raises:
        ValueError: keys are missing, or it has biases, which no other form has.
        TypeError: a value of the wrong type.
    """
    if missing := sorted(_FLA_FIELDS.keys() - data.keys()):
        raise ValueError(f"the config of an fla model lacks {', '.join(missing)}")
    if data.get("use_bias"):
        raise ValueError("use_bias is true: projections with a bias are not supported")
    return Mamba3Config(
        **{ours: data[theirs] for theirs, ours in _FLA_FIELDS.items()},
        pad_vocab_size_multiple=1,
        a_activation=a_activation or "softplus",
    )


CONFIGS = {"mamba_ssm": to_official, "mamba3": Mamba3Config.to_dict, "fla": to_fla}


def _check_rope_fraction(config: Mamba3Config, form: str) -> None:
    if config.rope_fraction not in ROPE_FRACTIONS:
        raise ValueError(
            f"{form} has a rope_fraction of 0.5 or 1.0, and this model's is {config.rope_fraction}"
        )


def _check_expressed(config: Mamba3Config, read: Mamba3Config, form: str) -> None:
    """Raise a ValueError where a model would come back as another."""
    ours, theirs = config.to_dict(), read.to_dict()
    lost = [
        f"{name} {value} (it would be {theirs[name]})"
        for name, value in ours.items()
        if name not in _NO_MATTER and value != theirs[name]
    ]
    if config.mlp_width != read.mlp_width:
        lost.append(f"an MLP of width {config.mlp_width} (it would be {read.mlp_width})")
    if lost:
        raise ValueError(f"the form {form} cannot express this model's {', '.join(lost)}")
