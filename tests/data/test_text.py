"""From files of texts to token files and batches of them."""

import json
import logging
import pickle
import resource
import sys
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mamba3.data.arithmetic import tokenizer as curriculum_tokenizer
from mamba3.data.loader import AsyncBatches
from mamba3.data.sources import Text, read_texts, source_files
from mamba3.data.text import TokenFile, TokenStream, write_tokens
from mamba3.data.text_tokenizer import TextTokenizer, load_text_tokenizer
from mamba3.data.tokenizer import CharTokenizer

LETTERS = {letter: i for i, letter in enumerate("abcdefghij")}


def encode_letters(texts):
    """A document is its letters and a 10."""
    if any(unknown := set(text) - set(LETTERS) for text in texts):
        raise ValueError(f"unknown letters {sorted(unknown)}")
    return [[*map(LETTERS.get, text), 10] for text in texts]


TOKENIZER = TextTokenizer("letters", 11, encode_letters)


def write(path, texts, **options):
    texts = [Text(text, f"text {i}") for i, text in enumerate(texts)]
    return write_tokens(texts, TOKENIZER, path, progress=False, **options)


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


# Sources


def read(path, **options):
    return [(text.text, text.where, text.error) for text in read_texts([path], **options)]


def test_text_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\n  \ntwo é\nlast".encode())
    assert read(path) == [("one\r\n\n  \ntwo é\nlast", str(path), "")]
    assert read(path, lines=True) == [
        ("one", f"{path}, line 1", ""),
        ("two é", f"{path}, line 4", ""),
        ("last", f"{path}, line 5", ""),
    ]
    path.write_bytes(b"good\nb\xffd\n")
    [(text, where, error)] = read(path)
    assert (text, where) == (None, str(path))
    assert "can't decode byte 0xff in position 6" in error
    assert [text for text, *_ in read(path, lines=True)] == ["good", None]
    path.write_bytes(b"")
    assert read(path) == [(None, str(path), "the file is empty")]


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one\ntwo", "n": 1}, {"n": 2}, {"text": 3}, {"text": ""}, ["text"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '\n{"text": "cut')
    found = read(path)
    assert [where for _, where, _ in found] == [f"{path}, line {n}" for n in range(1, 8)]
    assert [text for text, *_ in found] == ["one\ntwo", *[None] * 6]
    expected = ["", "the key 'text' is missing; there are ['n']", "text must be a string, got 3"]
    expected += ["text is empty", "expected an object with the key 'text'", "the line is empty"]
    expected += ["not JSON: Unterminated string"]
    for (_, _, error), start in zip(found, expected, strict=True):
        assert error.startswith(start)
    path.write_text('{"body": "b"}\n')
    assert read(path, field="body") == [("b", f"{path}, line 1", "")]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    values = [f"text {i}" for i in range(2500)]
    values[1300] = None
    table = pa.table({"n": list(range(2500)), "body": values})
    parquet.write_table(table, path, row_group_size=700)
    found = read(path, field="body")
    assert [text for text, *_ in found] == values
    assert found[1300][1:] == (f"{path}, row 1301", "body must be a string, got None")
    assert sum(text.n_bytes for text in read_texts([path], field="body")) == pytest.approx(
        path.stat().st_size
    )
    with pytest.raises(ValueError, match=r"a\.parquet .*no column 'text'; there are \['n', 'body'"):
        read(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
        read(path, field="body")


def test_missing_libraries_are_named_with_the_remedy(tmp_path, monkeypatch):
    words(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RuntimeError, match=r"pip install 'mamba3\[parquet\]'"):
        read(tmp_path / "a.parquet")
    with pytest.raises(RuntimeError, match=r"pip install 'mamba3\[tokenizers\]'"):
        load_text_tokenizer(tmp_path)


def test_source_files(tmp_path):
    for name in ("b/2.jsonl", "b/1.txt", "b/c/0.parquet", "b/notes.md", "a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = source_files([tmp_path / "a.md", tmp_path / "b"])
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["a.md", "b/1.txt", "b/2.jsonl", "b/c/0.parquet"]
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        source_files([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no"):
        source_files([tmp_path / "empty"])


# Tokenizers


def words(folder, **config):
    """A tokenizer of the library: words, opened by <s>."""
    vocabulary = {"<s>": 0, "</s>": 1, "one": 2, "two": 3, "<unk>": 9}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    return folder


def test_character_tokenizer(tmp_path):
    tokenizer = CharTokenizer("ab ", prompt_suffix=" ")
    tokenizer.save(tmp_path)
    for path in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        loaded = load_text_tokenizer(path)
        assert (loaded.name, loaded.vocab_size) == (str(path), 6)
        assert loaded.encode(["a b", ""]) == [[1, 3, 5, 4, 2], [1, 2]]
    with pytest.raises(ValueError, match="'x' at position 1 has no token"):
        loaded.encode(["ab", "axy"])
    with pytest.raises(ValueError, match="leave out end='b'"):
        load_text_tokenizer(tmp_path, end="b")
    shipped = load_text_tokenizer("arithmetic-tiny")
    ours = curriculum_tokenizer()
    assert shipped.encode(["1+1=2"]) == [[1, *ours.encode("1+1=2"), 2]]


def test_tokenizers_of_the_library(tmp_path):
    loaded = load_text_tokenizer(words(tmp_path))
    assert loaded.vocab_size == 10
    assert loaded.encode(["one two one two three", ""]) == [[0, 2, 3, 2, 3, 9, 1], [0, 1]]
    words(tmp_path, eos_token={"content": "two"})
    assert load_text_tokenizer(tmp_path).encode(["one", "two"]) == [[0, 2, 3], [0, 3]]
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    assert load_text_tokenizer(tmp_path / "other.json", end="</s>").encode(["one"]) == [[0, 2, 1]]


def test_errors_of_tokenizers(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_text_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither"):
        load_text_tokenizer("no-such-model")
    words(tmp_path, eos_token="<end>")
    with pytest.raises(ValueError, match="has no token '<end>'"):
        load_text_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is not the configuration"):
        load_text_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="nothing says which token"):
        load_text_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_text_tokenizer(tmp_path)


# Token files


def test_round_trip(tmp_path):
    texts = ["abc", "", "j" * 700, *["de"] * 300]
    written = write(tmp_path / "new" / "corpus.v1", texts)
    assert files_in(tmp_path / "new") == ["corpus.v1.bin", "corpus.v1.idx", "corpus.v1.json"]
    expected = encode_letters(texts)
    for ending in ("", ".bin", ".json"):
        corpus = TokenFile(f"{written.path}{ending}")
        assert corpus.n_documents == written.n_documents == 303
        assert corpus.n_tokens == written.n_tokens == len(corpus.tokens) == sum(map(len, expected))
        assert (corpus.vocab_size, corpus.tokenizer) == (11, "letters")
        for number in (0, 1, 2, 3, 302):
            assert corpus.document(number).tolist() == expected[number]
    assert corpus.tokens.tolist() == list(chain(*expected))
    assert pickle.loads(pickle.dumps(corpus)).document(0).tolist() == [0, 1, 2, 10]
    assert len(pickle.dumps(corpus)) < 1000


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_the_type_holds_every_id(tmp_path, vocab_size, dtype):
    last = TextTokenizer("last", vocab_size, lambda texts: [[0, vocab_size - 1]] * len(texts))
    write_tokens([Text("a", "here")], last, tmp_path / "c", progress=False)
    corpus = TokenFile(tmp_path / "c")
    assert corpus.tokens.tolist() == [0, vocab_size - 1]
    assert corpus.tokens.dtype == dtype
    assert (tmp_path / "c.bin").stat().st_size == 2 * np.dtype(dtype).itemsize


def test_a_bad_document_leaves_nothing_or_what_was_there(tmp_path):
    path = tmp_path / "c"
    with pytest.raises(ValueError, match=r"^text 1: unknown letters \['x'\]"):
        write(path, ["a", "bx", "c"])
    with pytest.raises(ValueError, match="no documents"):
        write(path, [])
    assert files_in(tmp_path) == []
    write(path, ["abc"])
    with pytest.raises(FileExistsError, match="overwrite"):
        write(path, ["d"])
    with pytest.raises(ValueError, match="text 0"):
        write(path, ["x"], overwrite=True)
    assert TokenFile(path).tokens.tolist() == [0, 1, 2, 10]
    write(path, ["d"], overwrite=True)
    assert TokenFile(path).tokens.tolist() == [3, 10]
    assert files_in(tmp_path) == ["c.bin", "c.idx", "c.json"]


def test_bad_documents_can_be_left_out_and_are_counted(tmp_path, caplog):
    texts = [Text("a", "1"), Text(None, "2", error="not JSON"), Text("x", "3"), Text("b", "4")]
    options = {"on_error": "skip", "progress": False}
    with caplog.at_level(logging.WARNING):
        written = write_tokens(texts, TOKENIZER, tmp_path / "c", **options)
    assert (written.n_documents, written.n_tokens, written.n_skipped) == (2, 4, 2)
    assert TokenFile(tmp_path / "c").tokens.tolist() == [0, 10, 1, 10]
    assert caplog.messages == ["2 documents were left out; the first: 2: not JSON"]
    with pytest.raises(ValueError, match=r"^2: not JSON"):
        write_tokens(texts, TOKENIZER, tmp_path / "d", progress=False)
    with pytest.raises(ValueError, match="on_error must be"):
        write_tokens(texts, TOKENIZER, tmp_path / "d", on_error="ignore")


@pytest.mark.parametrize(("room", "text"), [(10, "d" * 9), (20_000, "d" * 50_000)])
def test_a_full_disk_leaves_what_was_there(tmp_path, room, text):
    write(tmp_path / "c", ["abc"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "c", [text], overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert TokenFile(tmp_path / "c").tokens.tolist() == [0, 1, 2, 10]
    assert files_in(tmp_path) == ["c.bin", "c.idx", "c.json"]


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        (".json", None, r"c\.json does not exist; `mamba3 tokenize` writes"),
        (".json", b"{", r"c\.json does not describe a token file"),
        (".json", b"[]", r"c\.json does not describe a token file"),
        (".json", b'{"dtype": "uint16"}', "vocab_size is None"),
        (".json", "int8", "dtype is 'int8', expected uint16 or uint32"),
        (".bin", None, r"c\.bin is missing; write it again"),
        (".bin", b"\0" * 7, r"c\.bin has 7 bytes, expected 14: it is cut off"),
        (".idx", None, r"c\.idx is missing"),
        (".idx", b"\0" * 8, r"c\.idx has 8 bytes, expected 24"),
        (".idx", b"\1" * 24, r"c\.idx is damaged: it goes from 72340172838076673"),
    ],
)
def test_damaged_token_files(tmp_path, ending, content, message):
    write(tmp_path / "c", ["abc", "de"])
    path = tmp_path / f"c{ending}"
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        path.write_text(path.read_text().replace("uint16", content))
    else:
        path.write_bytes(content)
    with pytest.raises(FileNotFoundError if content is None else ValueError, match=message):
        TokenFile(tmp_path / "c")


# The stream


@pytest.fixture
def corpus(tmp_path):
    """103 tokens: 14 windows of 7, and 5 tokens that are left over."""
    write(tmp_path / "c", ["abcdefghij"[: i % 10] for i in range(19)] + ["jj"])
    return TokenFile(tmp_path / "c")


def test_an_epoch_is_every_window_once(corpus):
    assert corpus.n_tokens == 103
    stream = TokenStream(corpus.path, length=7, batch_size=4, seed=2)
    batches = [stream(index) for index in range(7)]
    rows = [tuple(row) for batch in batches for row in batch.input_ids.tolist()]
    windows = sorted(zip(*[iter(corpus.tokens.tolist())] * 7, strict=False))
    assert sorted(rows[:14]) == sorted(rows[14:]) == windows
    assert rows[:14] != rows[14:]
    for batch in batches:
        assert torch.equal(batch.labels, batch.input_ids)
        assert batch.input_ids.dtype == torch.int64
        assert batch.n_tokens == 28
    other = TokenStream(corpus.path, length=7, batch_size=4, seed=3)
    assert not torch.equal(other(0).input_ids, batches[0].input_ids)


def test_workers_and_ranks_read_the_same(corpus):
    stream = TokenStream(corpus.path, length=5, batch_size=2, seed=1)
    for rank in range(2):
        with AsyncBatches(stream, 3, workers=1, rank=rank, world=2) as batches:
            for index in range(3, 7):
                assert torch.equal(next(batches).input_ids, stream(2 * index + rank).input_ids)


def test_a_whole_corpus_can_be_one_window(corpus):
    stream = TokenStream(corpus.path, length=103, batch_size=1, seed=0)
    assert stream(5).input_ids[0].tolist() == corpus.tokens.tolist()
    for length in (0, 104):
        with pytest.raises(ValueError, match=f"length must be 1 to 103, .* got {length}"):
            TokenStream(corpus.path, length=length, batch_size=1, seed=0)


def test_an_id_beyond_the_vocabulary_is_named(corpus):
    path = corpus.path.with_name("c.bin")
    content = bytearray(path.read_bytes())
    content[2 * 31] = 77
    path.write_bytes(content)
    stream = TokenStream(corpus.path, length=103, batch_size=1, seed=0)
    with pytest.raises(ValueError, match=r"c\.bin is damaged: token 31 is 77, expected less than"):
        stream(0)
