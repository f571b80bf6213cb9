"""Mamba3Config: the architecture of a model, and nothing else.

It is what ``config.json`` beside the weights holds. How a model is run (backend, chunk size,
dtype, device) is never part of it, because the file travels with the weights.

    code            paper / official name         meaning
    d_model         D                             width of the residual stream
    expand, headdim E = expand*D = H*P            inner width, split in H heads of P channels
    d_state         N                             state size of a head
    ngroups         G                             B/C projections shared by H/G heads each
    mimo_rank       R                             streams of the MIMO form; SISO has one
    rope_fraction   S = N*rope_fraction/2         share of the state's channels that rotate
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

A_ACTIVATIONS = ("heavy_tail", "softplus")

# Keys of our own config.json that are not fields: what kind of file it is, and what transformers
# writes beside.
TRANSFORMERS_KEYS = {"architectures", "auto_map", "dtype", "transformers_version"}
TRANSFORMERS_KEYS |= {"bos_token_id", "eos_token_id", "pad_token_id"}
_LABELS = {"model_type"} | TRANSFORMERS_KEYS

# The keys of the official form that set a field, at its top level and in ssm_cfg.
_OFFICIAL_FIELDS = {"d_model", "d_intermediate", "n_layer", "vocab_size", "residual_in_fp32"}
_OFFICIAL_FIELDS |= {"pad_vocab_size_multiple", "tie_embeddings", "a_activation"}
_OFFICIAL_SSM_FIELDS = {"d_state", "expand", "headdim", "ngroups", "is_mimo", "mimo_rank"}
_OFFICIAL_SSM_FIELDS |= {"rope_fraction", "dt_min", "dt_max", "dt_init_floor", "A_floor"}
_OFFICIAL_SSM_FIELDS |= {"is_outproj_norm", "a_activation"}
# Those that set none: checked where they could change the model, else about how the official code
# runs. chunk_size is among these: it tiles the kernels, and every value gives the same numbers.
_OFFICIAL_OTHERS = {"ssm_cfg", "attn_layer_idx", "attn_cfg", "rms_norm", "fused_add_norm"}
_OFFICIAL_SSM_OTHERS = {"layer", "chunk_size"}
# An absent key means the official code's default, which is ours too but for this one.
_OFFICIAL_DEFAULTS = {"pad_vocab_size_multiple": 8}


@dataclass(frozen=True, kw_only=True)
class Mamba3Config:
    """Architecture of a `Mamba3LM`.

    Args:
        vocab_size: number of tokens; rows of the embedding are `padded_vocab_size`.
        d_model: width of the residual stream.
        n_layer: number of blocks.
        d_intermediate: MLP width, rounded up to `mlp_multiple`; 0 means no MLP.
        d_state: state size N of a head.
        expand: inner width over d_model.
        headdim: channels P of a head; must divide expand * d_model.
        ngroups: B/C groups G; must divide the number of heads.
        is_mimo: multi-input multi-output form. It differs from SISO by more than the rank: its
            rotation pairs channel i with i + N/2, SISO's pairs 2i with 2i + 1.
        mimo_rank: number of streams R; used only when `is_mimo`.
        rope_fraction: share of the N channels that rotate, in [0, 1].
        is_outproj_norm: RMSNorm over each head's channels before the gate.
        a_activation: how the raw decay becomes A < 0: "heavy_tail" (official weights since June
            2026) or "softplus" (before). The tensor names are the same, the maths is not.
        a_floor: A is at most -a_floor.
        dt_min, dt_max, dt_init_floor: range of the initial step size dt (log-uniform). A
            half turn in one token needs dt near 1, so state tracking wants a larger dt_max.
        angle_init_scale: factor on the initial rows of in_proj that give the rotation angles.
        norm_eps: epsilon of every RMSNorm.
        residual_in_fp32: keep the residual stream in float32 whatever the weights' dtype.
        tie_embeddings: lm_head shares the embedding's weight.
        pad_vocab_size_multiple: the embedding's rows are rounded up to this multiple.
        mlp_multiple: d_intermediate is rounded up to this multiple.

    Raises:
        TypeError: a key that does not exist, with the nearest one that does.
        ValueError: values that do not fit together.
    """

    vocab_size: int
    d_model: int
    n_layer: int
    d_intermediate: int = 0
    d_state: int = 128
    expand: int = 2
    headdim: int = 64
    ngroups: int = 1
    is_mimo: bool = False
    mimo_rank: int = 4
    rope_fraction: float = 0.5
    is_outproj_norm: bool = False
    a_activation: str = "heavy_tail"
    a_floor: float = 1e-4
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_init_floor: float = 1e-4
    angle_init_scale: float = 1.0
    norm_eps: float = 1e-5
    residual_in_fp32: bool = True
    tie_embeddings: bool = True
    pad_vocab_size_multiple: int = 16
    mlp_multiple: int = 128

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = coerce(getattr(self, field.name), field.type, field.name)
            object.__setattr__(self, field.name, value)
            may_be_zero = field.name in ("d_intermediate", "rope_fraction", "angle_init_scale")
            if isinstance(value, (bool, str)) or (value == 0 and may_be_zero):
                continue
            if not (value > 0 and math.isfinite(value)):
                bound = "0 or more" if may_be_zero else "more than 0"
                raise ValueError(f"{field.name} must be {bound} and finite, got {value}")
        if self.d_inner % self.headdim:
            raise ValueError(
                f"headdim must divide expand * d_model: got headdim {self.headdim}, "
                f"expand {self.expand} * d_model {self.d_model} = {self.d_inner}"
            )
        if self.n_heads % self.ngroups:
            raise ValueError(
                f"ngroups must divide the number of heads: got ngroups {self.ngroups}, "
                f"{self.n_heads} heads (= expand * d_model / headdim)"
            )
        if self.d_state % 2:
            raise ValueError(f"d_state must be even (channels rotate in pairs), got {self.d_state}")
        if self.rope_fraction > 1:
            raise ValueError(f"rope_fraction must be in [0, 1], got {self.rope_fraction}")
        if self.a_activation not in A_ACTIVATIONS:
            raise ValueError(
                f"a_activation must be one of {A_ACTIVATIONS}, got {self.a_activation!r}"
            )
        if self.dt_max < self.dt_min:
            raise ValueError(f"dt_max must be at least dt_min, got {self.dt_max} < {self.dt_min}")

    @property
    def d_inner(self) -> int:
        """Inner width E = H * P."""
        return self.expand * self.d_model

    @property
    def n_heads(self) -> int:
        """Number of heads H."""
        return self.d_inner // self.headdim

    @property
    def rank(self) -> int:
        """Number of streams R: `mimo_rank` for MIMO, 1 for SISO."""
        return self.mimo_rank if self.is_mimo else 1

    @property
    def n_angles(self) -> int:
        """Number of rotation angles S per token."""
        return int(self.d_state * self.rope_fraction) // 2

    @property
    def mlp_width(self) -> int:
        """Real width of the MLP, 0 without one."""
        return round_up(self.d_intermediate, self.mlp_multiple)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of lm_head."""
        return round_up(self.vocab_size, self.pad_vocab_size_multiple)

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, a_activation: str | None = None) -> Mamba3Config:
        """Read a parsed config.json, in our own form (`to_dict`) or in the official one.

        Args:
            data: the parsed file; an `ssm_cfg` entry makes it the official form.
            a_activation: overrides what the file says or leaves open. None takes the file's.

        Returns:
            The config. An official file that leaves a_activation open gives a warning.

        Raises:
            TypeError: unknown or missing keys, or a value of the wrong type.
            ValueError: another kind of model, or values that do not fit together.
        """
        if not isinstance(data, dict):
            raise TypeError(f"a config must be a mapping of keys to values, got {data!r}")
        model_type = data.get("model_type", "mamba3")
        if model_type != "mamba3":
            raise ValueError(
                f"this config is of model_type {model_type!r}, expected 'mamba3' or the official "
                "form with an 'ssm_cfg' entry"
            )
        if "ssm_cfg" in data:
            return cls.from_official(data, a_activation=a_activation)
        own = {key: value for key, value in data.items() if key not in _LABELS}
        if a_activation is not None:
            own["a_activation"] = a_activation
        return from_mapping(cls, own, where="config")

    @classmethod
    def from_official(
        cls, data: dict[str, Any], *, a_activation: str | None = None
    ) -> Mamba3Config:
        """Read the config.json of an official (`state-spaces/mamba`) Mamba-3 checkpoint.

        Args:
            data: the parsed file.
            a_activation: which function the weights were trained with. The official form does not
                say; None takes "heavy_tail", that of all released weights, and warns.

        Raises:
            TypeError: unknown or missing keys, or a value of the wrong type.
            ValueError: not a Mamba-3 model, or one with parts that are not supported.
        """
        ssm = data.get("ssm_cfg")
        if not isinstance(ssm, dict) or ssm.get("layer") != "Mamba3":
            raise ValueError(
                f"ssm_cfg is {ssm!r}, expected a mapping with layer 'Mamba3': this is not a "
                "Mamba-3 checkpoint"
            )
        if data.get("attn_layer_idx"):
            raise ValueError(
                f"attn_layer_idx is {data['attn_layer_idx']}: hybrids with attention layers are "
                "not supported"
            )
        if not data.get("rms_norm", True):
            raise ValueError("rms_norm is false: only RMSNorm models are supported")
        check_keys(data, _OFFICIAL_FIELDS | _OFFICIAL_OTHERS | _LABELS, where="config")
        check_keys(ssm, _OFFICIAL_SSM_FIELDS | _OFFICIAL_SSM_OTHERS, where="ssm_cfg")
        fields = _OFFICIAL_DEFAULTS | {k: v for k, v in data.items() if k in _OFFICIAL_FIELDS}
        fields |= {k: v for k, v in ssm.items() if k in _OFFICIAL_SSM_FIELDS}
        if "A_floor" in fields:
            fields["a_floor"] = fields.pop("A_floor")
        if a_activation is not None:
            fields["a_activation"] = a_activation
        elif "a_activation" not in fields:
            warnings.warn(
                "this config does not say how the decay A is activated; taking "
                "a_activation='heavy_tail', that of the weights released since June 2026. Weights "
                "of earlier code need a_activation='softplus'. Pass a_activation, or add it to the "
                "config, to choose",
                stacklevel=2,
            )
        return from_mapping(cls, fields, where="config")

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, with `model_type`, ready for config.json."""
        return {"model_type": "mamba3", **dataclasses.asdict(self)}


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def from_mapping(cls, mapping: dict[str, Any], *, where: str):
    """Build a dataclass from a mapping; an unknown or missing key is an error that helps.

    Args:
        cls: a keyword-only dataclass.
        mapping: its values.
        where: what the mapping is, for the message.
    """
    if not isinstance(mapping, dict):
        raise TypeError(f"{where} must be a mapping of keys to values, got {mapping!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    check_keys(mapping, fields, where=where)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in mapping
    ]
    if missing:
        raise TypeError(f"{where} lacks {', '.join(missing)}")
    return cls(**mapping)


def check_keys(keys: Iterable[Any], known: Iterable[str], *, where: str) -> None:
    """Raise a TypeError that names the first unknown key and the known one nearest to it."""
    known = sorted(known)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise TypeError(f"{where} has no key {key!r}; the nearest is {near[0]!r}")


def coerce(value: Any, annotation: str, name: str) -> Any:
    """Check `value` against a field's annotation; numbers are converted where nothing is lost.

    YAML 1.1 reads 1e-4 as a string and 1.0 as a float, so a float field takes "1e-4" and an int
    field takes 1.0.

    Args:
        value: what was given.
        annotation: of the field, a string: int, float, bool or str, with "| None" at will. A value
            of any other annotation is returned as it is.
        name: of the field, for the message.

    Raises:
        TypeError: the value is not of that type, or would lose by the conversion.
    """
    kind, *others = (part.strip() for part in annotation.split("|"))
    if kind not in ("bool", "str", "float", "int") or (value is None and "None" in others):
        return value
    if kind in ("bool", "str"):
        if isinstance(value, bool if kind == "bool" else str):
            return value
    elif not isinstance(value, bool):
        try:
            number = float(value)
            if kind == "float" and not math.isnan(number):
                return number
            if kind == "int" and number.is_integer():
                return value if isinstance(value, int) else int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{name} must be {annotation}, got {value!r}")
