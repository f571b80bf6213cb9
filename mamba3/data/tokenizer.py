"""Tokenizers: what every one of them can do, how one is found, and CharTokenizer.

A `Tokenizer` turns text into ids and back. There are three: `CharTokenizer` (one character, one
token), `ByteTokenizer` (any text as its UTF-8 bytes) and `LibraryTokenizer` (any tokenizer.json,
read by the tokenizers library). Each is saved as a Hugging Face ``tokenizer.json`` with a
``tokenizer_config.json`` beside it, so that ``tokenizers`` and ``transformers`` read the same ids.

The ids of characters and of bytes:

    id 0    pad     fills rows of a batch, never predicted
    id 1    bos     opens every text
    id 2    eos     ends an answer
    id 3..  one character each, in the order of `characters`; or byte 0, byte 1, ... byte 255
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from mamba3.atomic import replace_text

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
BYTES = "bytes"


class Tokenizer(Protocol):
    """What `load_tokenizer` returns.

    vocab_size: every id is less.
    bos_token_id: opens a text; None where the tokenizer has no such token.
    eos_token_id: ends an answer, a turn or a document.
    pad_token_id: fills rows of a batch; the eos token where there is none for it.
    special_tokens: "bos_token", "eos_token" and "pad_token", as far as there are, as text.
    chat_template: Jinja source that lays out a conversation, or None; may be set.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int
    special_tokens: dict[str, str]
    chat_template: str | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no special tokens are added."""

    def encode_prompt(self, prompt: str) -> list[int]:
        """The ids that a model continues: the prompt, after bos if texts open with one."""

    def encode_answer(self, answer: str) -> list[int]:
        """The ids that a model should give for an answer: the answer, then eos."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens give nothing."""

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder, which is made if needed."""


class CharTokenizer:
    """Tokens that are single characters, after pad, bos and eos.

    Args:
        characters: the characters that can be encoded, each once; the i-th gets id 3 + i.
        prompt_suffix: what ends a prompt, such as "=" for arithmetic. `encode_prompt` adds it where
            it is missing, so that "12+7" and "12+7=" are the same question.

    Raises:
        ValueError: a character that occurs twice, or a suffix that cannot be encoded.
    """

    pad_token_id, bos_token_id, eos_token_id = range(3)
    special_tokens = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}  # noqa: RUF012
    chat_template: str | None = None

    def __init__(self, characters: str, *, prompt_suffix: str = ""):
        if twice := sorted({c for c in characters if characters.count(c) > 1}):
            raise ValueError(f"characters must differ from one another; {twice} occur twice")
        self.characters = characters
        self.prompt_suffix = prompt_suffix
        self._ids = {c: i for i, c in enumerate(characters, start=len(SPECIAL_TOKENS))}
        self.encode(prompt_suffix)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the special ones included."""
        return len(SPECIAL_TOKENS) + len(self.characters)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, one a character, without special tokens.

        Raises:
            ValueError: a character that has no token, with its position.
        """
        try:
            return [self._ids[c] for c in text]
        except KeyError:
            at, char = next((i, c) for i, c in enumerate(text) if c not in self._ids)
            raise ValueError(
                f"character {char!r} at position {at} has no token; known characters: "
                f"{self.characters!r}"
            ) from None

    def encode_prompt(self, prompt: str) -> list[int]:
        """The ids of a question: bos, the prompt, and `prompt_suffix` unless it ends so already."""
        if not prompt.endswith(self.prompt_suffix):
            prompt += self.prompt_suffix
        return [self.bos_token_id, *self.encode(prompt)]

    def encode_answer(self, answer: str) -> list[int]:
        """The ids that a model should give for an answer: the answer, then eos."""
        return [*self.encode(answer), self.eos_token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens give nothing.

        Raises:
            ValueError: an id that no token has, with its position.
        """
        text = []
        for at, i in enumerate(map(int, ids)):
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"id {i} at position {at} is no token; ids are 0 to {self.vocab_size - 1}"
                )
            if i >= len(SPECIAL_TOKENS):
                text.append(self.characters[i - len(SPECIAL_TOKENS)])
        return "".join(text)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder, which is made if needed."""
        content = tokenizer_json(
            SPECIAL_TOKENS,
            pre_tokenizer=_EACH_CHARACTER,
            decoder={"type": "Fuse"},
            # The unknown token is in no vocabulary: `tokenizers` then refuses unknown characters.
            model={
                "type": "WordLevel",
                "vocab": {t: i for i, t in enumerate([*SPECIAL_TOKENS, *self.characters])},
                "unk_token": "<unk>",
            },
        )
        config = tokenizer_config(self, prompt_suffix=self.prompt_suffix)
        write_tokenizer(folder, content, config)


def load_tokenizer(name_or_path: str | Path, *, eos_token: str | None = None) -> Tokenizer:
    """Find a tokenizer and read it.

    Args:
        name_or_path: name of a shipped model; a local folder with tokenizer.json, or such a file;
            "bytes" for the built-in `ByteTokenizer`; or a repository of the Hugging Face Hub as
            "org/name" or "hf-hub:org/name@revision", of which only the tokenizer is downloaded.
        eos_token: ends texts, in place of the eos_token of tokenizer_config.json. Tokenizers of
            characters and of bytes have their own and take none.

    Raises:
        OSError: there is no such name, folder or repository, or no tokenizer in it.
        ValueError: the file is no tokenizer, or has no token to end texts with.
        RuntimeError: it needs the tokenizers library, which is not installed.

    Example:
        >>> tokenizer = load_tokenizer("arithmetic-tiny")
        >>> tokenizer.decode(tokenizer.encode_prompt("8+7"))
        '8+7='
    """
    from mamba3.data.byte_tokenizer import ByteTokenizer
    from mamba3.data.library_tokenizer import LibraryTokenizer

    if name_or_path == BYTES and not Path(BYTES).exists():
        return _with_own_eos(ByteTokenizer(), eos_token)
    path = find_tokenizer(name_or_path)
    content, config = read_json(path), read_config(path)
    if ByteTokenizer.wrote(content):
        tokenizer = ByteTokenizer()
    elif characters := _characters(content):
        suffix = config.get("prompt_suffix", "")
        if not isinstance(suffix, str):
            at = path.with_name(CONFIG_FILE)
            raise ValueError(f"prompt_suffix in {at} must be a string, got {suffix!r}")
        tokenizer = CharTokenizer(characters, prompt_suffix=suffix)
    else:
        return LibraryTokenizer(path, eos_token=eos_token)
    tokenizer.chat_template = config["chat_template"]
    return _with_own_eos(tokenizer, eos_token)


def _with_own_eos(tokenizer: Tokenizer, eos_token: str | None) -> Tokenizer:
    own = tokenizer.special_tokens["eos_token"]
    if eos_token not in (None, own):
        raise ValueError(
            f"the tokenizer ends texts with a token of its own: leave out end={eos_token!r}"
        )
    return tokenizer


def find_tokenizer(name_or_path: str | Path) -> Path:
    """The tokenizer.json that a name, folder, file or Hub id stands for, see `load_tokenizer`."""
    from mamba3 import zoo

    name, path = str(name_or_path), Path(name_or_path)
    if path.is_file():
        return path.absolute()
    model = zoo.MODELS.get(name)
    if model is not None and not model.is_shipped:
        raise FileNotFoundError(
            f"{name} has no tokenizer among its files: {model.tokenizer}. Name a tokenizer.json, "
            "its folder or its repository"
        )
    on_hub = zoo.HUB_ID.fullmatch(name.removeprefix(zoo.HUB))
    if on_hub and isinstance(name_or_path, str) and not path.exists():
        return _download(on_hub["repo"], on_hub["revision"])
    path = zoo.resolve(name_or_path) / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: this folder holds no tokenizer; name the one that its model "
            "was trained with"
        )
    return path.absolute()


def read_config(path: Path) -> dict:
    """What lies beside a tokenizer.json: its tokenizer_config.json, with the chat template."""
    config_path, template_path = path.with_name(CONFIG_FILE), path.with_name(TEMPLATE_FILE)
    config = read_json(config_path) if config_path.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} is not the configuration of a tokenizer: {config!r:.80}")
    template = config.get("chat_template")
    if template_path.is_file():
        template = template_path.read_text(encoding="utf-8")
    elif isinstance(template, list):  # several, by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    return {**config, "chat_template": template}


def read_json(path: Path):
    """The content of a JSON file; a ValueError names one that is not."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a tokenizer's: it is not valid JSON: {error}") from None


