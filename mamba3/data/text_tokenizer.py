"""Tokenizers of whole texts: what makes documents of them, for `mamba3 tokenize`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mamba3.data.library_tokenizer import LibraryTokenizer
from mamba3.data.tokenizer import load_tokenizer


class TextTokenizer(NamedTuple):
    """What makes documents of ids of texts.

    name: as it was asked for.
    vocab_size: every id is less.
    encode: the ids of each text, with what opens a document, if anything does, and what ends it.
    """

    name: str
    vocab_size: int
    encode: Callable[[list[str]], list[list[int]]]


def load_text_tokenizer(name_or_path: str | Path, *, end: str | None = None) -> TextTokenizer:
    """Read a tokenizer of texts.

    Args:
        name_or_path: as `load_tokenizer` takes it.
        end: the token that ends a document; None takes the eos_token of the tokenizer_config.json
            beside it. A tokenizer of characters or bytes has its own.

    Raises:
        OSError: there is no such name, folder or file.
        ValueError: it is no tokenizer, or there is no token to end documents with.
        RuntimeError: it needs the tokenizers library, which is not installed.
    """
    name, tokenizer = str(name_or_path), load_tokenizer(name_or_path, eos_token=end)
    if isinstance(tokenizer, LibraryTokenizer):
        return TextTokenizer(name, tokenizer.vocab_size, tokenizer.encode_documents)
    first = tokenizer.bos_token_id

    def encode(texts: list[str]) -> list[list[int]]:
        return [[first, *tokenizer.encode_answer(text)] for text in texts]

    return TextTokenizer(name, tokenizer.vocab_size, encode)
