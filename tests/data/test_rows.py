import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from mamba3.data.byte_tokenizer import ByteTokenizer
from mamba3.data.packing import cut, document_of
from mamba3.data.rows import load_rows, read_file

PROMPT = {"prompt": "a", "completion": "b"}
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(rows):
    return [(row.form, row.content) for row in rows]


@pytest.mark.parametrize(
    ("row", "form", "content"),
    [
        ({"text": "one", "id": 3}, "text", "one"),
        (PROMPT, "prompt", ("a", "b")),
        ({"messages": TALK, "text": "not this"}, "messages", TALK),
    ],
)
def test_the_form_is_found_in_jsonl_and_parquet(tmp_path, row, form, content):
    lines = write(tmp_path / "rows.jsonl", [row, row])
    parquet.write_table(pa.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
    for path, place in ((lines, "line"), (tmp_path / "rows.parquet", "row")):
        rows = read_file(path)
        assert contents(rows) == [(form, content)] * 2
        assert [row.where for row in rows] == [f"{path}, {place} 1", f"{path}, {place} 2"]


def test_a_text_is_a_paragraph_of_a_txt_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\n\none\ntwo\r\n \nthree\n\n\nfour")
    rows = read_file(path)
    assert contents(rows) == [("text", "one\ntwo"), ("text", "three"), ("text", "four")]
    assert [row.where for row in rows] == [f"{path}, line {n}" for n in (3, 6, 9)]


def test_columns_are_renamed(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b", "text": "c"}])
    columns = {"prompt": "question", "completion": "answer"}
    assert contents(read_file(path, columns)) == [("prompt", ("a", "b"))]
    with pytest.raises(ValueError, match=r"'answers' is missing; there are \['answer', 'quest"):
        read_file(path, columns | {"completion": "answers"})
    with pytest.raises(ValueError, match="columns may rename text"):
        load_rows(path, columns={"prompt": "question", "text": "answer"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "a"}, r"no key of a known form; there are \['question'\]"),
        ({"text": ""}, "text is empty"),
        ({"messages": []}, "messages must be a list of some"),
        ({"messages": ["hi"]}, "message 1 must be an object of role and content, got 'hi'"),
        ({"messages": [{"role": "assistant"}]}, "the content of message 1 must be a string"),
        ({"messages": TALK[:1]}, "no message is the assistant's"),
    ],
)
def test_a_bad_row_is_shown_with_what_was_expected(tmp_path, row, reason):
    path = write(tmp_path / "rows.jsonl", [PROMPT, row])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: {reason}") as error:
        read_file(path)
    assert f"the line: {json.dumps(row)}" in str(error.value)
    assert 'expected {"text": ...}, {"prompt": ..., "completion": ...} or' in str(error.value)


def test_a_data_set_has_one_form(tmp_path):
    path = write(tmp_path / "rows.jsonl", [PROMPT, {"text": "a"}])
    with pytest.raises(ValueError, match="line 2: a row of text among rows of prompt and compl"):
        load_rows(path)


def numbered(*numbers):
    return [{"text": f"row {n}"} for n in numbers]


def texts(rows):
    return {row.content for row in rows}


@pytest.mark.parametrize(
    ("valid", "left"),
    [
        (["valid.jsonl"], []),
        (["validation-00000-of-00001.jsonl", "test.jsonl"], ["test.jsonl"]),
        (["data/dev.jsonl"], []),
        (["test/0000.jsonl"], []),
    ],
)
def test_files_of_a_folder_are_told_apart(tmp_path, caplog, valid, left):
    write(tmp_path / "set" / "train-00000-of-00002.jsonl", numbered(1, 2))
    write(tmp_path / "set" / "train-00001-of-00002.jsonl", numbered(3))
    for name in valid:
        write(tmp_path / "set" / name, numbered(10 if name == valid[0] else 11))
    rows = load_rows(tmp_path / "set")
    assert (rows.name, rows.form) == ("set", "text")
    assert texts(rows.train) == {"row 1", "row 2", "row 3"}
    assert texts(rows.valid) == {"row 10"}
    assert rows.valid_files == [valid[0].split("/")[-1]]
    assert [name in caplog.text for name in left] == [True] * len(left)
    assert bool(left) == ("left out" in caplog.text)


