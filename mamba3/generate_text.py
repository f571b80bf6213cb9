"""Generation of text: prompts in, text out as it comes, ended by tokens or by strings.

Tokens are not text: a character may take several of them, and a string that ends a text may begin
in one token and end in another. `TextDecoder` gives text only when later tokens cannot change it,
and `StopFinder` holds back what may yet turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .generate import generate

if TYPE_CHECKING:
    from .data.tokenizer import Tokenizer
    from .models.lm import LMState, Mamba3LM

UNDECODABLE = "\ufffd"
UNFINISHED = 3  # marks that the bytes of an unfinished character are decoded to, at most
CONTEXT = 8  # tokens, of at least a byte each: more than a character takes


class Completion(NamedTuple):
    """What a model made of one prompt.

    text: the new text, cut before a stop string.
    ended_by: "eos" (or another token that ends texts), "stop" (a stop string) or "length".
    ids: the new tokens, those of eos or of a stop string included.
    """

    text: str
    ended_by: str
    ids: list[int]


def generate_text(
    model: Mamba3LM,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop: str | Sequence[str] = (),
    stream: Callable[[int, str], None] | None = None,
    batch_size: int = 16,
    **options,
) -> list[str]:
    """Continue texts.

    Args:
        model: the language model.
        tokenizer: the model's, of `load_tokenizer`.
        prompts: a text, or several; a list of ids stands for a prompt that is encoded already.
        max_new_tokens: the most new tokens of each, default 64.
        stop: strings that end a text, which is cut before the first of them.
        stream: called with the number of a prompt and a piece of its new text, as soon as that is
            settled; the pieces make up the text.
        batch_size: prompts that are continued at a time, default 16.
        options: temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id (default: the
            tokenizer's) and seed, as `generate` takes them. Batch i, from 0, takes seed + i.

    Returns:
        The new text of each prompt, in order.

    Raises:
        TypeError, ValueError: as `generate` raises them; a stop string that is empty.

    Example:
        >>> generate_text(model, tokenizer, ["8+7", "3-9"], max_new_tokens=8)
        ['15', '-6']
    """
    made = completions(
        model,
        tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stream=stream,
        batch_size=batch_size,
        **options,
    )
    return [completion.text for completion in made]


def completions(
    model: Mamba3LM,
    tokenizer: Tokenizer,
    prompts: str | Iterable[str | Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop: str | Sequence[str] = (),
    stream: Callable[[int, str], None] | None = None,
    batch_size: int = 16,
    seed: int | None = None,
    **options,
) -> Iterator[Completion]:
    """Like `generate_text`, but yield a `Completion` a prompt, in order, as batches are done."""
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    show = stream or (lambda number, piece: None)
    for first in range(0, len(prompts), batch_size):
        rows = [prompt_ids(p, tokenizer) for p in prompts[first : first + batch_size]]
        made, _ = continue_rows(
            model,
            tokenizer,
            rows,
            max_new_tokens=max_new_tokens,
            stop=stop,
            stream=lambda row, piece, first=first: show(first + row, piece),
            seed=None if seed is None else seed + first // batch_size,
            **options,
        )
        yield from made


def continue_rows(
    model: Mamba3LM,
    tokenizer: Tokenizer,
    rows: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: str | Sequence[str] = (),
    stream: Callable[[int, str], None] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    **options,
) -> tuple[list[Completion], LMState | None]:
    """Continue one batch of encoded prompts.

    Args:
        rows: ids of each prompt, at least one.
        stream: called with the number of a row and a piece of its text.
        eos_token_id: what ends a row; None takes the tokenizer's.
        options: those of `generate`; the others are as in `generate_text`.

    Returns:
        A completion a row, and with `return_state=True` the state after all their tokens.
    """
    eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    ends = frozenset(eos if isinstance(eos, Sequence) else [eos])
    texts = [_Row(tokenizer, ids, _stop_strings(stop), ends) for ids in rows]

    def on_step(tokens: Tensor) -> Tensor:
        for number, (row, token) in enumerate(zip(texts, tokens.tolist(), strict=True)):
            piece = "" if row.ended_by else row.add(token)
            if piece and stream is not None:
                stream(number, piece)
        return torch.tensor([row.ended_by is not None for row in texts])

    input_ids, mask = left_padded(rows, next(model.parameters()).device)
    out = generate(
        model,
        input_ids,
        max_new_tokens,
        attention_mask=mask,
        eos_token_id=eos,
        on_step=on_step,
        **options,
    )
    for number, row in enumerate(texts):
        if row.ended_by is None:
            piece = row.finish("length")
            if piece and stream is not None:
                stream(number, piece)
    state = out[1] if isinstance(out, tuple) else None
    return [Completion(row.text, row.ended_by, row.ids) for row in texts], state


def prompt_ids(prompt: str | Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt; nothing at all follows what ends a text."""
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
    return ids or [tokenizer.eos_token_id]


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as one batch padded on the left, (B, L) int64, and its mask (B, L)."""
    length = max(map(len, rows))
    ids = [[0] * (length - len(row)) + list(row) for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class _Row:
    """The text of one row of a batch, as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop, ends: frozenset[int]):
        self._decoder = TextDecoder(tokenizer, prompt)
        self._finder = StopFinder(stop)
        self._ends = ends
        self.ids: list[int] = []
        self.text = ""
        self.ended_by: str | None = None

    def add(self, token: int) -> str:
        """Read a token; return the text that is settled by it."""
        self.ids.append(token)
        if token in self._ends:
            return self.finish("eos")
        return self._take(self._finder.add(self._decoder.add(token)))

    def finish(self, ended_by: str) -> str:
        """No more tokens come; return the text that was held back."""
        self.ended_by = ended_by
        return self._take(self._finder.add(self._decoder.finish()) + self._finder.finish())

    def _take(self, piece: str) -> str:
        if self._finder.found:
            self.ended_by = "stop"
        self.text += piece
        return piece


