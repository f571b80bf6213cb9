"""Text from models, against recomputing the whole sequence at every token, and stop strings."""

import io
import itertools
import json
import random
import sys

import pytest
import torch
from compare import randomise
from tokenizers import Tokenizer, decoders, models

from mamba3.cli import main
from mamba3.config import Mamba3Config
from mamba3.conversation import Conversation
from mamba3.data.byte_tokenizer import ByteTokenizer
from mamba3.data.chat import render
from mamba3.data.library_tokenizer import LibraryTokenizer
from mamba3.data.tokenizer import CharTokenizer
from mamba3.generate import generate
from mamba3.generate_text import StopFinder, TextDecoder, completions, generate_text
from mamba3.models.lm import Mamba3LM

CHAT = "{% for m in messages %}{{ m.role[0] + m.content + ';' }}{% endfor %}" + (
    "{% if add_generation_prompt %}a{% endif %}"
)
PROMPTS = ["abc", "", "e", "ghsu", "dd"]
SEED = 19  # of a model whose texts differ and end at different tokens


def make_model(vocab_size, seed, says):
    """A tiny model, every parameter randomised, that says eos and the ids `says`.

    It is untied, since tied ones just repeat a token.
    """
    config = Mamba3Config(
        vocab_size=vocab_size,
        d_model=16,
        n_layer=2,
        d_state=8,
        headdim=8,
        dt_max=1.0,
        tie_embeddings=False,
    )
    model = randomise(Mamba3LM(config), seed)
    silent = [i for i in range(vocab_size) if i != 2 and i not in says]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    return model


@pytest.fixture(scope="module")
def letters():
    """A model of letters, of which ";" ends a turn, and its tokenizer."""
    tokenizer = CharTokenizer("abcdefghsu;")
    tokenizer.chat_template = CHAT
    return make_model(tokenizer.vocab_size, SEED, range(3, 14)), tokenizer


@torch.no_grad()
def recomputed(model, ids, new_tokens, ends):
    """Greedy new ids, from a whole pass for every token, up to one of `ends` and with it."""
    ids, n = list(ids), len(ids)
    while len(ids) < n + new_tokens and not (len(ids) > n and ids[-1] in ends):
        logits = model(torch.tensor([ids])).logits[0, -1, : model.config.vocab_size]
        ids.append(int(logits.argmax()))
    return ids[n:]


def continuations(letters, new_tokens=24):
    model, tokenizer = letters
    return [
        tokenizer.decode(recomputed(model, tokenizer.encode_prompt(p), new_tokens, [2]))
        for p in PROMPTS
    ]