def test_rows_that_are_measured_are_not_trained_on(tmp_path, caplog):
    write(tmp_path / "train.jsonl", numbered(1, 2, 3))
    write(tmp_path / "valid.jsonl", numbered(2, 4))
    rows = load_rows(tmp_path)
    assert texts(rows.train) == {"row 1", "row 3"}
    assert "left out are 1 rows to train on" in caplog.text
    write(tmp_path / "train.jsonl", numbered(2))
    with pytest.raises(ValueError, match="every row to train on is also one to measure on"):
        load_rows(tmp_path)


def test_without_a_file_to_measure_on_a_hash_splits(tmp_path):
    write(tmp_path / "set" / "a.jsonl", numbered(*range(100)))
    rows = load_rows(tmp_path / "set", valid_fraction=0.3)
    assert texts(rows.train) | texts(rows.valid) == {f"row {n}" for n in range(100)}
    assert not texts(rows.train) & texts(rows.valid)
    assert 20 < len(rows.valid) < 40
    assert rows.valid_files == []


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    write(tmp_path / "data" / "train.jsonl", numbered(1))
    write(tmp_path / "data" / "test.jsonl", numbered(2))
    asked = []

    def snapshot_download(repo, **options):
        asked.append((repo, options["repo_type"], options["revision"]))
        if repo == "org/none":
            raise OSError("404")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    rows = load_rows("org/sums@v1")
    assert (rows.name, texts(rows.train), texts(rows.valid)) == ("sums", {"row 1"}, {"row 2"})
    with pytest.raises(FileNotFoundError, match="org/none is neither a file nor a folder here"):
        load_rows("org/none")
    assert asked == [("org/sums", "dataset", "v1"), ("org/none", "dataset", None)]
    for name in ("data/rows.jsonl", "rows"):  # a slip, no name of the Hub
        with pytest.raises(FileNotFoundError, match="is not a file, nor a folder, nor the name"):
            load_rows(name)
    assert len(asked) == 2


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl"):
        load_rows(tmp_path)
    write(tmp_path / "valid.jsonl", numbered(1))
    with pytest.raises(FileNotFoundError, match="no file to train on"):
        load_rows(tmp_path)


# Rows as documents


def document(tmp_path, row, **options):
    [read] = read_file(write(tmp_path / "rows.jsonl", [row]))
    return document_of(read, ByteTokenizer(), **options)


def scored(document):
    return ByteTokenizer().decode(i for i in document.labels if i != -100)


def test_what_is_scored_of_a_row(tmp_path):
    tokenizer = ByteTokenizer()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    text = document(tmp_path, {"text": "né"})
    assert text.input_ids == text.labels == [bos, *tokenizer.encode("né"), eos]
    answer = document(tmp_path, PROMPT)
    assert answer.input_ids == [bos, *tokenizer.encode("ab"), eos]
    assert answer.labels == [-100, -100, *tokenizer.encode("b"), eos]
    talk = document(tmp_path, {"messages": [*TALK, *TALK]})
    assert scored(talk) == "yoyo"
    assert list(talk.labels).count(eos) == 2
    everything = document(tmp_path, PROMPT, all_tokens=True)
    assert everything.labels == everything.input_ids == answer.input_ids


def test_a_row_that_cannot_be_encoded_is_named(tmp_path):
    from mamba3.data.arithmetic import tokenizer

    [row] = read_file(write(tmp_path / "rows.jsonl", [{"prompt": "1+1", "completion": "two"}]))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: character 't' at position 0"):
        document_of(row, tokenizer())


def test_long_documents_are_cut(tmp_path):
    text = document(tmp_path, {"text": "abcdef"})
    parts = cut(text, 3, into_many=True)
    assert [part.input_ids for part in parts] == [
        text.input_ids[:3],
        text.input_ids[3:6],
        text.input_ids[6:],
    ]
    answer = document(tmp_path, {"prompt": "abcd", "completion": "ef"})
    [part] = cut(answer, 6, into_many=False)
    assert (part.input_ids, part.labels) == (answer.input_ids[:6], answer.labels[:6])
    assert cut(answer, 5, into_many=False) == []  # nothing of the answer is left
