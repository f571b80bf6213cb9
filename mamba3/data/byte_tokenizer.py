"""ByteTokenizer: one byte of UTF-8, one token; any text can be encoded, and nothing is learned.

It is saved as a byte-level BPE without merges, which ``tokenizers`` and ``transformers`` read to
the same ids. Those ids are in `mamba3.data.tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mamba3.data.tokenizer import tokenizer_config, tokenizer_json, write_tokenizer

# Written as texts hardly ever are: where one occurs in a text, it is read as the token.
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
FIRST = len(SPECIAL_TOKENS)
_SPLIT = re.compile(f"({'|'.join(map(re.escape, SPECIAL_TOKENS))})")


class ByteTokenizer:
    """Tokens that are bytes, after pad, bos and eos.

    Args:
        chat_template: Jinja source that lays out a conversation; None for the built-in one.

    Example:
        >>> ByteTokenizer().encode("né")
        [113, 198, 172]
    """

    vocab_size = FIRST + 256
    pad_token_id, bos_token_id, eos_token_id = range(3)
    special_tokens = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}  # noqa: RUF012

    def __init__(self, *, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        """The ids of a text, one a byte; a special token that is written out in it is one id.

        Raises:
            ValueError: half of a surrogate pair, which UTF-8 cannot hold.
        """
        ids = []
        for i, part in enumerate(_SPLIT.split(text)):
            if i % 2:
                ids.append(SPECIAL_TOKENS.index(part))
            else:
                ids += [FIRST + byte for byte in part.encode("utf-8")]
        return ids

    def encode_prompt(self, prompt: str) -> list[int]:
        """The ids of a prompt, after bos."""
        return [self.bos_token_id, *self.encode(prompt)]

    def encode_answer(self, answer: str) -> list[int]:
        """The ids that a model should give for an answer: the answer, then eos."""
        return [*self.encode(answer), self.eos_token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens give nothing, bytes that are no UTF-8 give U+FFFD.

        Raises:
            ValueError: an id that no token has, with its position.
        """
        data = bytearray()
        for at, i in enumerate(map(int, ids)):
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"id {i} at position {at} is no token; ids are 0 to {self.vocab_size - 1}"
                )
            if i >= FIRST:
                data.append(i - FIRST)
        return data.decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder, which is made if needed."""
        write_tokenizer(folder, _content(), tokenizer_config(self))

    @staticmethod
    def wrote(content) -> bool:
        """Whether this is the content of a tokenizer.json of a `ByteTokenizer`."""
        return content == _content()


@cache
def _content() -> dict:
    return tokenizer_json(
        SPECIAL_TOKENS,
        pre_tokenizer={
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        decoder={
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {
                token: i for i, token in enumerate([*SPECIAL_TOKENS, *map(_symbol, range(256))])
            },
            "merges": [],
        },
    )


def _symbol(byte: int) -> str:
    """The character that byte-level BPE writes for a byte: itself, or from U+0100 on."""
    return chr(byte) if _is_shown(byte) else chr(256 + sum(not _is_shown(b) for b in range(byte)))


def _is_shown(byte: int) -> bool:
    return 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)
