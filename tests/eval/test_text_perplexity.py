"""Perplexity and loss by position of texts, against all logits of whole texts in float64."""

import json
import math

import pytest
import torch
from compare import DEVICE, randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional as F

from mamba3 import Mamba3Config, Mamba3LM, load_model, load_tokenizer
from mamba3.cli import main
from mamba3.data.sources import Text
from mamba3.data.text import TokenFile, write_tokens
from mamba3.data.text_tokenizer import load_text_tokenizer
from mamba3.eval import perplexity as module
from mamba3.eval.long_context import doubling_edges, even_edges, long_context
from mamba3.eval.perplexity import Document, read_documents, row_losses, text_perplexity

END = 256


@pytest.fixture(scope="module")
def model():
    config = Mamba3Config(vocab_size=257, d_model=16, n_layer=2, d_state=6, headdim=8)
    return randomise(Mamba3LM(config, device=DEVICE), scale=0.3).double().eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A model with a tokenizer of bytes that opens texts with nothing, as many on the Hub."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    save_bytes_tokenizer(folder)
    return folder


def save_bytes_tokenizer(folder, opening=None):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    if opening is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{opening} $A", special_tokens=[(opening, vocab[opening])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')


def direct(model, ids):
    """The loss of every id but the first, from one pass over all."""
    ids = torch.tensor(ids, device=DEVICE)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    assert logits.dtype == torch.float64
    return -F.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0].cpu()


TEXTS = ["déjà vu, 42 %", "x", "abc\nabc\nabc", "a longer text ✓ of some more tokens than a window"]


@pytest.mark.parametrize("opening", [None, "<end>", "é"])
def test_every_token_of_a_text_counts_once(model, tmp_path, opening):
    """The first one from what opens texts, or from the end token; the end itself not at all."""
    save_bytes_tokenizer(tmp_path, opening)
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    losses = []
    for text in TEXTS:
        ids = plain.encode(text, add_special_tokens=False).ids
        assert len(ids) == len(text.encode())
        first = END if opening is None else plain.token_to_id(opening)
        losses.append(direct(model, [first, *ids]))
    losses = torch.cat(losses)

    tokenizer = load_text_tokenizer(tmp_path)
    documents = list(read_documents(file, tokenizer, field="body"))
    told = text_perplexity(model, documents, length=1000, batch_size=3)
    n = sum(len(text.encode()) for text in TEXTS)
    assert (told.n_tokens, told.n_bytes, told.n_documents) == (n, n, 4)
    assert told.loss == pytest.approx(losses.mean().item(), rel=1e-9)
    assert told.perplexity == pytest.approx(losses.mean().exp().item(), rel=1e-9)
    assert told.bits_per_byte == pytest.approx(losses.sum().item() / n / math.log(2), rel=1e-9)
    assert told.byte_perplexity == pytest.approx(2**told.bits_per_byte)


def test_bytes_are_those_of_the_text_and_not_its_tokens(model):
    losses = direct(model, [9, 8, 7, 6, 5])
    told = text_perplexity(model, [Document([9, 8, 7, 6, 5], 2, 11)])
    assert told.n_tokens == 3
    assert told.loss == pytest.approx(losses[1:].mean().item(), rel=1e-9)
    assert told.bits_per_byte == pytest.approx(losses[1:].sum().item() / 11 / math.log(2))


@pytest.mark.parametrize("length", [2, 3, 7, 16])
def test_windows_share_a_token(model, length):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(257, (n,), generator=generator).tolist() for n in (16, 1, 23, 2)]
    losses = []
    for row in rows:
        at = 0
        while at < len(row) - 1:
            losses.append(direct(model, row[at : at + length]))
            at += length - 1
    told = text_perplexity(
        model, [Document(row, 1, None) for row in rows], length=length, batch_size=3
    )
    assert told.n_tokens == 15 + 0 + 22 + 1
    assert told.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-9)
    assert told.bits_per_byte is None


@pytest.mark.parametrize("most", [1, 5 * 3 * 272, 10**9])
def test_pieces_of_rows_give_the_losses_of_whole_rows(model, monkeypatch, most):
    monkeypatch.setattr(module, "MAX_LOGITS", most)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(257, (n,), generator=generator).tolist() for n in (11, 18, 1)]
    for row, losses in zip(rows, row_losses(model, rows), strict=True):
        torch.testing.assert_close(losses, direct(model, row), rtol=1e-7, atol=1e-9)


