"""Conversations: laid out as text by a chat template, and as ids and labels to learn from.

A conversation is a list of messages, ``{"role": "user", "content": "Hi"}``. The template is that of
the tokenizer, Jinja source as Hugging Face writes it, or `PLAIN_TEMPLATE` where it has none. It is
run in a sandbox, as templates come from whoever made the tokenizer.

Special tokens that are written out in a message are read as such, as everywhere in this format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache

from mamba3.data.tokenizer import Tokenizer
from mamba3.models.lm import IGNORE

Message = Mapping[str, str]

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, add_generation_prompt: bool = False
) -> str:
    """Lay out a conversation as text, special tokens written out.

    Args:
        messages: each with "role" and "content", both strings; what else a template reads is
            passed on.
        tokenizer: whose chat_template is used, or `PLAIN_TEMPLATE` if that is None.
        add_generation_prompt: end with what opens an answer of the assistant.

    Returns:
        The text, to be encoded by `tokenizer.encode`, as it opens with bos where it should.

    Raises:
        ValueError: a message without role or content, or a template that cannot be used or
            refuses the conversation.
        RuntimeError: the jinja2 library is not installed.

    Example:
        >>> from mamba3.data.byte_tokenizer import ByteTokenizer
        >>> render([{"role": "user", "content": "Hi"}], ByteTokenizer(), True)
        '<|bos|><|user|>\\nHi\\n<|assistant|>\\n'
    """
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise ValueError(f"message {i} needs a string as its {key!r}, got {message!r:.80}")
    source = PLAIN_TEMPLATE if tokenizer.chat_template is None else tokenizer.chat_template
    environment = _environment()
    try:
        return environment.from_string(source).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens,
        )
    except Exception as error:  # a template may run into any error
        raise ValueError(f"the chat template cannot lay out the conversation: {error}") from error


def encode_chat(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids of a conversation, and their labels: those of the assistant's turns alone.

    A turn's labels reach over the token that ends it. Labels lie at the ids they stand for, as
    `Mamba3LM` takes them; all others are `IGNORE`. Turns are encoded apart from what precedes
    them, as they are when a model continues the encoded prompt.

    Args:
        messages: as `render` takes them, with at least one of the role "assistant".
        tokenizer: whose chat_template is used.

    Raises:
        ValueError: no message of the assistant, or a template that does not just append messages.
    """
    text, spans = _assistant_spans(messages, tokenizer)
    ids, labels, at = [], [], 0
    for start, end in spans:
        before, turn = tokenizer.encode(text[at:start]), tokenizer.encode(text[start:end])
        ids += before + turn
        labels += [IGNORE] * len(before) + turn
        at = end
    rest = tokenizer.encode(text[at:])
    ids += rest
    labels += [IGNORE] * len(rest)
    if not turn_end(tokenizer) and messages[-1]["role"] == "assistant":
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    return ids, labels


def turn_end(tokenizer: Tokenizer) -> str:
    """What the template puts after an answer, such as "<|im_end|>"; "" if it puts nothing."""
    answer = "An answer."
    question = {"role": "user", "content": "A question."}
    text = render([question, {"role": "assistant", "content": answer}], tokenizer)
    return text.rpartition(answer)[2].strip()


def turn_ends(tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """The tokens and the strings that end an answer: eos, and what ends it in the template."""
    end, eos = turn_end(tokenizer), tokenizer.eos_token_id
    ids = tokenizer.encode(end)
    if len(ids) == 1:
        return list(dict.fromkeys([eos, *ids])), []
    return [eos], [end] if ids and eos not in ids else []


def _assistant_spans(
    messages: Sequence[Message], tokenizer: Tokenizer
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where in it the assistant speaks and ends its turns."""
    text, end, spans = render(messages, tokenizer), turn_end(tokenizer), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:i], tokenizer, add_generation_prompt=True)
        through = render(messages[: i + 1], tokenizer)
        if not (through.startswith(before) and text.startswith(through)):
            raise ValueError(
                f"the chat template changes what precedes message {i} depending on what follows, "
                "so its turn cannot be told apart; use a template that appends each message"
            )
        turn = through[len(before) :]
        # What follows the end of a turn, such as a line break, is never generated.
        length = turn.rfind(end) + len(end) if end and end in turn else len(turn)
        spans.append((len(before), len(before) + length))
    if not spans:
        raise ValueError("the conversation has no message of the role 'assistant' to learn from")
    return text, spans


@cache
def _environment():
    """Jinja's sandbox, with what templates for Hugging Face's libraries may use."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise RuntimeError(
            "chat templates need jinja2, which is not installed: python -m pip install jinja2"
        ) from error

    class Generation(Extension):
        """{% generation %}, which marks the assistant's text and lays out nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str):
        raise TemplateError(message)

    def to_json(value, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
