"""Generation: one pass over the prompt, then one token a step from the recurrent state.

`stream` yields tokens as they come, `generate` collects them. A conversation carries on from the
state that `generate` returns. On a GPU the steps are replayed from a recording (`decode_graph`).

    B   rows of the batch
    L   length of the longest prompt
    V   columns of the logits, config.padded_vocab_size; ids from config.vocab_size up are
        padding of the vocabulary and are never produced
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decode_graph import Decoder

if TYPE_CHECKING:
    from mamba3.models.lm import LMState, Mamba3LM

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)


def generate(
    model: Mamba3LM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    state: LMState | None = None,
    return_state: bool = False,
    on_step: Callable[[Tensor], Tensor | None] | None = None,
) -> Tensor | tuple[Tensor, LMState]:
    """Continue each prompt of a batch by at most `max_new_tokens` tokens.

    Args:
        model: the language model; its training flag makes no difference and stays as it is.
        input_ids: prompts, (B, L) integers, on the model's device.
        max_new_tokens: the most new tokens, at least 1; fewer when every row has ended.
        attention_mask: (B, L), 1 or True at real tokens, 0 or False at padding, which may lie on
            either side. None (the default): every token is real.
        temperature: 0 (the default) takes the most likely token; above 0 samples, from
            softmax(logits / temperature).
        top_k: sample among the `top_k` most likely tokens, at least 1. Default: all.
        top_p: sample among the fewest tokens whose probabilities reach `top_p`, in (0, 1].
        min_p: sample among tokens at least `min_p` times as likely as the likeliest, in [0, 1].
        repetition_penalty: the logit of a token that the row already holds (prompt or new, not
            padding) is divided by it where positive and multiplied by it where negative; above 1
            discourages repetition, 1 (the default) does nothing.
        eos_token_id: a row ends when it produces this token (or one of these). Default: none.
        pad_token_id: fills a row after its end. Default: the (first) end token.
        seed: of the sampling: the same call with the same seed gives the same tokens, and the
            global random state is neither read nor changed. None uses the global random state.
        state: continue from this state of the same B rows (as returned by an earlier call);
            `input_ids` are then the tokens that follow it.
        return_state: also return the state after all real tokens of the result.
        on_step: called with each step's tokens, (B,) int64, as soon as they are known. Rows where
            it returns True, (B,) bool, end with this token; None ends no row.

    Returns:
        (B, L + new) int64: padding first, then the prompt, then the new tokens. A prompt padded
        on the right is thus moved, so that new tokens follow its last real one. With
        `return_state`, a tuple of this and the state.

    Raises:
        TypeError, ValueError: arguments of a wrong type, shape or range; a row without a token.

    Example:
        >>> prompt = torch.tensor([tokenizer.encode_prompt("8+7=")])
        >>> out = generate(model, prompt, 8, eos_token_id=tokenizer.eos_token_id)
        >>> tokenizer.decode(out[0])
        '8+7=15'
    """
    request = _Request.checked(
        model, input_ids, max_new_tokens, attention_mask, eos_token_id, pad_token_id, state
    )
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    logits, prompt_state = _read_prompt(model, request)
    steps = _decode(model, request, sampler, logits, prompt_state, on_step)
    new, ended = (torch.stack(each, dim=1) for each in zip(*steps, strict=True))
    result = torch.cat([request.input_ids, new], dim=1)
    if not return_state:
        return result
    # The last tokens were never fed, and rows that ended early were fed more than they said. One
    # masked pass over the new tokens gives each row the state that it would have alone. It is not
    # made in inference mode, so that the state can be trained from.
    with torch.no_grad():
        _, state = _forward(model, new, ~ended if ended.any() else None, prompt_state)
    return result, state


def stream(
    model: Mamba3LM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    state: LMState | None = None,
) -> Iterator[Tensor]:
    """Like `generate`, but yield each step's tokens, (B,) int64, as soon as they are known.

    Arguments and errors are those of `generate`; a bad argument raises at the call, not at the
    first token. The iterator ends when every row has ended, and may be dropped at any time.
    """
    request = _Request.checked(
        model, input_ids, max_new_tokens, attention_mask, eos_token_id, pad_token_id, state
    )
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty, seed)

    def steps():
        for tokens, _ in _decode(model, request, sampler, *_read_prompt(model, request)):
            yield tokens

    return steps()


@torch.inference_mode()
def _read_prompt(model: Mamba3LM, request: _Request) -> tuple[Tensor, LMState]:
    """The logits (B, V) after the prompt, and the state."""
    logits, state = _forward(model, request.input_ids, request.mask, request.state)
    if not torch.isfinite(logits[:, : model.config.vocab_size]).all():
        raise ValueError(
            "the logits after the prompt hold NaN or Inf; check the model's weights, and the "
            "state if one was given"
        )
    return logits, state


def _decode(
    model: Mamba3LM,
    request: _Request,
    sampler: Sampler,
    logits: Tensor,
    state: LMState,
    on_step: Callable[[Tensor], Tensor | None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each step's tokens (B,), and which rows (B,) had ended before it.

    It goes on from what came of the prompt; the state is left as it is.
    """
    ids, vocab_size = request.input_ids, model.config.vocab_size
    generator = None
    if sampler.seed is not None:
        generator = torch.Generator(ids.device).manual_seed(sampler.seed)
    # Inference mode is left at every yield: it must not reach the caller's code, and tokens made
    # outside of it can be trained on.
    with torch.inference_mode():
        seen = _tokens_seen(ids, request.mask, vocab_size)
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    can_end = on_step is not None or request.eos.numel()
    with contextlib.closing(Decoder(model, state, request.max_new_tokens - 1)) as decoder:
        for tokens_left in reversed(range(request.max_new_tokens)):
            with torch.inference_mode():
                chosen = sampler(logits[:, :vocab_size].float(), seen, generator)
                seen.scatter_(1, chosen[:, None], True)
            tokens = chosen.masked_fill(done, request.pad_token_id)
            before, done = done, done | torch.isin(chosen, request.eos)
            if on_step is not None and (more := on_step(tokens)) is not None:
                done = done | more.to(done)
            yield tokens, before
            if tokens_left == 0 or (can_end and done.all()):
                return
            # A row that has ended is still fed what it would say: pad_token_id may be any number.
            logits = decoder(chosen)


