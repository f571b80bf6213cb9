"""Mamba3LM: embedding, blocks, final norm, head; one path for training, prefill and decoding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..config import Mamba3Config
from ..layers import Block, MambaState, RMSNorm
from ..layers.layout import EMBEDDING, Layout
from ..layers.ragged import Ragged
from ..ops import Mamba3State, linear_cross_entropy
from .init import init_weights

IGNORE = -100


class LMState(NamedTuple):
    """Decoding state of a model: one `Mamba3State` or `MambaState` a layer, as the layer is."""

    layers: tuple[Mamba3State | MambaState, ...]

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.layers[0].batch_size

    def reorder(self, index: Tensor) -> LMState:
        """Pick sequences by number, repeats allowed, as beam search does; index is (B',) int."""
        return LMState(tuple(layer.reorder(index) for layer in self.layers))


class LMOutput(NamedTuple):
    """What a model returns.

    Fields:
        logits: (B, L, V), V the padded vocabulary; L is shorter with `logits_to_keep`. None with
            `return_logits=False`.
        loss: mean cross-entropy of the next token, a scalar, or None without labels.
        state: the state after the last token, or None unless asked for.
    """

    logits: Tensor | None
    loss: Tensor | None
    state: LMState | None


class Mamba3LM(nn.Module):
    """Language model of Mamba-3 layers, Mamba-1 layers or both, with the official tensor names.

    Args:
        config: the architecture.
        device: where to put the weights; "meta" allocates nothing.
        dtype: of the weights, but for those that stay float32 (`float32_parameter_names`).

    Example:
        >>> import torch
        >>> config = Mamba3Config(vocab_size=50, d_model=32, n_layer=2, d_state=16, headdim=16)
        >>> model = Mamba3LM(config)
        >>> ids = torch.randint(50, (2, 10))
        >>> model(ids, labels=ids).loss.backward()
    """

    def __init__(
        self,
        config: Mamba3Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = config
        weights = {"device": device, "dtype": dtype}
        self.backbone = Backbone(config, **weights)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, **weights)
        self.tie_weights()
        init_weights(self)

    def tie_weights(self) -> None:
        """Make lm_head and the embedding one parameter, if the config ties them."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        state: LMState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        return_state: bool = False,
        logits_to_keep: int = 0,
        return_logits: bool = True,
    ) -> LMOutput:
        """Predict the next token everywhere.

        Args:
            input_ids: tokens, (B, L) int, L >= 1, each in [0, vocab_size).
            labels: (B, L) int, usually input_ids again: position t is scored on labels[t + 1].
                -100 is not scored, nor are pads and the first token of a packed sequence.
            state: where to go on from, as returned; None is the start of a sequence.
            attention_mask: (B, L), nonzero at real tokens; pads may stand left or right.
            cu_seqlens: boundaries (sequences + 1,) of sequences packed in one row, B = 1.
            seq_idx: (B, L) int; runs of equal numbers in a row are sequences of their own.
            return_state: also return the state after the last real token.
            logits_to_keep: compute the logits of this many last positions only; 0 means all.
                Labels need all.
            return_logits: False, with labels, leaves the logits out. They then never exist whole,
                which for a large vocabulary is most of the memory of training.

        Returns:
            An `LMOutput`. The loss is nan if no position is scored.

        Raises:
            ValueError: shapes or values that do not fit.
        """
        self._check_ids(input_ids, "input_ids", "(B, L)", 2)
        if input_ids.shape[1] == 0:
            raise ValueError("input_ids has no token: expected (B, L) with L >= 1")
        if labels is not None:
            if labels.shape != input_ids.shape:
                raise ValueError(
                    f"labels have shape {tuple(labels.shape)}, expected input_ids' "
                    f"{tuple(input_ids.shape)}"
                )
            self._check_ids(labels, "labels", "(B, L)", 2, ignore=IGNORE)
            if logits_to_keep:
                raise ValueError("labels need every logit: leave logits_to_keep at 0")
        elif not return_logits:
            raise ValueError("return_logits=False leaves only the loss: pass labels")
        ragged = Ragged.of(input_ids.shape, attention_mask, cu_seqlens, seq_idx)
        if ragged is not None:
            input_ids, cu_seqlens = ragged.pack(input_ids), ragged.cu_seqlens

        x, state = self.backbone(
            input_ids, state=state, cu_seqlens=cu_seqlens, return_state=return_state
        )
        if ragged is not None:
            x = ragged.unpack(x)
        targets = None if labels is None else next_tokens(labels, attention_mask, ragged)
        if not return_logits and _is_plain(self.lm_head):
            features = x[:, :-1].flatten(0, 1)
            return LMOutput(
                None, linear_cross_entropy(features, self.lm_head.weight, targets), state
            )
        logits = self.lm_head(x[:, -logits_to_keep:])
        loss = None
        if targets is not None:
            wide = torch.promote_types(logits.dtype, torch.float32)
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).to(wide), targets, ignore_index=IGNORE
            )
        return LMOutput(logits if return_logits else None, loss, state)

    def step(
        self, input_ids: Tensor, state: LMState, *, inplace: bool = False
    ) -> tuple[Tensor, LMState]:
        """Read one token a sequence and predict the next.

        Args:
            input_ids: (B,) or (B, 1) int.
            state: of B sequences.
            inplace: update the state's tensors where they are and return them, recording no
                gradient. False (the default) leaves them as they are.

        Returns:
            Logits (B, V), V the padded vocabulary, and the new state.
        """
        if input_ids.dim() == 2 and input_ids.shape[1] == 1:
            input_ids = input_ids.squeeze(1)
        self._check_ids(input_ids, "input_ids", "(B,) or (B, 1)", 1)
        x, state = self.backbone.step(input_ids, state, inplace=inplace)
        return self.lm_head(x), state

    def new_state(self, batch: int) -> LMState:
        """The state of `batch` sequences before their first token."""
        return LMState(tuple(block.mixer.new_state(batch) for block in self.backbone.layers))

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """Continue prompts; the options are those of `mamba3.generate.generate`."""
        from ..generate import generate

        return generate(self, input_ids, max_new_tokens, **options)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        a_activation: str | None = None,
    ) -> Mamba3LM:
        """Load a model by name, from a folder or the Hub; see `mamba3.hub.load_pretrained`."""
        from ..hub import load_pretrained

        return load_pretrained(
            name_or_path,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            dtype=dtype,
            device=device,
            a_activation=a_activation,
        )

    def save_pretrained(self, path: str | Path, **options) -> None:
        """Write config.json and safetensors; the options are those of `mamba3.hub`."""
        from ..hub import save_pretrained

        save_pretrained(self, path, **options)

    def push_to_hub(self, repo_id: str, **options) -> str:
        """Upload to the Hugging Face Hub; the options are those of `mamba3.push.push_to_hub`."""
        from ..push import push_to_hub

        return push_to_hub(self, repo_id, **options)

    def float32_parameter_names(self) -> set[str]:
        """Names of the parameters that stay float32 in a half-precision model."""
        return {
            f"{prefix}.{name}"
            for prefix, module in self.named_modules()
            for name in getattr(module, "float32_parameters", ())
            if module._parameters.get(name) is not None
        }

    def parameter_layout(self) -> Layout:
        """What embedding and head are, for optimizers; the layers speak for themselves."""
        return {"backbone.embedding.weight": EMBEDDING, "lm_head.weight": EMBEDDING}

    def _check_ids(self, ids: Tensor, name: str, form: str, dims: int, ignore: int | None = None):
        if ids.dim() != dims or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"expected {name} {form} of int64 or int32, got {ids.dtype} of shape "
                f"{tuple(ids.shape)}"
            )
        # On a GPU this would wait for the device at every call; compiled code cannot branch on it.
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
            return
        if ignore is not None:
            ids = ids.masked_fill(ids == ignore, 0)
        low, high = (int(t) for t in torch.aminmax(ids))
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"{name} holds {low if low < 0 else high}, expected tokens in "
                f"[0, {self.config.vocab_size}): is this the model's own tokenizer?"
            )


class Backbone(nn.Module):
    """Embedding, blocks and final norm of a `Mamba3LM`."""

    def __init__(self, config: Mamba3Config, *, device=None, dtype=None):
        super().__init__()
        weights = {"device": device, "dtype": dtype}
        self.residual_in_fp32 = config.residual_in_fp32
        # How training saves memory, see `recomputed`; no part of the architecture.
        self.recompute: str | None = None
        # Without nn.Embedding's own init, which on meta costs a second of imports.
        table = torch.empty(config.padded_vocab_size, config.d_model, **weights)
        self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, i, **weights) for i in range(config.n_layer))
        self.norm_f = RMSNorm(config.d_model, eps=config.norm_eps, **weights)

    def forward(
        self,
        input_ids: Tensor,
        *,
        state: LMState | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, LMState | None]:
        """From tokens (B, L) to normalised features (B, L, D)."""
        x, added, states = self._embed(input_ids), None, []
        options = {"cu_seqlens": cu_seqlens, "return_state": return_state}
        recompute = self.recompute if torch.is_grad_enabled() else None
        for i, block in enumerate(self.layers):
            before = None if state is None else state.layers[i]
            if recompute is None:
                (x, added), after = block(x, added=added, state=before, defer=True, **options)
            else:
                # One tensor is all that such a block keeps.
                x, after = recomputed(block, x, kind=recompute, state=before, **options)
            states.append(after)
        x = x if added is None else x + added
        return self.norm_f(x), LMState(tuple(states)) if return_state else None

    def step(self, input_ids: Tensor, state: LMState, *, inplace: bool) -> tuple[Tensor, LMState]:
        """From one token a sequence (B,) to features (B, D)."""
        x = self._embed(input_ids)
        states = []
        for block, before in zip(self.layers, state.layers, strict=True):
            x, after = block.step(x, before, inplace=inplace)
            states.append(after)
        return self.norm_f(x), LMState(tuple(states))

    def _embed(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) if self.residual_in_fp32 else x


def recomputed(block: nn.Module, x: Tensor, *, kind: str, **options) -> Any:
    """Run a block that keeps little for the backward pass, which computes the rest anew.

    Args:
        kind: "full" keeps the block's input alone; "selective" what linear layers give, too,
            which is the most expensive to compute.
    """
    contexts = {}
    if kind == "selective":
        # Those of linear layers: the scan's own are batched, and changed in place.
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, products)
    # Blocks draw no random numbers.
    return checkpoint(
        block, x, use_reentrant=False, preserve_rng_state=False, **contexts, **options
    )


def next_tokens(labels: Tensor, attention_mask: Tensor | None, ragged: Ragged | None) -> Tensor:
    """What every position but the last is scored on: labels one place on, (B * (L - 1),).

    Args:
        labels: (B, L), -100 where nothing is scored.
        attention_mask: (B, L) or None; pads are not scored.
        ragged: where sequences begin; what the token before one predicts is not scored.
    """
    labels = labels.long()
    if attention_mask is not None:
        labels = labels.masked_fill(~attention_mask.bool(), IGNORE)
    if ragged is not None:
        starts = ragged.starts if ragged.index is None else ragged.index[ragged.starts]
        labels = labels.flatten().index_fill(0, starts, IGNORE).view(ragged.shape)
    return labels[:, 1:].flatten()


def _is_plain(head: nn.Module) -> bool:
    """Whether calling a head is nothing but a product with its weight (no LoRA, no hooks)."""
    return type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
