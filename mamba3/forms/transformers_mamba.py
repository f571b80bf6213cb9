"""The form of transformers: config.json of its Mamba (Mamba-1) and of Falcon-Mamba.

A Falcon-Mamba is a Mamba with norms without weights over the step size, B and C.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config import Mamba3Config
from .expressed import check_expressed

# By model_type, the class that transformers has for it.
MODEL_TYPES = {"mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM"}

# Ours, by transformers' name, with the default that a file without it means.
_FIELDS = {
    "vocab_size": ("vocab_size", 50280),
    "hidden_size": ("d_model", 768),
    "num_hidden_layers": ("n_layer", 32),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "residual_in_fp32": ("residual_in_fp32", True),
    "tie_word_embeddings": ("tie_embeddings", True),
}
_SIZES = {
    "state_size": ("d_state", 16),
    "conv_kernel": ("d_conv", 4),
    "use_bias": ("bias", False),
    "use_conv_bias": ("conv_bias", True),
    "time_step_rank": ("dt_rank", "auto"),
    "time_step_scale": ("dt_scale", 1.0),
    "time_step_min": ("dt_min", 1e-3),
    "time_step_max": ("dt_max", 1e-1),
    "time_step_floor": ("dt_init_floor", 1e-4),
}
_NORM_EPS = 1e-6  # of Falcon-Mamba's norms, where the file does not say


def from_transformers(data: dict[str, Any], *, a_activation: str | None = None) -> Mamba3Config:
    """Read the config.json of a Mamba or Falcon-Mamba of transformers.

    A key that transformers does not know changes nothing there, and is passed over here.

    Args:
        data: the parsed file.
        a_activation: is about Mamba-3 layers, which such a model does not have; None.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an activation other than SiLU, an inner width that is no multiple of the
            model's, or values out of range.
    """
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {data['hidden_act']!r}: only 'silu' is supported")
    fields, sizes = (
        {ours: data.get(theirs, default) for theirs, (ours, default) in table.items()}
        for table in (_FIELDS, _SIZES)
    )
    if sizes["dt_rank"] == "auto":
        sizes["dt_rank"] = None
    if data["model_type"] == "falcon_mamba":
        sizes["maps_norm_eps"] = data.get("mixer_rms_eps", _NORM_EPS)
    if a_activation is not None:
        fields["a_activation"] = a_activation
    return Mamba3Config(
        **fields,
        layers="mamba",
        mamba={**sizes, "expand": _expand(data, fields["d_model"])},
        pad_vocab_size_multiple=1,
    )


def to_transformers(config: Mamba3Config) -> dict[str, Any]:
    """The config.json of transformers' `MambaForCausalLM` or `FalconMambaForCausalLM`.

    The vocabulary becomes the padded one, since transformers pads none. Ids of special tokens are
    left open, as the tokenizer has them.

    Raises:
        ValueError: transformers cannot express this model: its Mamba has no other layers and no
            MLP.
    """
    if config.layers != "mamba":
        raise ValueError(
            f"transformers' Mamba has Mamba-1 layers alone, and this model: {config.form}. With "
            "mamba3.hf, transformers loads it in the form mamba3"
        )
    if config.mlp_width:
        raise ValueError(
            f"transformers' Mamba has no MLP, and this model has one of width {config.mlp_width}"
        )
    sizes, is_falcon = config.mamba, config.mamba.maps_norm_eps is not None
    model_type = "falcon_mamba" if is_falcon else "mamba"
    data = {
        "architectures": [MODEL_TYPES[model_type]],
        "model_type": model_type,
        **{theirs: getattr(config, ours) for theirs, (ours, _) in _FIELDS.items()},
        "vocab_size": config.padded_vocab_size,
        "expand": sizes.expand,
        "intermediate_size": sizes.expand * config.d_model,
        **{theirs: getattr(sizes, ours) for theirs, (ours, _) in _SIZES.items()},
        "time_step_rank": sizes.rank(config.d_model),
        "hidden_act": "silu",
        **({"mixer_rms_eps": sizes.maps_norm_eps} if is_falcon else {}),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    expected = dataclasses.replace(
        config, vocab_size=config.padded_vocab_size, pad_vocab_size_multiple=1
    )
    check_expressed(expected, from_transformers(data), "transformers")
    return data


def _expand(data: dict[str, Any], d_model: int) -> int:
    """Inner width over the model's. Where both are given, intermediate_size is the one that counts.

    The released Falcon-Mamba says expand 16, and intermediate_size 2 * hidden_size, as it is.
    """
    inner = data.get("intermediate_size")
    if inner is None:
        return data.get("expand", 2)
    if not d_model or inner % d_model:
        raise ValueError(
            f"intermediate_size must be a multiple of hidden_size, got {inner} and {d_model}"
        )
    return inner // d_model