def _forward(
    model: Mamba3LM, ids: Tensor, mask: Tensor | None, state: LMState | None
) -> tuple[Tensor, LMState]:
    """One pass over ids (B, L): the last position's logits (B, V) and the state after it."""
    if mask is not None:
        ids = ids.masked_fill(~mask, 0)
    out = model(ids, attention_mask=mask, state=state, return_state=True, logits_to_keep=1)
    return out.logits[:, -1], out.state


@dataclass(frozen=True)
class Sampler:
    """Turns logits into tokens; its fields are the arguments of `generate`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or a positive number, got {self.temperature}"
            )
        if self.top_k is not None and operator.index(self.top_k) < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; None keeps all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; None keeps all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; None keeps all tokens")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty must be a positive number (1 does nothing), got "
                f"{self.repetition_penalty}"
            )
        filters = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if filters and self.temperature == 0:
            _warn_once(
                f"{', '.join(filters)} ignored: temperature is 0 (greedy); "
                "pass temperature=1.0 to sample"
            )

    def __call__(self, logits: Tensor, seen: Tensor, generator: torch.Generator | None) -> Tensor:
        """Choose tokens (B,) from logits (B, V) float32, given the tokens seen (B, V) bool."""
        if self.repetition_penalty != 1:
            logits = penalize_repetition(logits, seen, self.repetition_penalty)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        # Largest logit at 0 first, so that a tiny temperature does not overflow.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        if self.min_p is not None:
            logits = keep_min_p(logits, self.min_p)
        return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by `penalty`, multiply negative ones by it."""
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the `k` largest logits of each row to -inf."""
    top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, top.indices, top.values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Set to -inf all but the fewest tokens of each row whose probabilities sum to `p`."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    before[..., 0] = 0  # rounding must not drop the likeliest token
    ordered = ordered.masked_fill(before >= p, -torch.inf)
    return torch.empty_like(logits).scatter(-1, order, ordered)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set to -inf the tokens less than `p` times as likely as the likeliest of their row."""
    probabilities = logits.softmax(dim=-1)
    unlikely = probabilities < p * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(unlikely, -torch.inf)


