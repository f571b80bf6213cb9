import pytest

from mamba3.data.arithmetic import tokenizer
from mamba3.data.jsonl import read_rows, split_rows
from mamba3.data.problems import Problem

GOOD = b'{"prompt": "12+7", "completion": "19"}\n'


def write(tmp_path, content: bytes):
    path = tmp_path / "sums.jsonl"
    path.write_bytes(content)
    return path


def test_rows_are_read(tmp_path):
    content = b'\xef\xbb\xbf{"prompt": "1+1=", "completion": "2", "id": 7}\r\n' + GOOD.rstrip()
    assert read_rows(write(tmp_path, content), tokenizer()) == [
        Problem("sums", "1+1=", "2"),
        Problem("sums", "12+7", "19"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "1", "completion": "2"', "not JSON"),
        (b"", "the line is empty"),
        (b"  ", "the line is empty"),
        (b'["1", "2"]', "expected an object"),
        (b'{"prompt": "1"}', r"'completion' is missing; there are \['prompt'\]"),
        (b'{"prompt": "1", "answer": "2"}', "'completion' is missing"),
        (b'{"prompt": 1, "completion": "2"}', "prompt must be a string, got 1"),
        (b'{"prompt": "1", "completion": null}', "completion must be a string, got None"),
        (b'{"prompt": "", "completion": "2"}', "prompt is empty"),
        (b'{"prompt": "1", "completion": ""}', "completion is empty"),
        (b'{"prompt": "1 + 1", "completion": "2"}', "character ' ' at position 1"),
        (b'{"prompt": "1", "completion": "2!"}', "character '!' at position 1"),
        (b'{"prompt": "\xff", "completion": "2"}', "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    path = write(tmp_path, GOOD * 2 + line + b"\n" + GOOD)
    with pytest.raises(ValueError, match=rf"sums\.jsonl, line 3: .*{reason}"):
        read_rows(path, tokenizer())


def test_no_file_or_no_rows(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sums\.jsonl is not a file"):
        read_rows(tmp_path / "sums.jsonl", tokenizer())
    with pytest.raises(ValueError, match="holds no rows"):
        read_rows(write(tmp_path, b""), tokenizer())


def rows_of(n):
    return [Problem("t", f"{i}+1", str(i + 1)) for i in range(n)]


def test_split_keeps_every_row_once_and_prompts_on_one_side():
    rows = rows_of(500) + rows_of(50)
    train, valid = split_rows(rows, 0.2)
    assert sorted(train + valid) == sorted(rows)
    assert {r.prompt for r in train}.isdisjoint(r.prompt for r in valid)
    assert len(valid) / len(rows) == pytest.approx(0.2, abs=0.05)


def test_rows_stay_on_their_side_as_the_file_grows():
    _, valid = split_rows(rows_of(200), 0.2)
    _, more = split_rows(rows_of(400)[::-1], 0.2)
    assert set(valid) == {r for r in more if r in rows_of(200)}


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_side_gets_a_prompt(fraction):
    train, valid = split_rows(rows_of(2) * 3, fraction)
    assert (len(train), len(valid)) == (3, 3)


def test_split_errors():
    with pytest.raises(ValueError, match="give at least 2"):
        split_rows(rows_of(1) * 5, 0.2)
    for fraction in (0, 1, -0.5, 2):
        with pytest.raises(ValueError, match="valid_fraction must lie between 0 and 1"):
            split_rows(rows_of(5), fraction)
