"""The form of flash-linear-attention: config.json of its Mamba-3, as of version 0.6.0."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config import Mamba3Config
from .expressed import check_expressed, check_rope_fraction

# Ours, by fla's name.
_FIELDS = {
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


def to_fla(config: Mamba3Config) -> dict[str, Any]:
    """The config.json of flash-linear-attention's `Mamba3ForCausalLM`.

    The vocabulary becomes the padded one, since fla pads none. Ids of special tokens are left
    open, as the tokenizer has them.

    Raises:
        ValueError: fla cannot express this model: its Mamba-3 has no other layers and no MLP, and
            its decay is softplus.
    """
    if config.layers != "mamba3":
        raise ValueError(f"fla's model has Mamba-3 layers alone, and this one: {config.form}")
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
    check_rope_fraction(config, "fla")
    data = {
        "architectures": ["Mamba3ForCausalLM"],
        "model_type": "mamba3",
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
        "vocab_size": config.padded_vocab_size,
        "chunk_size": max(8, 64 // config.rank),
        "hidden_act": "silu",
        "use_bias": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    expected = dataclasses.replace(
        config, vocab_size=config.padded_vocab_size, pad_vocab_size_multiple=1
    )
    check_expressed(expected, from_fla(data), "fla")
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
    if missing := sorted(_FIELDS.keys() - data.keys()):
        raise ValueError(f"the config of an fla model lacks {', '.join(missing)}")
    if data.get("use_bias"):
        raise ValueError("use_bias is true: projections with a bias are not supported")
    return Mamba3Config(
        **{ours: data[theirs] for theirs, ours in _FIELDS.items()},
        pad_vocab_size_multiple=1,
        a_activation=a_activation or "softplus",
    )
