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

A model's layers are of Mamba-3 unless `layers` says otherwise. What Mamba-1 layers are has a group
of its own, `mamba`, since names such as d_state and expand mean other things there.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .fields import coerce_sizes, from_mapping

A_ACTIVATIONS = ("heavy_tail", "softplus")
KINDS = ("mamba3", "mamba")

# Keys of our own config.json that are not fields: what kind of file it is, and what transformers
# writes beside.
TRANSFORMERS_KEYS = {"architectures", "auto_map", "dtype", "transformers_version"}
TRANSFORMERS_KEYS |= {"bos_token_id", "eos_token_id", "pad_token_id"}
LABELS = {"model_type"} | TRANSFORMERS_KEYS

# The fields that are about Mamba-3 layers alone.
_MAMBA3_FIELDS = ("d_state", "expand", "headdim", "ngroups", "is_mimo", "mimo_rank")
_MAMBA3_FIELDS += ("rope_fraction", "is_outproj_norm", "a_activation", "a_floor")
_MAMBA3_FIELDS += ("dt_min", "dt_max", "dt_init_floor", "angle_init_scale")


@dataclass(frozen=True, kw_only=True)
class MambaSizes:
    """What the Mamba-1 layers of a model are; the defaults are the official ones.

    Args:
        d_state: state size N of a channel.
        d_conv: tokens that the convolution sees.
        expand: inner width over d_model.
        dt_rank: rank of the step size's projection; None is d_model / 16, rounded up.
        bias, conv_bias: whether the projections and the convolution have one.
        dt_min, dt_max, dt_init_floor: initial step sizes, log-uniform, at least the floor.
        dt_scale: factor on the bound of dt_proj's initial weights.
        maps_norm_eps: epsilon of an RMSNorm without weights over the step size before its
            projection, B and C, as Falcon-Mamba has them; None is none.

    Raises:
        TypeError, ValueError: a value of a wrong type, or out of range.
    """

    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int | None = None
    bias: bool = False
    conv_bias: bool = True
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_init_floor: float = 1e-4
    dt_scale: float = 1.0
    maps_norm_eps: float | None = None

    def __post_init__(self):
        coerce_sizes(self)
        _check_range(self)

    def rank(self, d_model: int) -> int:
        """`dt_rank`, or what None stands for in a model of this width."""
        return math.ceil(d_model / 16) if self.dt_rank is None else self.dt_rank


