"""Conversations as text and as labels, by hand and against transformers' own rendering."""

import sys
from itertools import groupby

import pytest

from mamba3.data import chat
from mamba3.data.byte_tokenizer import ByteTokenizer
from mamba3.data.chat import PLAIN_TEMPLATE, encode_chat, render, turn_end
from mamba3.models.lm import IGNORE

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Héllo <b>"},
    {"role": "assistant", "content": "Hi ☃"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you\n"},
]
CHATML = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELPERS = (
    "{% if tools is not none or documents %}{{ tools }}{% endif %}{{ strftime_now('%Y') }}"
    "{% for m in messages %}{% if loop.index0 == 3 %}{% break %}{% endif %}{{ m | tojson }}"
    "{{ m | tojson(indent=2) }}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
)
NO_END = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"


@pytest.fixture
def tokenizer():
    return ByteTokenizer()


def labelled(ids, labels, tokenizer):
    """The runs of ids that carry labels, as text, with eos as a full stop."""
    assert all(label in (IGNORE, i) for i, label in zip(ids, labels, strict=True))
    groups = groupby(labels, key=lambda label: label != IGNORE)
    runs = [list(run) for scored, run in groups if scored]
    return [tokenizer.decode(run) + "." * run.count(tokenizer.eos_token_id) for run in runs]


def test_plain_layout_by_hand(tokenizer):
    expected = (
        "<|bos|><|system|>\nBe brief.\n<|user|>\nHéllo <b>\n<|assistant|>\nHi ☃<|eos|>\n"
        "<|user|>\nBye\n<|assistant|>\n"
    )
    assert render(TALK[:4], tokenizer, True) == expected
    assert render(TALK[:3], tokenizer) == expected[: expected.index("<|user|>\nBye")]
    assert turn_end(tokenizer) == "<|eos|>"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, CHATML, NO_END, HELPERS])
def test_layout_equals_that_of_transformers(tokenizer, template, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer.chat_template = template
    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages, opened in ((TALK, False), (TALK[:4], True)):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opened
        )
        assert render(messages, tokenizer, opened) == expected
        assert tokenizer.encode(expected) == theirs(expected, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (None, ["Hi ☃.", "See you\n."]),
        (CHATML, ["Hi ☃<|im_end|>", "See you\n<|im_end|>"]),
        ("{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}", None),
    ],
)
def test_labels_are_the_assistants_turns_and_their_ends(tokenizer, template, turns):
    tokenizer.chat_template = template
    ids, labels = encode_chat(TALK, tokenizer)
    if turns is None:  # nothing opens or ends a turn but what the role is called
        assert labelled(ids, labels, tokenizer) == ["assistant Hi ☃", "assistant See you\n."]
        assert ids == [*tokenizer.encode(render(TALK, tokenizer)), tokenizer.eos_token_id]
    else:
        assert labelled(ids, labels, tokenizer) == turns
        assert ids == tokenizer.encode(render(TALK, tokenizer))
    # What a model reads before a turn when it answers is what precedes the turn here.
    if turns:
        prompt = tokenizer.encode(render(TALK[:4], tokenizer, True))
        assert ids[: len(prompt)] == prompt
        assert labels[len(prompt) - 1] == IGNORE != labels[len(prompt)]


def test_a_conversation_may_end_with_the_user(tokenizer):
    ids, labels = encode_chat(TALK[:4], tokenizer)
    assert ids == tokenizer.encode(render(TALK[:4], tokenizer))
    assert labelled(ids, labels, tokenizer) == ["Hi ☃."]


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([{"role": "user"}], None, r"message 0 needs a string as its 'content'"),
        ([{"role": 1, "content": "a"}], None, r"message 0 needs a string as its 'role'"),
        (["Hi"], None, r"message 0 needs a string as its 'role', got 'Hi'"),
        (TALK[:2], None, r"no message of the role 'assistant'"),
        ([], None, r"no message of the role 'assistant'"),
        ([*TALK, {"role": "tool", "content": "a"}], CHATML, r"cannot lay out .*: no tools"),
        (TALK, "{% if", r"the chat template cannot lay out"),
        (TALK, "{{ messages.__class__.__mro__ }}", r"cannot lay out .* is unsafe"),
        (TALK, "{{ messages[-1].content }}{{ messages|length }}", r"precedes message 2"),
    ],
)
def test_errors(tokenizer, messages, template, message):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        encode_chat(messages, tokenizer)


def test_without_jinja_the_remedy_is_named(tokenizer, monkeypatch):
    chat._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RuntimeError, match="pip install jinja2"):
        render(TALK, tokenizer)
