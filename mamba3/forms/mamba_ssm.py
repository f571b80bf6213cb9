"""The official form: config.json of `state-spaces/mamba` checkpoints, of Mamba-3 and of Mamba-1."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from ..config import LABELS, Mamba3Config
from ..fields import check_keys, from_mapping
from .expressed import check_expressed, check_rope_fraction

# The keys that set a field of ours of the same name, at the top level and in ssm_cfg.
_FIELDS = {"d_model", "d_intermediate", "n_layer", "vocab_size", "residual_in_fp32"}
_FIELDS |= {"pad_vocab_size_multiple", "tie_embeddings"}
_MAMBA3_FIELDS = {"d_state", "expand", "headdim", "ngroups", "is_mimo", "mimo_rank"}
_MAMBA3_FIELDS |= {"rope_fraction", "dt_min", "dt_max", "dt_init_floor", "A_floor"}
_MAMBA3_FIELDS |= {"is_outproj_norm", "a_activation"}
_MAMBA_FIELDS = {"d_state", "d_conv", "expand", "dt_rank", "bias", "conv_bias"}
_MAMBA_FIELDS |= {"dt_min", "dt_max", "dt_init_floor", "dt_scale"}
# Those that set none: checked where they could change the model, else about how the official code
# runs or begins. chunk_size is among these: it tiles the kernels, and every value gives the same
# numbers.
_OTHERS = {"ssm_cfg", "attn_layer_idx", "attn_cfg", "rms_norm", "fused_add_norm", "a_activation"}
_SSM_OTHERS = {"Mamba3": {"layer", "chunk_size"}, "Mamba1": {"layer", "dt_init", "use_fast_path"}}
# An absent key means the official code's default, which is ours too but for this one.
_DEFAULTS = {"pad_vocab_size_multiple": 8}


def from_official(data: dict[str, Any], *, a_activation: str | None = None) -> Mamba3Config:
    """Read the config.json of an official checkpoint.

    Args:
        data: the parsed file.
        a_activation: which function a Mamba-3 model was trained with. The official form does not
            say; None takes "heavy_tail", that of all released weights, and warns.

    Raises:
        TypeError: unknown or missing keys, or a value of the wrong type.
        ValueError: neither a Mamba-3 nor a Mamba-1 model, or one with parts that are not supported.
    """
    ssm = data.get("ssm_cfg")
    layer = ssm.get("layer", "Mamba1") if isinstance(ssm, dict) else None
    if layer not in _SSM_OTHERS:
        raise ValueError(
            f"ssm_cfg is {ssm!r}, expected a mapping with layer 'Mamba3' or 'Mamba1' (the default)"
        )
    if data.get("attn_layer_idx"):
        raise ValueError(
            f"attn_layer_idx is {data['attn_layer_idx']}: hybrids with attention layers are "
            "not supported"
        )
    if not data.get("rms_norm", True):
        raise ValueError("rms_norm is false: only RMSNorm models are supported")
    check_keys(data, _FIELDS | _OTHERS | LABELS, where="config")
    own = _MAMBA3_FIELDS if layer == "Mamba3" else _MAMBA_FIELDS
    check_keys(ssm, own | _SSM_OTHERS[layer], where="ssm_cfg")
    fields = _DEFAULTS | {name: value for name, value in data.items() if name in _FIELDS}
    sizes = {name: value for name, value in ssm.items() if name in own}
    if layer == "Mamba1":
        if sizes.get("dt_rank") == "auto":
            del sizes["dt_rank"]
        fields |= {"layers": "mamba", "mamba": sizes}
    else:
        fields |= sizes
        if "A_floor" in fields:
            fields["a_floor"] = fields.pop("A_floor")
        if "a_activation" in data:
            fields.setdefault("a_activation", data["a_activation"])
    if a_activation is not None:
        fields["a_activation"] = a_activation
    elif layer == "Mamba3" and "a_activation" not in fields:
        warnings.warn(
            "this config does not say how the decay A is activated; taking "
            "a_activation='heavy_tail', that of the weights released since June 2026. Weights "
            "of earlier code need a_activation='softplus'. Pass a_activation, or add it to the "
            "config, to choose",
            stacklevel=3,
        )
    return from_mapping(Mamba3Config, fields, where="config")


def to_official(config: Mamba3Config) -> dict[str, Any]:
    """The config.json of an official checkpoint.

    Of a Mamba-3 model it says which activation the decay has, under a key of ssm_cfg that the
    official code passes over.

    Raises:
        ValueError: the official form cannot express this model; the message names what.
    """
    if not isinstance(config.layers, str):
        raise ValueError(
            f"mamba_ssm has one kind of layers in a model, and this one: {config.form}"
        )
    data = {
        "d_model": config.d_model,
        "d_intermediate": config.mlp_width,
        "n_layer": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm_cfg": _ssm3(config) if config.layers == "mamba3" else _ssm1(config),
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": False,
        "pad_vocab_size_multiple": config.pad_vocab_size_multiple,
        "tie_embeddings": config.tie_embeddings,
    }
    check_expressed(config, from_official(data), "mamba_ssm")
    return data


def _ssm3(config: Mamba3Config) -> dict[str, Any]:
    check_rope_fraction(config, "mamba_ssm")
    return {
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


def _ssm1(config: Mamba3Config) -> dict[str, Any]:
    sizes = dataclasses.asdict(config.mamba)
    if sizes.pop("maps_norm_eps") is not None:
        raise ValueError(
            "mamba_ssm has no norms over the step size, B and C, and this model has them "
            "(mamba.maps_norm_eps)"
        )
    if sizes["dt_rank"] is None:
        sizes["dt_rank"] = "auto"
    return {"layer": "Mamba1", **sizes}