def _tokens_seen(ids: Tensor, mask: Tensor | None, vocab_size: int) -> Tensor:
    """Which tokens each row holds, (B, vocab_size) bool; padding does not count."""
    if mask is None:
        mask = torch.ones_like(ids)
    # Counts, not flags: the padding token may stand in the prompt too.
    counts = ids.new_zeros(ids.shape[0], vocab_size)
    return counts.scatter_add_(1, ids * mask, mask.long()) > 0


def left_pad(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of each row, wherever it is, to the left; the rest keeps its order.

    Args:
        input_ids: (B, L) integers.
        attention_mask: (B, L) bool, False at padding.
    """
    order = attention_mask.long().argsort(dim=1, stable=True)
    return input_ids.gather(1, order), attention_mask.gather(1, order)


@dataclass(frozen=True)
class _Request:
    """What to generate: checked arguments, with padding on the left."""

    input_ids: Tensor
    mask: Tensor | None
    max_new_tokens: int
    eos: Tensor
    pad_token_id: int
    state: LMState | None

    @classmethod
    def checked(
        cls,
        model: Mamba3LM,
        input_ids: Tensor,
        max_new_tokens: int,
        attention_mask: Tensor | None,
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int | None,
        state: LMState | None,
    ) -> _Request:
        """Check what the user passed and bring it to this form."""
        _check_ids(input_ids, model)
        ids, mask = input_ids.long(), None
        if attention_mask is not None:
            ids, mask = left_pad(ids, _checked_mask(attention_mask, ids))
            mask = None if mask.all() else mask
        vocab_size = model.config.vocab_size
        real = ids if mask is None else ids[mask]
        if wrong := real[(real < 0) | (real >= vocab_size)].tolist():
            raise ValueError(
                f"input_ids holds token {wrong[0]}, but this model knows 0 to {vocab_size - 1}; "
                "was the prompt made with another tokenizer?"
            )
        if operator.index(max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if eos_token_id is None:
            eos_token_id = ()
        elif not isinstance(eos_token_id, Sequence):
            eos_token_id = (eos_token_id,)
        for token in eos_token_id:
            if not 0 <= operator.index(token) < vocab_size:
                raise ValueError(
                    f"eos_token_id is {token}, but this model knows 0 to {vocab_size - 1}; it "
                    "would never end"
                )
        if pad_token_id is None:
            pad_token_id = eos_token_id[0] if eos_token_id else 0
        eos = torch.tensor(eos_token_id, dtype=torch.int64, device=ids.device)
        return cls(ids, mask, max_new_tokens, eos, operator.index(pad_token_id), state)


def _check_ids(input_ids: Tensor, model: Mamba3LM) -> None:
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a tensor of shape (B, L), got {type(input_ids).__name__}; "
            "wrap lists with torch.tensor(...)"
        )
    dtype = input_ids.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"input_ids must be integers, got {dtype}; convert with .long()")
    if input_ids.dim() != 2:
        raise ValueError(
            f"input_ids must have shape (B, L), got {tuple(input_ids.shape)}; a single prompt is "
            "input_ids[None]"
        )
    if input_ids.numel() == 0:
        raise ValueError(
            f"input_ids must hold at least one token a row, got shape {tuple(input_ids.shape)}; "
            "start an empty prompt with the beginning-of-sequence token"
        )
    device = next(model.parameters()).device
    if input_ids.device != device:
        raise ValueError(
            f"input_ids are on {input_ids.device} and the model is on {device}; move one of them "
            "with .to(device)"
        )


def _checked_mask(attention_mask: Tensor, ids: Tensor) -> Tensor:
    """The mask as bool, after checking that it fits ids (B, L)."""
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if attention_mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got "
            f"{tuple(attention_mask.shape)}"
        )
    mask = attention_mask.to(ids.device).bool()
    if not torch.equal(mask.to(attention_mask), attention_mask.to(ids.device)):
        raise ValueError("attention_mask must hold 1 (real) and 0 (padding) only")
    if empty := (~mask.any(dim=1)).nonzero().flatten().tolist():
        raise ValueError(
            f"row {empty[0]} of attention_mask is all padding; every prompt needs a real token"
        )
    return mask