def cut(text, stop):
    """Text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, found))]
    return text


# generate_text


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_it_equals_recomputation(letters, batch_size):
    expected = continuations(letters)
    assert len({len(text) for text in expected}) > 1  # some rows end early
    assert generate_text(*letters, PROMPTS, max_new_tokens=24, batch_size=batch_size) == expected
    assert generate_text(*letters, PROMPTS[0], max_new_tokens=24) == expected[:1]


@pytest.mark.parametrize("batch_size", [2, 16])
def test_stop_strings_cut_the_text_and_end_the_row(letters, batch_size):
    whole = continuations(letters)
    stop = [whole[0][5:8], whole[3][9:11], whole[4][1]]
    options = {"max_new_tokens": 24, "stop": stop, "batch_size": batch_size}
    made = list(completions(*letters, PROMPTS, **options))
    assert [each.text for each in made] == [cut(text, stop) for text in whole]
    assert any(0 < len(each.text) < len(text) for each, text in zip(made, whole, strict=True))
    for each, text in zip(made, whole, strict=True):
        if each.text != text:
            assert each.ended_by == "stop"
            assert cut(letters[1].decode(each.ids[:-1]), stop) == letters[1].decode(each.ids[:-1])


def test_how_texts_end(letters):
    model, tokenizer = letters
    whole = [recomputed(model, tokenizer.encode_prompt(p), 24, [2]) for p in PROMPTS]
    made = list(completions(*letters, PROMPTS, max_new_tokens=24))
    assert [each.ids for each in made] == whole
    expected = ["eos" if ids[-1] == 2 else "length" for ids in whole]
    assert [each.ended_by for each in made] == expected
    assert set(expected) == {"eos", "length"}


def test_batches_end_when_their_rows_have(letters, monkeypatch):
    model, tokenizer = letters
    steps, step = [], model.step
    monkeypatch.setattr(model, "step", lambda ids, state: steps.append(1) or step(ids, state))
    text = continuations(letters, 8)[0]
    generate_text(model, tokenizer, PROMPTS[0], max_new_tokens=1000, stop=text[3:6])
    assert len(steps) == 5


def test_streams_are_the_texts_and_come_as_early_as_they_can(letters):
    whole = continuations(letters)
    stop = [whole[0][5:8]]
    pieces = {i: [] for i in range(5)}
    options = {"max_new_tokens": 24, "stop": stop, "batch_size": 2}
    texts = generate_text(
        *letters, PROMPTS, stream=lambda i, piece: pieces[i].append(piece), **options
    )
    assert ["".join(pieces[i]) for i in range(5)] == texts
    assert all(len(piece) <= 3 for each in pieces.values() for piece in each)
    assert all(piece for each in pieces.values() for piece in each)


def test_seeds(letters):
    model, tokenizer = letters
    options = {"temperature": 1.0, "top_k": 9}
    made = generate_text(*letters, ["e"] * 4, max_new_tokens=12, batch_size=2, seed=7, **options)
    ids = torch.tensor([tokenizer.encode_prompt("e")] * 2)
    expected = []
    for seed in (7, 8):
        out = generate(model, ids, 12, eos_token_id=2, pad_token_id=0, seed=seed, **options)
        expected += [tokenizer.decode(row[ids.shape[1] :]) for row in out]
    assert made == expected
    assert len(set(made)) > 2


def test_prompts_may_be_ids_and_an_empty_one_follows_an_end(letters):
    model, tokenizer = letters
    expected = [tokenizer.decode(recomputed(model, ids, 9, [2])) for ids in ([5, 6], [2])]
    assert generate_text(*letters, [[5, 6], []], max_new_tokens=9) == expected
    assert generate_text(*letters, [], max_new_tokens=9) == []


def test_errors(letters):
    for options, message in (
        ({"stop": [""]}, "stop strings must be strings that are not empty, got ''"),
        ({"stop": [3]}, "stop strings must be strings that are not empty, got 3"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_text(*letters, PROMPTS, **options)
    with pytest.raises(TypeError, match="top"):
        generate_text(*letters, PROMPTS, top=1)


# Tokens to text


def library_tokenizer(folder, *, decoder, **vocab):
    tokenizer = Tokenizer(models.BPE({"</s>": 0, **vocab}, []))
    tokenizer.decoder = decoder
    tokenizer.save(str(folder / "tokenizer.json"))
    return LibraryTokenizer(folder / "tokenizer.json", eos_token="</s>")


def pieces_of(tokenizer, ids, prompt=()):
    decoder = TextDecoder(tokenizer, prompt)
    return [*map(decoder.add, ids), decoder.finish()]


def test_characters_of_several_tokens_come_whole():
    tokenizer = ByteTokenizer()
    text = "é☃😀x\ufffd😀"
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    shown = ["", "é", "", "", "☃", "", "", "", "😀", "x", *[""] * 6, "\ufffd😀", ""]
    assert pieces == shown


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_bytes_make_up_the_text(seed):
    tokenizer, chosen = ByteTokenizer(), random.Random(seed)
    parts = ["é☃😀", "plain", "\ufffd"], [[255], [198], [0xE2 + 3, 0x98 + 3], [0, 1]]
    ids = []
    for _ in range(30):
        ids += chosen.choice([*map(tokenizer.encode, parts[0]), *parts[1]])
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    for n in range(len(ids)):  # nothing is held back longer than it must be
        assert len(tokenizer.decode(ids[: n + 1])) - len("".join(pieces[: n + 1])) <= 3


def test_blanks_between_words_are_kept(tmp_path):
    """Of a tokenizer that writes a blank before a word, unless it is the first."""
    tokenizer = library_tokenizer(
        tmp_path, decoder=decoders.Metaspace(), **{"▁a": 1, "▁b": 2, "c": 3}
    )
    ids = [1, 2, 3, 0, 1] * 5
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "a bc a" + " a bc a" * 4
    assert "".join(pieces_of(tokenizer, [2, 3, 1], prompt=[1])) == " bc a"


def test_bytes_between_other_tokens(tmp_path):
    """Of a tokenizer whose unfinished characters are decoded to a mark a byte."""
    vocab = {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = library_tokenizer(tmp_path, decoder=decoder, **vocab, x=257)
    ids = [257, *(byte + 1 for byte in "😀é".encode()), 257]
    assert pieces_of(tokenizer, ids) == ["x", "", "", "", "😀", "", "é", "x", ""]


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_in_any_pieces(seed):
    chosen = random.Random(seed)
    text = "".join(chosen.choices("ab\n", k=30))
    stop = ["".join(chosen.choices("ab\n", k=chosen.randint(2, 5))) for _ in range(3)]
    borders = sorted(chosen.choices(range(31), k=chosen.randint(0, 30)))
    finder, shown = StopFinder(stop), ""
    for start, end in itertools.pairwise([0, *borders, 30]):
        shown += finder.add(text[start:end])
        if finder.found:
            break
        # What is held back might be the beginning of a stop string, and is no longer than that.
        held = text[len(shown) : end]
        assert not held or any(s.startswith(held) for s in stop)
    else:
        shown += finder.finish()
    assert shown == cut(text, stop)


# Conversations


def expected_answers(letters, messages, n=20):
    """What follows if every answer is made from the whole conversation, read anew."""
    model, tokenizer = letters
    talk, answers = [], []
    for message in messages:
        talk.append({"role": "user", "content": message})
        ids = tokenizer.encode(render(talk, tokenizer, True))
        new = recomputed(model, ids, n, [2, tokenizer.encode(";")[0]])
        answers.append(tokenizer.decode(new).rstrip(";"))
        talk.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_conversation_equals_one_long_text(letters, monkeypatch):
    model, tokenizer = letters
    messages = ["abc", "e", "hh", "gg"]
    expected = expected_answers(letters, messages, 4)
    cut_off = [len(answer) == 4 for answer in expected]
    assert set(cut_off) == {True, False}
    read, forward = [], model.forward

    def spy(ids, **options):
        read.append(ids.shape[1])
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", spy)
    talk, pieces = Conversation(model, tokenizer, max_new_tokens=4), []
    assert [talk.say(message, stream=pieces.append) for message in messages] == expected
    assert "".join(pieces) == "".join(expected)
    # Of each turn what is new: the message in its layout, and what ends an answer cut off before.
    new = [len(f"u{m};a") + before for m, before in zip(messages, [0, *cut_off], strict=False)]
    assert read[::2] == new
    talk.reset()
    assert talk.say("abc") == expected[0]
    assert len(talk.messages) == 2


def test_a_template_that_lays_out_anew_is_read_anew(letters, monkeypatch):
    model, tokenizer = letters
    other = CharTokenizer(tokenizer.characters)
    other.chat_template = CHAT.replace("m.content", "(m.content if loop.last else m.content[:2])")
    messages = ["abc", "ehh", "gg"]
    expected = expected_answers((model, other), messages)
    read, forward = [], model.forward

    def spy(ids, **options):
        read.append(other.decode(ids[0]))
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", spy)
    talk = Conversation(model, other, max_new_tokens=20)
    assert [talk.say(message) for message in messages] == expected
    first, second = (answer[:2] for answer in expected[:2])
    assert read[::2] == ["uabc;a", f"uab;a{first};uehh;a", f"uab;a{first};ueh;a{second};ugg;a"]


@pytest.mark.parametrize(("max_new_tokens", "ended"), [(4, True), (1, False)])
def test_answers_that_end_with_a_token(max_new_tokens, ended):
    """The token of eos is part of the layout, and answers may also be cut off before it."""
    tokenizer, model = ByteTokenizer(), make_model(259, 4, range(100, 126))
    talk = Conversation(model, tokenizer, system="S", max_new_tokens=max_new_tokens)
    ids = tokenizer.encode_prompt("<|system|>\nS\n")
    for message in ("abc", "e", "hh"):
        ids += tokenizer.encode(f"<|user|>\n{message}\n<|assistant|>\n")
        new = recomputed(model, ids, max_new_tokens, [2])
        assert (new[-1] == 2) is ended
        assert talk.say(message) == tokenizer.decode(new) != ""
        ids += [*new, *([] if ended else [2]), *tokenizer.encode("\n")]


def test_what_fails_leaves_no_trace(letters):
    model, tokenizer = letters
    expected = expected_answers(letters, ["abc", "e"])
    talk = Conversation(model, tokenizer, max_new_tokens=20)
    talk.say("abc")

    def broken_off(piece):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.say("hh", stream=broken_off)
    with pytest.raises(ValueError, match="'x' at position"):
        talk.say("x")
    assert talk.say("e") == expected[1]


# Commands


@pytest.fixture(scope="module")
def saved(letters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters")
    letters[0].save_pretrained(folder, tokenizer=letters[1])
    return str(folder)


def test_generate_from_a_file(letters, saved, tmp_path, capsys):
    whole = continuations(letters)
    prompts = [prompt for prompt in PROMPTS if prompt]
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(prompts[:2]) + "\n\n" + "\r\n".join(prompts[2:]))
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt, "id": 1}) + "\n" for prompt in prompts))
    stop = whole[0][5:8]
    texts = [cut(t, [stop]) for p, t in zip(PROMPTS, whole, strict=True) if p]
    common = [
        "generate",
        "--device=cpu",
        "--model",
        saved,
        "--max-new-tokens=24",
        "--batch-size=3",
        "--stop",
        stop,
    ]
    for path in (lines, rows):
        assert main([*common, "--file", str(path), "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(each["prompt"], each["completion"]) for each in found] == [
            *zip(prompts, texts, strict=True)
        ]
        assert found[0]["ended_by"] == "stop"
        assert found[0]["n_tokens"] == 8
    assert main([*common, "--file", str(lines)]) == 0
    shown = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    assert capsys.readouterr().out.splitlines() == shown


def test_generate_lays_out_conversations(letters, saved, tmp_path, capsys):
    [answer] = expected_answers(letters, ["abc"])
    assert (
        main(["generate", "--device=cpu", "--model", saved, "--chat", "abc", "--max-new-tokens=20"])
        == 0
    )
    assert capsys.readouterr().out == answer + "\n"
    model, tokenizer = letters
    prompts = [tokenizer.encode(text) for text in ("sbb;uabc;a", "sbb;uc;ad;ua;a")]
    new = [recomputed(model, ids, 20, [2, tokenizer.encode(";")[0]]) for ids in prompts]
    talk = [
        {"role": r, "content": c} for r, c in (("user", "c"), ("assistant", "d"), ("user", "a"))
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "abc"}) + "\n" + json.dumps({"messages": talk}))
    command = [
        "generate",
        "--device=cpu",
        "--model",
        saved,
        "--chat",
        "--system",
        "bb",
        "--max-new-tokens=20",
    ]
    assert main([*command, "--file", str(rows)]) == 0
    answers = [tokenizer.decode(ids).rstrip(";") for ids in new]
    assert capsys.readouterr().out.splitlines() == answers


def test_a_missing_chat_template_is_told(letters, tmp_path, monkeypatch, capsys):
    letters[0].save_pretrained(tmp_path, tokenizer=CharTokenizer("abcdefghsu;"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit"))
    assert main(["chat", "--device=cpu", str(tmp_path)]) == 0
    assert "the tokenizer has no chat template" in capsys.readouterr().err


def test_generate_with_another_tokenizer(letters, saved, tmp_path, capsys):
    other = CharTokenizer(letters[1].characters[::-1])
    other.save(tmp_path)
    ids = letters[1].encode_prompt("abc")
    new = other.decode(recomputed(letters[0], other.encode_prompt("abc"), 5, [2]))
    command = ["generate", "--device=cpu", "--model", saved, "--tokenizer", str(tmp_path), "abc"]
    assert main([*command, "--max-new-tokens=5"]) == 0
    assert capsys.readouterr().out == f"abc{new}\n"
    assert ids != other.encode_prompt("abc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give prompts or --file, one of them"),
        (["a", "--file", "{file}"], "give prompts or --file, one of them"),
        (["a", "--system", "b"], "--system needs --chat"),
        (["--file", "{file}"], 'line 2: expected an object with "prompt", a string'),
        (["--file", "{file}", "--chat"], 'or "messages", a list'),
        (["--file", "no-such-file"], "No such file"),
        (["--file", "{empty}"], "empty.txt holds no prompt"),
    ],
)
def test_errors_of_generate(saved, tmp_path, capsys, arguments, message):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    (tmp_path / "empty.txt").write_text("\n")
    names = {"file": tmp_path / "rows.jsonl", "empty": tmp_path / "empty.txt"}
    arguments = [argument.format(**names) for argument in arguments]
    assert main(["generate", "--device=cpu", "--model", saved, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_chat(letters, saved, monkeypatch, capsys):
    expected = expected_answers(letters, ["abc", "e"])
    typed = "abc\n\nx\ne\n/no\n/reset\nabc\n/exit\nabc\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", "--device=cpu", saved, "--max-new-tokens=20"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [*expected, expected[0]]
    assert "character 'x' at position" in captured.err
    assert "no command /no; /reset begins anew, /exit" in captured.err


def test_chat_ends_with_its_input_and_goes_on_after_an_interruption(
    letters, saved, monkeypatch, capsys
):
    model, tokenizer = letters
    new = recomputed(model, tokenizer.encode("sbb;uabc;a"), 20, [2, tokenizer.encode(";")[0]])
    monkeypatch.setattr(sys, "stdin", io.StringIO("dd\nabc"))
    step, calls = Mamba3LM.step, []

    def interrupted(self, ids, state):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return step(self, ids, state)

    monkeypatch.setattr(Mamba3LM, "step", interrupted)
    assert main(["chat", "--device=cpu", saved, "--max-new-tokens=20", "--system", "bb"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(tokenizer.decode(new).rstrip(";") + "\n")
    assert "the question is forgotten" in captured.err
