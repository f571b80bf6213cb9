"""CharTokenizer: one character, one token.

It is saved as a Hugging Face ``tokenizer.json`` (a WordLevel model over single characters), so that
``tokenizers`` and ``transformers`` read the same ids from it; reading it here needs neither.

    id 0    <pad>     fills rows of a batch, never predicted
    id 1    <bos>     opens every text
    id 2    <eos>     ends an answer
    id 3..  one character each, in the order of `characters`
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mamba3.atomic import replace_text

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


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
                f"character {char!r} at position {at} of {text!r} is not in the vocabulary; "
                f"known characters: {self.characters!r}"
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
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tokens = [*SPECIAL_TOKENS, *self.characters]
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": token, **special, "special": True}
                for i, token in enumerate(SPECIAL_TOKENS)
            ],
            "normalizer": None,
            "pre_tokenizer": _EACH_CHARACTER,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [_token_piece(BOS), _text_piece("A")],
                "pair": [_token_piece(BOS), _text_piece("A"), _text_piece("B")],
                "special_tokens": {BOS: {"id": BOS, "ids": [self.bos_token_id], "tokens": [BOS]}},
            },
            "decoder": {"type": "Fuse"},
            # The unknown token is in no vocabulary: `tokenizers` then refuses unknown characters.
            "model": {
                "type": "WordLevel",
                "vocab": {token: i for i, token in enumerate(tokens)},
                "unk_token": "<unk>",
            },
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "prompt_suffix": self.prompt_suffix,
        }
        replace_text(folder / TOKENIZER_FILE, _to_json(content))
        replace_text(folder / CONFIG_FILE, _to_json(config))


def load_tokenizer(name_or_path: str | Path) -> CharTokenizer:
    """Read the tokenizer that was saved beside a model.

    Args:
        name_or_path: name of a shipped model, or a local folder with tokenizer.json.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer.json in it.
        ValueError: the file is not JSON, or not a character tokenizer.
    """
    from mamba3.zoo import resolve

    path = resolve(name_or_path) / TOKENIZER_FILE
    content = _read_json(path)
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
        ours = False
    if not ours:
        raise ValueError(
            f"{path} is not a character tokenizer as mamba3 writes it (WordLevel over single "
            "characters after <pad>, <bos>, <eos>); read other tokenizers with the tokenizers "
            "library and give the model ids"
        )
    config_path = path.with_name(CONFIG_FILE)
    config = _read_json(config_path) if config_path.exists() else {}
    suffix = config.get("prompt_suffix", "") if isinstance(config, dict) else None
    if not isinstance(suffix, str):
        raise ValueError(f"prompt_suffix in {config_path} must be a string, got {suffix!r}")
    return CharTokenizer("".join(tokens[3:]), prompt_suffix=suffix)


_EACH_CHARACTER = {
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}


def _token_piece(token: str) -> dict:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def _text_piece(name: str) -> dict:
    return {"Sequence": {"id": name, "type_id": 0}}


def _to_json(content: dict) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _read_json(path: Path):
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: this folder holds no tokenizer")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
