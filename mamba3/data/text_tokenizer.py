"""Tokenizers of whole texts: our characters, or any tokenizer.json of the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mamba3.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, CharTokenizer, load_tokenizer


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
        name_or_path: name of a shipped model, a folder with tokenizer.json, or such a file.
        end: the token that ends a document; None takes the eos_token of the tokenizer_config.json
            beside it. A character tokenizer has its own.

    Raises:
        OSError: there is no such name, folder or file.
        ValueError: it is no tokenizer, or there is no token to end documents with.
        RuntimeError: it needs the tokenizers library, which is not installed.
    """
    from mamba3.zoo import resolve

    path = Path(name_or_path)
    if not path.is_file():
        path = resolve(name_or_path) / TOKENIZER_FILE
    if path.name == TOKENIZER_FILE:
        try:
            characters = load_tokenizer(path.parent.absolute())
        except ValueError:
            pass  # not ours; the library says whether it is a tokenizer at all
        else:
            return _of_characters(str(name_or_path), characters, end)
    return _of_library(str(name_or_path), path, end)


def _of_characters(name: str, tokenizer: CharTokenizer, end: str | None) -> TextTokenizer:
    if end is not None:
        raise ValueError(f"{name} ends documents with a token of its own: leave out end={end!r}")
    known = set(tokenizer.characters)
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id

    def encode(texts: list[str]) -> list[list[int]]:
        for text in texts:
            if unknown := set(text) - known:
                at = min(map(text.index, unknown))
                raise ValueError(f"character {text[at]!r} at position {at} has no token in {name}")
        return [[first, *tokenizer.encode(text), last] for text in texts]

    return TextTokenizer(name, tokenizer.vocab_size, encode)


def _of_library(name: str, path: Path, end: str | None) -> TextTokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RuntimeError(
            f"{path} needs the tokenizers library, which is not installed: "
            "python -m pip install 'mamba3[tokenizers]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = end or _eos_token(path.with_name(CONFIG_FILE))
    if end is None:
        raise ValueError(f"nothing says which token of {path} ends a document; name it with end=")
    last = tokenizer.token_to_id(end)
    if last is None:
        raise ValueError(f"{path} has no token {end!r} to end documents with")

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            found = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        except Exception as error:
            raise ValueError(f"{name} cannot encode it: {error}") from error
        return [ids if ids[-1:] == [last] else [*ids, last] for ids in found]

    return TextTokenizer(name, max(tokenizer.get_vocab().values()) + 1, encode)


def _eos_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not the configuration of a tokenizer: {error}") from None
    return token.get("content") if isinstance(token, dict) else token
