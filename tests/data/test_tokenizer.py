import json

import pytest
from tokenizers import Tokenizer

from mamba3.data.arithmetic import tokenizer as curriculum_tokenizer
from mamba3.data.library_tokenizer import LibraryTokenizer
from mamba3.data.tokenizer import CharTokenizer, load_tokenizer


def test_ids_by_hand():
    tokenizer = CharTokenizer("0123=", prompt_suffix="=")
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("310=") == [6, 4, 3, 7]
    assert tokenizer.encode_prompt("31") == [1, 6, 4, 7]
    assert tokenizer.encode_prompt("31=") == [1, 6, 4, 7]
    assert tokenizer.encode_answer("0") == [3, 2]
    assert tokenizer.decode([1, 6, 4, 7, 3, 2, 0, 0]) == "31=0"


def test_no_suffix_adds_nothing():
    assert CharTokenizer("ab").encode_prompt("ab") == [1, 3, 4]


def test_the_curriculum_has_32_tokens():
    assert curriculum_tokenizer().vocab_size == 32


def test_unknown_character_is_named_with_its_position():
    with pytest.raises(ValueError, match=r"'x' at position 2 has no token; .* '01'"):
        CharTokenizer("01").encode("10x1")


@pytest.mark.parametrize("bad", [-1, 5])
def test_decode_names_an_id_without_a_token(bad):
    with pytest.raises(ValueError, match=rf"id {bad} at position 1"):
        CharTokenizer("01").decode([3, bad])


def test_characters_must_differ():
    with pytest.raises(ValueError, match=r"\['1'\]"):
        CharTokenizer("0112")
    with pytest.raises(ValueError, match="'=' at position 0"):
        CharTokenizer("01", prompt_suffix="=")


def test_tokenizers_library_reads_the_same_ids(tmp_path):
    ours = curriculum_tokenizer()
    ours.save(tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == ours.vocab_size
    for text in (ours.characters, "12+7=19", "c9<>?", "0"):
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)
        assert theirs.encode(text).ids == [ours.bos_token_id, *ours.encode(text)]
        assert theirs.decode([1, *ours.encode(text), 2]) == text
    assert theirs.encode("12+7=").ids == ours.encode_prompt("12+7")
    with pytest.raises(Exception, match="Missing"):
        theirs.encode("12 + 7")


def test_save_and_load(tmp_path):
    # Blanks, quotes, line ends and characters beyond ASCII survive the file.
    saved = CharTokenizer('0 1\n"é×', prompt_suffix="×")
    saved.save(tmp_path / "new")
    loaded = load_tokenizer(tmp_path / "new")
    assert (loaded.characters, loaded.prompt_suffix) == (saved.characters, saved.prompt_suffix)
    assert loaded.encode('\n"é') == saved.encode('\n"é')
    assert Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json")).encode(
        '\n"é×', add_special_tokens=False
    ).ids == loaded.encode('\n"é×')


def test_a_chat_template_is_kept(tmp_path):
    saved = CharTokenizer("ab")
    assert (saved.chat_template, curriculum_tokenizer().chat_template) == (None, None)
    saved.chat_template = "{{ messages }}"
    saved.save(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"
    assert CharTokenizer("ab").chat_template is None


def test_load_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a tokenizer's: it is not valid JSON"
    ):
        load_tokenizer(tmp_path)
    curriculum_tokenizer().save(tmp_path)
    with pytest.raises(ValueError, match="a token of its own"):
        load_tokenizer(tmp_path, eos_token="0")
    (tmp_path / "tokenizer_config.json").write_text('{"prompt_suffix": 1}')
    with pytest.raises(ValueError, match=r"prompt_suffix in .* must be a string, got 1"):
        load_tokenizer(tmp_path)


def test_files_that_only_resemble_ours_are_the_librarys(tmp_path):
    curriculum_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    for change in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": content["model"] | {"vocab": content["model"]["vocab"] | {"ab": 32}}},
        {"model": content["model"] | {"vocab": content["model"]["vocab"] | {"+": 40}}},
    ):
        path.write_text(json.dumps(content | change))
        assert isinstance(load_tokenizer(tmp_path), LibraryTokenizer)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
