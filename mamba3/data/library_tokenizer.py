"""LibraryTokenizer: any tokenizer.json, read by the tokenizers library (an extra)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mamba3.atomic import replace_text
from mamba3.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, read_config


class LibraryTokenizer:
    """A tokenizer.json, with what the tokenizer_config.json beside it says of special tokens.

    Special tokens that are written out in a text are read as such, as the library does. Texts open
    with bos where `add_bos_token` says so, or where nothing does and the tokenizer.json adds it.

    Args:
        path: the tokenizer.json.
        eos_token: ends texts in place of the eos_token of the configuration.

    Raises:
        ValueError: it is no tokenizer, has no such token, or nothing says which one ends a text.
        RuntimeError: the tokenizers library is not installed.
    """

    def __init__(self, path: str | Path, *, eos_token: str | None = None):
        path = Path(path)
        self._tokenizer = _read(path)
        self._config = read_config(path)
        self.chat_template: str | None = self._config.get("chat_template")
        if eos_token is not None:
            self._config["eos_token"] = eos_token
        self.special_tokens = {
            name: content
            for name in ("bos_token", "eos_token", "pad_token")
            if (content := _content(self._config.get(name))) is not None
        }
        if "eos_token" not in self.special_tokens:
            raise ValueError(
                f"nothing says which token of {path} ends a document; name it as eos_token in "
                f"{CONFIG_FILE}, or at the call"
            )
        ids = {name: self._id_of(token, path) for name, token in self.special_tokens.items()}
        self.bos_token_id: int | None = ids.get("bos_token")
        self.eos_token_id: int = ids["eos_token"]
        self.pad_token_id: int = ids.get("pad_token", self.eos_token_id)
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self._opening = self._opening_ids()

    def _id_of(self, token: str, path: Path) -> int:
        if (found := self._tokenizer.token_to_id(token)) is None:
            raise ValueError(f"{path} has no token {token!r}, which is to be a special one")
        return found

    def _opening_ids(self) -> list[int]:
        bos, stated = self.bos_token_id, self._config.get("add_bos_token")
        if bos is None:
            return []
        if stated is None:
            stated = self._tokenizer.encode("").ids[:1] == [bos]
        return [bos] if stated else []

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no special tokens are added.

        Raises:
            ValueError: the library cannot encode it.
        """
        return self._encode([text], add_special_tokens=False)[0]

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """The ids of texts, with what the tokenizer.json adds to each, and eos at the end."""
        last = self.eos_token_id
        found = self._encode(texts, add_special_tokens=True)
        return [ids if ids[-1:] == [last] else [*ids, last] for ids in found]

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        try:
            found = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the tokenizer cannot encode it: {error}") from error
        return [encoding.ids for encoding in found]

    def encode_prompt(self, prompt: str) -> list[int]:
        """The ids of a prompt, after bos if texts open with it; one written out is not doubled."""
        ids = self.encode(prompt)
        return ids if self._opening and ids[:1] == self._opening else [*self._opening, *ids]

    def encode_answer(self, answer: str) -> list[int]:
        """The ids that a model should give for an answer: the answer, then eos."""
        return [*self.encode(answer), self.eos_token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens give nothing, and neither do ids without a token."""
        special = {self.bos_token_id, self.eos_token_id, self.pad_token_id}
        return self._tokenizer.decode([i for i in map(int, ids) if i not in special])

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder, which is made if needed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        config["chat_template"] = self.chat_template
        config = {key: value for key, value in config.items() if value is not None}
        replace_text(folder / TOKENIZER_FILE, self._tokenizer.to_str(pretty=True) + "\n")
        replace_text(folder / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _read(path: Path):
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
    return tokenizer


def _content(token: str | dict | None) -> str | None:
    """A special token as tokenizer_config.json gives it, with or without its flags."""
    return token.get("content") if isinstance(token, dict) else token