class TextDecoder:
    """Turns tokens into text one by one; the pieces make up what decoding all at once gives.

    Args:
        tokenizer: decodes ids.
        prompt: ids that come before; a tokenizer may write a token otherwise at the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._decode = tokenizer.decode
        self._settled = list(prompt[-CONTEXT:])
        self._open: list[int] = []
        self._given = 0  # characters of the open tokens

    def add(self, token: int) -> str:
        """Read a token; return the text that later ones cannot change."""
        self._open.append(token)
        text = self._open_text(at_end=len(self._open) > CONTEXT)
        # An unfinished character is decoded to marks at the end, which may also be text.
        if marks := len(text) - len(text.rstrip(UNDECODABLE)):
            settled = max(self._given, len(text) - min(marks, UNFINISHED))
            piece, self._given = text[self._given : settled], settled
            return piece
        piece = text[self._given :]
        if text:
            self._settled = (self._settled + self._open)[-CONTEXT:]
            self._open, self._given = [], 0
        return piece

    def finish(self) -> str:
        """What is left when no more tokens come."""
        return self._open_text(at_end=True)[self._given :]

    def _open_text(self, *, at_end: bool) -> str:
        before, text = self._decode(self._settled), self._decode(self._settled + self._open)
        if text.startswith(before):
            return text[len(before) :]
        # Some decoders take back what is settled, until a character that follows it is finished.
        return self._decode(self._open) if at_end else ""


class StopFinder:
    """Passes text on until one of several strings occurs in it.

    Args:
        stop: the strings; text is cut before the one that is complete first, the longest of those
            that end at one place.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Read text; return what can be no part of a stop string."""
        text, self._held = self._held + piece, ""
        ends = [(text.index(s) + len(s), -len(s), s) for s in self._stop if s in text]
        if ends:
            end, _, self.found = min(ends)
            return text[: end - len(self.found)]
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                self._held = text[-length:]
                return text[:-length]
        return text

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        return self._held


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop strings must be strings that are not empty, got {string!r}")
    return strings
