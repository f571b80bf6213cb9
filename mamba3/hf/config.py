"""Mamba3HFConfig: `Mamba3Config` as a configuration of transformers, with the same flat fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from ..config import TRANSFORMERS_KEYS, Mamba3Config
from ..fields import check_keys, from_mapping
from ..forms import form_of
from .export import AUTO_MAP, write_code

_FIELDS = [field.name for field in dataclasses.fields(Mamba3Config)]
# What transformers sets in any configuration beside its fields.
_COMMON = {"attn_implementation", "auto_map", "experts_implementation", "model_type"}
_COMMON |= {"name_or_path", "num_labels", "output_attentions", "quantization_config"}
_COMMON |= {"torch_dtype", "use_cache"}


class Mamba3HFConfig(PretrainedConfig):
    """Architecture of a `Mamba3ForCausalLM`.

    Args:
        fields: those of `mamba3.Mamba3Config`, or the names of transformers for them: hidden_size,
            num_hidden_layers, intermediate_size, state_size, tie_word_embeddings.
        others: those of any configuration of transformers, such as dtype or eos_token_id.

    Raises:
        TypeError: a key that does not exist, with the nearest one that does; vocab_size, d_model or
            n_layer missing.
        ValueError: values that do not fit together.
    """

    model_type = "mamba3"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "d_intermediate",
        "state_size": "d_state",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(self, **values: Any):
        values = {self.attribute_map.get(key, key): value for key, value in values.items()}
        fields = {name: values.pop(name) for name in _FIELDS if name in values}
        common = {*PretrainedConfig().to_dict(), *GenerationConfig().to_dict(), *_COMMON}
        known = {*_FIELDS, *self.attribute_map, *common}
        check_keys([key for key in values if not key.startswith("_")], known, where="config")
        config = from_mapping(Mamba3Config, fields, where="config")
        for name, value in dataclasses.asdict(config).items():
            setattr(self, name, value)
        super().__init__(**values)

    def to_mamba3(self) -> Mamba3Config:
        """The architecture alone."""
        return Mamba3Config(**{name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Read a parsed config.json, also of the official form; see `Mamba3Config.from_dict`.

        Raises:
            TypeError, ValueError: as there; a model that transformers has a class of its own for.
        """
        form = form_of(config_dict)
        if form == "transformers":
            raise ValueError(
                f"transformers has a class of its own for model_type {config_dict['model_type']!r}:"
                " load it with AutoModelForCausalLM, or have mamba3.load_model read it and pass "
                "the model to Mamba3ForCausalLM.from_mamba3"
            )
        if form == "mamba_ssm":
            a_activation = kwargs.pop("a_activation", None)
            official = {k: v for k, v in config_dict.items() if not k.startswith("_")}
            config_dict = Mamba3Config.from_dict(official, a_activation=a_activation).to_dict()
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: every field, and of transformers' keys those that are set."""
        written = super().to_dict()
        self.dict_dtype_to_str(written)
        kept = {
            key: written[key] for key in sorted(TRANSFORMERS_KEYS) if written.get(key) is not None
        }
        if hasattr(self, "quantization_config"):
            kept["quantization_config"] = super().to_diff_dict()["quantization_config"]
        return self.to_mamba3().to_dict() | kept

    def save_pretrained(self, save_directory, **kwargs) -> None:
        """As in transformers; a model with code on the Hub is saved with that code."""
        if hasattr(self, "auto_map"):
            self.auto_map = dict(AUTO_MAP)
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_code(save_directory)
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would copy this package's files one by one; see `export`."""