def test_a_token_file_and_files_of_text(model, folder, tmp_path):
    texts = [Text(text, "here", 1) for text in TEXTS]
    write_tokens(texts, load_text_tokenizer(folder), tmp_path / "corpus", progress=False)
    corpus = TokenFile(tmp_path / "corpus")
    losses = torch.cat([direct(model, corpus.document(i).tolist()) for i in range(4)])
    told = text_perplexity(model, read_documents(tmp_path / "corpus.bin"))
    assert told.n_tokens == len(losses) == corpus.n_tokens - 4
    assert told.loss == pytest.approx(losses.mean().item(), rel=1e-9)
    assert told.n_bytes is told.bits_per_byte is None

    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    tokenizer = load_text_tokenizer(folder)
    assert [d.n_bytes for d in read_documents(tmp_path / "lines.txt", tokenizer)] == [9]
    lines = read_documents(tmp_path / "lines.txt", tokenizer, lines=True)
    assert [d.n_bytes for d in lines] == [3, 3]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        list(read_documents(tmp_path / "lines.txt"))


def test_the_curve(model):
    """Whole windows only, so that every bucket is of the same texts."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(257, (n,), generator=generator).tolist() for n in (41, 12, 20, 19)]
    documents = [Document(row, 1, None) for row in rows]
    windows = [rows[0][:20], rows[0][20:40], rows[2]]
    losses = torch.stack([direct(model, window) for window in windows])
    curve = long_context(model, documents, 20, edges=even_edges(20, 8), batch_size=2)
    assert (curve.length, curve.n_windows, curve.n_left_out) == (20, 3, 2)
    expected = [(0, 8, losses[:, :7]), (8, 16, losses[:, 7:15]), (16, 20, losses[:, 15:])]
    for bucket, (first, last, part) in zip(curve.buckets, expected, strict=True):
        assert (bucket.first, bucket.last, bucket.n_tokens) == (first, last, part.numel())
        assert bucket.loss == pytest.approx(part.mean().item(), rel=1e-9)
        assert bucket.perplexity == pytest.approx(part.mean().exp().item(), rel=1e-9)
    with pytest.raises(ValueError, match="the longest has 41: take a shorter length"):
        long_context(model, documents, 42)


def test_edges(model):
    assert doubling_edges(2048) == [0, 128, 256, 512, 1024, 2048]
    assert doubling_edges(300) == [0, 128, 256, 300]
    assert doubling_edges(128) == [0, 128]
    assert even_edges(10, 4) == [0, 4, 8, 10]
    for edges in ([0, 4, 4, 9], [1, 9], [0, 8], []):
        with pytest.raises(ValueError, match="edges must rise from 0"):
            long_context(model, [], 9, edges=edges)


def test_nothing_to_measure(model):
    with pytest.raises(ValueError, match="at least one token"):
        text_perplexity(model, [Document([3], 1, 0)])
    with pytest.raises(ValueError, match="length must be at least 2"):
        text_perplexity(model, [], length=1)


# The command


def test_the_command_prints_what_the_library_finds(folder, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("some text, and more of it. " * 6)
    command = ["eval", str(folder), "--device", "cpu", "--perplexity", str(file)]
    command += ["--length", "50", "--long-context", "40", "--bucket", "16"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    documents = list(read_documents(file, load_text_tokenizer(folder)))
    loaded = load_model(folder)
    told = text_perplexity(loaded, documents, length=50)
    assert {name: found[name] for name in told._fields} == pytest.approx(told._asdict())
    curve = long_context(loaded, documents, 40, edges=[0, 16, 32, 40])
    assert found["long_context"]["n_windows"] == curve.n_windows == 4
    for bucket, expected in zip(found["long_context"]["buckets"], curve.buckets, strict=True):
        assert bucket == pytest.approx(expected._asdict())

    assert main(command) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bits", "per", "byte", f"{told.bits_per_byte:.4f}"] in lines
    first = curve.buckets[0]
    assert ["0-16", f"{first.loss:.4f}", f"{first.perplexity:.4f}", "60"] in lines


def test_the_command_with_a_character_tokenizer(tmp_path, capsys):
    (tmp_path / "sums.txt").write_text("8+7=15\n")
    file = str(tmp_path / "sums.txt")
    command = ["eval", "--model", "arithmetic-tiny", "--device", "cpu", "--lines", "--json"]
    assert main([*command, "--perplexity", file]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer("arithmetic-tiny")
    model = load_model("arithmetic-tiny").double()
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer.encode("8+7=15")])
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:]).item()
    assert (found["n_tokens"], found["n_bytes"]) == (6, 6)
    assert found["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--perplexity", "{file}", "--n", "3"], "goes with none of --data, --n and --stages"),
        (["--long-context", "9"], "--long-context needs texts"),
        (["--model", "arithmetic-tiny"], "eval takes one model"),
        (["--perplexity", "{file}"], "bad.jsonl, line 2: the key 'text' is missing"),
        (["--perplexity", "{file}", "--tokenizer", "no-such"], "'no-such' is neither"),
    ],
)
def test_errors_of_the_command(folder, tmp_path, capsys, arguments, message):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "a"}\n{"txt": "b"}\n')
    arguments = [argument.format(file=file) for argument in arguments]
    assert main(["eval", str(folder), "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