def tokenizer_json(
    special_tokens: tuple[str, str, str], *, pre_tokenizer: dict, decoder: dict, model: dict
) -> dict:
    """The content of a tokenizer.json whose texts open with bos; pad, bos, eos are ids 0 to 2."""
    bos, flags = special_tokens[1], ("single_word", "lstrip", "rstrip", "normalized")
    opening = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **dict.fromkeys(flags, False), "special": True}
            for i, token in enumerate(special_tokens)
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [opening, first],
            "pair": [opening, first, second],
            "special_tokens": {bos: {"id": bos, "ids": [1], "tokens": [bos]}},
        },
        "decoder": decoder,
        "model": model,
    }


def tokenizer_config(tokenizer: Tokenizer, **more) -> dict:
    """The content of a tokenizer_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        **more,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    return config


def write_tokenizer(folder: str | Path, content: dict, config: dict) -> None:
    """Write tokenizer.json and tokenizer_config.json into a folder, which is made if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in ((TOKENIZER_FILE, content), (CONFIG_FILE, config)):
        replace_text(folder / name, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


_EACH_CHARACTER = {
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}


def _characters(content) -> str | None:
    """The characters of a tokenizer.json that CharTokenizer wrote; None for any other."""
    try:
        model = content["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        in_order = [model["vocab"][token] for token in tokens] == list(range(len(tokens)))
        ours = (
            model["type"] == "WordLevel"
            and content["pre_tokenizer"] == _EACH_CHARACTER
            and tuple(tokens[:3]) == SPECIAL_TOKENS
            and all(len(token) == 1 for token in tokens[3:])
            and in_order
        )
    except (KeyError, TypeError, AttributeError):
        return None
    return "".join(tokens[3:]) if ours else None


def _download(repository: str, revision: str | None) -> Path:
    """The tokenizer.json of a repository of the Hub, with what belongs to it beside it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    from mamba3.remote import explained

    with explained(repository, revision):
        try:
            path = hf_hub_download(repository, TOKENIZER_FILE, revision=revision)
        except LocalEntryNotFoundError:  # no connection, and not in the cache
            raise
        except EntryNotFoundError as error:
            raise FileNotFoundError(
                f"the repository {repository} of the Hub holds no {TOKENIZER_FILE}; name the one "
                "whose tokenizer its model uses"
            ) from error
        for name in (CONFIG_FILE, TEMPLATE_FILE):
            # Some mirrors say of a file that is not there that the repository is not.
            with contextlib.suppress(EntryNotFoundError, RepositoryNotFoundError):
                hf_hub_download(repository, name, revision=revision)
    return Path(path)
