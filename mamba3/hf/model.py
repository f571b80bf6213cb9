"""Mamba3ForCausalLM: the modules of `Mamba3LM` under the same names, as a transformers model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from ..layers import TMamba3Layer, TMambaLayer
from ..models import Mamba3LM
from ..models.lm import LMOutput
from .cache import Mamba3Cache
from .config import Mamba3HFConfig

# What transformers calls a model's cache: past_key_values before 5.23.
_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _ARGUMENTS else "past_key_values"


@dataclass
class Mamba3CausalLMOutput(ModelOutput):
    """What a model returns.

    Fields:
        loss: mean cross-entropy of the next token, a scalar, or None without labels.
        logits: (B, L, vocab_size); L is shorter with `logits_to_keep`.
        cache: with the state after the last token, or None unless asked for. Before transformers
            5.23 it is past_key_values.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    if CACHE == "cache":
        cache: Mamba3Cache | None = None
    else:
        past_key_values: Mamba3Cache | None = None


class Mamba3ForCausalLM(PreTrainedModel, GenerationMixin):
    """Mamba-3 language model for transformers, with the tensor names of `Mamba3LM`.

    Args:
        config: the architecture.

    Example:
        >>> import torch
        >>> config = Mamba3HFConfig(vocab_size=50, d_model=32, n_layer=2, d_state=16, headdim=16)
        >>> model = Mamba3ForCausalLM(config)
        >>> model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8)
    """

    config_class = Mamba3HFConfig
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = frozenset(
        (*TMamba3Layer.float32_parameters, *TMambaLayer.float32_parameters)
    )

    # What these need is here too: the backbone, the head and config.vocab_size.
    _check_ids = Mamba3LM._check_ids
    new_state = Mamba3LM.new_state
    step = Mamba3LM.step
    float32_parameter_names = Mamba3LM.float32_parameter_names
    parameter_layout = Mamba3LM.parameter_layout

    def __init__(self, config: Mamba3HFConfig):
        super().__init__(config)
        model = Mamba3LM(config.to_mamba3())
        self.backbone, self.lm_head = model.backbone, model.lm_head
        self.post_init()

    @classmethod
    def from_mamba3(cls, model: Mamba3LM) -> Mamba3ForCausalLM:
        """The same model for transformers: its modules and weights themselves, not copies."""
        with torch.device("meta"):
            wrapped = cls(Mamba3HFConfig.from_dict(model.config.to_dict()))
        wrapped.backbone, wrapped.lm_head = model.backbone, model.lm_head
        wrapped.config.dtype = model.lm_head.weight.dtype
        return wrapped.train(model.training)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Mamba3Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        past_key_values: Mamba3Cache | None = None,
        inputs_embeds: None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Mamba3CausalLMOutput | tuple:
        """Predict the next token everywhere.

        Args:
            input_ids: tokens, (B, L) int, that follow those in the cache.
            attention_mask: (B, L), nonzero at real tokens; pads may stand left or right. Of a
                longer mask, which covers what the cache has read, the last L columns count.
            cache: where to go on from; it is moved on. None is the start of a sequence.
            labels: (B, L) int, usually input_ids again: position t is scored on labels[t + 1].
                -100 is not scored, nor are pads.
            use_cache: return a cache; by default only if one is given.
            logits_to_keep: compute the logits of this many last positions only; 0 means all.
            return_dict: False returns a tuple of what is not None; the default is the config's.
            past_key_values: the cache, by the name it had before transformers 5.23.
            inputs_embeds, output_attentions, output_hidden_states: not supported; they are here as
                others pass None for them.

        Returns:
            A `Mamba3CausalLMOutput`.

        Raises:
            TypeError, ValueError: arguments of a wrong type, shape or range.
        """
        if inputs_embeds is not None or output_attentions or output_hidden_states:
            raise ValueError(
                "inputs_embeds, output_attentions and output_hidden_states are not supported by "
                "Mamba3ForCausalLM: leave them out"
            )
        if cache is None:
            cache = past_key_values
        if cache is None and use_cache:
            cache = Mamba3Cache()
        if not isinstance(cache, Mamba3Cache | None):
            raise TypeError(
                f"cache is a {type(cache).__name__}, expected the Mamba3Cache that an earlier call "
                "returned, or none"
            )
        if attention_mask is not None:
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        options = {"labels": labels, "attention_mask": attention_mask}
        out = self._run(input_ids, cache, logits_to_keep=logits_to_keep, **options)
        if cache is not None:
            cache.state, cache.length = out.state, cache.length + input_ids.shape[1]
        # The padding of the vocabulary is left out: nothing may be made of it.
        logits = out.logits[..., : self.config.vocab_size]
        output = Mamba3CausalLMOutput(loss=out.loss, logits=logits, **{CACHE: cache})
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _run(self, input_ids: Tensor, cache: Mamba3Cache | None, **options) -> LMOutput:
        state = None if cache is None else cache.state
        given = options["labels"] is not None or options["attention_mask"] is not None
        if state is not None and input_ids.shape[1] == 1 and not given:
            logits, state = self.step(input_ids, state)
            return LMOutput(logits[:, None], None, state)
        return Mamba3LM.forward(
            self, input_ids, state=state, return_state=cache is not None, **options
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        is_first_iteration: bool | None = False,
        **kwargs,
    ) -> dict:
        """What generate() passes to `forward`."""
        cache = kwargs.get(CACHE)
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the cache has read {cache.get_seq_length()} tokens a row, and input_ids holds "
                f"{input_ids.shape[1]}: pass the whole text, what was read and what is new"
            )
        if next_sequence_length == 1 and not is_first_iteration:
            kwargs["attention_mask"] = None  # a token just made is never a pad
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict, *args) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}, but Mamba-3 "
                "has one kind of cache: leave it out"
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = Mamba3Cache()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the backward pass computes anew what blocks would keep."""
        return self.backbone.recompute is not None

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func=None, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise ValueError(
                f"every_n_layers is {every_n_layers}, but all blocks are checkpointed or none: "
                "leave it out"
            )
        self.backbone.recompute = "full" if enable else None

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.backbone.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.backbone.embedding = value

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """As in transformers; the rows are padded as config.pad_vocab_size_multiple says."""
        if pad_to_multiple_of is not None:
            self.config.pad_vocab_size_multiple = pad_to_multiple_of
        multiple = self.config.pad_vocab_size_multiple
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        embedding = super().resize_token_embeddings(size, multiple, mean_resizing)
        self.config.vocab_size = size
        return embedding

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but a tensor that is missing or does not fit is an error.

        Raises:
            ValueError: the message names every missing, unexpected and mis-shaped tensor.
        """
        # Else transformers raises first, and names nothing.
        kwargs["ignore_mismatched_sizes"] = True
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        problems = [f"missing: {name}" for name in sorted(info["missing_keys"])]
        problems += [f"unexpected: {name}" for name in sorted(info["unexpected_keys"])]
        problems += [
            f"wrong shape: {name} is {list(shape)}, expected {list(expected)}"
            for name, shape, expected in sorted(info["mismatched_keys"])
        ]
        if model.config.tie_embeddings and "lm_head.weight" not in model.all_tied_weights_keys:
            problems.append(
                "different: lm_head.weight and backbone.embedding.weight, though tie_embeddings "
                "is true; a model with a head of its own needs tie_embeddings false"
            )
        if problems:
            raise ValueError("\n  ".join(["the weights do not fit the config:", *problems]))
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: transformers would copy this package's files one by one; see `export`."""

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `Mamba3LM` did it, and `from_pretrained` leaves no weight without a value."""