@dataclass(frozen=True, kw_only=True)
class Mamba3Config:
    """Architecture of a `Mamba3LM`.

    Args:
        vocab_size: number of tokens; rows of the embedding are `padded_vocab_size`.
        d_model: width of the residual stream.
        n_layer: number of blocks.
        d_intermediate: MLP width, rounded up to `mlp_multiple`; 0 means no MLP.
        layers: kind of the blocks' mixers, "mamba3" or "mamba" (Mamba-1); or a list of n_layer of
            these, for a hybrid.
        mamba: what the Mamba-1 layers are, a `MambaSizes` or a mapping of its fields.
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

    The fields from d_state to angle_init_scale are about Mamba-3 layers, `mamba` is about Mamba-1
    layers: where a model has none of a kind, what is about it must be left at its default, and is
    no part of config.json.

    Raises:
        TypeError: a key that does not exist, with the nearest one that does.
        ValueError: values that do not fit together.
    """

    vocab_size: int
    d_model: int
    n_layer: int
    d_intermediate: int = 0
    layers: tuple[str, ...] | str = "mamba3"
    mamba: MambaSizes = field(default_factory=MambaSizes)
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
        coerce_sizes(self, may_be_zero=("d_intermediate", "rope_fraction", "angle_init_scale"))
        object.__setattr__(self, "layers", _checked_layers(self.layers, self.n_layer))
        object.__setattr__(self, "mamba", _checked_sizes(self.mamba, self.d_model))
        self._check_unused()
        if "mamba3" in self.kinds:
            self._check_mamba3()

    def _check_unused(self) -> None:
        """What is set for layers that the model does not have would do nothing."""
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != _default(f)]
        if "mamba" not in self.kinds and "mamba" in changed:
            raise ValueError(
                "the group 'mamba' is about Mamba-1 layers, and the model has none: leave it out, "
                "or say layers='mamba'"
            )
        if "mamba3" not in self.kinds and (others := [n for n in changed if n in _MAMBA3_FIELDS]):
            near = [name for name in others if name in MambaSizes.__dataclass_fields__]
            raise ValueError(
                f"{', '.join(others)}: about Mamba-3 layers, and the model has none; leave it out"
                + (f", or say {', '.join(f'mamba.{name}' for name in near)}" if near else "")
            )

    def _check_mamba3(self) -> None:
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
        _check_range(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer's mixer, "mamba3" or "mamba"."""
        return (self.layers,) * self.n_layer if isinstance(self.layers, str) else self.layers

    @property
    def form(self) -> str:
        """What the layers are, in words."""
        mamba3 = f"MIMO of rank {self.mimo_rank}" if self.is_mimo else "SISO"
        if isinstance(self.layers, str):
            return mamba3 if self.layers == "mamba3" else "Mamba-1"
        count = Counter(self.layers)
        return f"hybrid of {count['mamba']} Mamba-1 and {count['mamba3']} {mamba3}"

    @property
    def d_inner(self) -> int:
        """Inner width E = H * P of Mamba-3 layers."""
        return self.expand * self.d_model

    @property
    def n_heads(self) -> int:
        """Number of heads H of Mamba-3 layers."""
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
        """Read a parsed config.json, in our own form (`to_dict`) or any other of `mamba3.forms`.

        Args:
            data: the parsed file.
            a_activation: overrides what the file says or leaves open. None takes the file's.

        Returns:
            The config. An official Mamba-3 file that leaves a_activation open gives a warning.

        Raises:
            TypeError: unknown or missing keys, or a value of the wrong type.
            ValueError: another kind of model, or values that do not fit together.
        """
        from .forms import READERS, form_of

        if (reader := READERS.get(form_of(data))) is not None:
            return reader(data, a_activation=a_activation)
        own = {key: value for key, value in data.items() if key not in LABELS}
        if a_activation is not None:
            own["a_activation"] = a_activation
        return from_mapping(cls, own, where="config")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, with `model_type`, ready for config.json.

        Those about layers that the model does not have are left out.
        """
        data = {"model_type": "mamba3", **dataclasses.asdict(self)}
        unused = () if "mamba3" in self.kinds else _MAMBA3_FIELDS
        unused += () if "mamba" in self.kinds else ("layers", "mamba")
        if not isinstance(self.layers, str):
            data["layers"] = list(self.layers)
        return {name: value for name, value in data.items() if name not in unused}


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def _check_range(config: Mamba3Config | MambaSizes) -> None:
    if config.dt_max < config.dt_min:
        raise ValueError(f"dt_max must be at least dt_min, got {config.dt_max} < {config.dt_min}")


def _checked_layers(layers: Any, n_layer: int) -> tuple[str, ...] | str:
    """One kind for all layers, or the kind of each; of equal ones, the first form."""
    given = (layers,) if isinstance(layers, str) else layers
    if not isinstance(given, list | tuple) or any(kind not in KINDS for kind in given):
        raise ValueError(f"layers must be one of {KINDS}, or a list of these, got {layers!r}")
    if not isinstance(layers, str) and len(given) != n_layer:
        raise ValueError(
            f"layers names {len(given)} kinds, and the model has {n_layer} layers: name one for "
            "each, or one for all"
        )
    return given[0] if len(set(given)) == 1 else tuple(given)


def _checked_sizes(given: Any, d_model: int) -> MambaSizes:
    """Those that are given; the usual rank is left open, since some forms do and some do not."""
    sizes = given
    if not isinstance(given, MambaSizes):
        try:
            sizes = from_mapping(MambaSizes, given, where="the group")
        except (TypeError, ValueError) as error:
            raise type(error)(f"mamba: {error}") from error
    is_usual = sizes.dt_rank == MambaSizes().rank(d_model)
    return dataclasses.replace(sizes, dt_rank=None) if is_usual else sizes


def _default(of: dataclasses.Field) -> Any:
    return of.default if of.default_factory is dataclasses.MISSING else of.default_factory()
