import pytest
from tokenizers import Tokenizer

from mamba3.data.byte_tokenizer import ByteTokenizer
from mamba3.data.text_tokenizer import load_text_tokenizer
from mamba3.data.tokenizer import load_tokenizer

TEXTS = (
    "",
    "Héllo, wörld ☃ 😀\n\t\x00  two blanks ",
    "".join(map(chr, range(0x300))),
    "a<|eos|>b<|pad|><|bos|>",
    "<|eos<|eos|>|>",
    "\r\n\u0301e\ufffd",
)


@pytest.fixture
def tokenizer():
    return ByteTokenizer()


def test_ids_by_hand(tokenizer):
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("né\x00") == [113, 198, 172, 3]
    assert tokenizer.encode("a<|eos|>b") == [100, 2, 101]
    assert tokenizer.encode_prompt("a") == [1, 100]
    assert tokenizer.encode_answer("a") == [100, 2]
    assert tokenizer.decode([1, 113, 198, 172, 2, 0]) == "né"
    assert tokenizer.decode([198, 100]) == "\ufffda"


@pytest.mark.parametrize("text", [*TEXTS, "".join(map(chr, range(0xE000, 0x10000, 7)))])
def test_any_text_is_decoded_to_itself(tokenizer, text):
    plain = text.replace("<|eos|>", "").replace("<|pad|>", "").replace("<|bos|>", "")
    assert tokenizer.decode(tokenizer.encode(text)) == plain


def test_errors(tokenizer):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("\ud800")
    with pytest.raises(ValueError, match=r"id 259 at position 1 is no token; ids are 0 to 258"):
        tokenizer.decode([0, 259])
    with pytest.raises(ValueError, match="a token of its own"):
        load_tokenizer("bytes", eos_token="<s>")


def test_libraries_read_the_same_ids(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save(tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    hugging = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.get_vocab_size() == len(hugging) == tokenizer.vocab_size
    for text in TEXTS:
        ids = tokenizer.encode_prompt(text)
        assert theirs.encode(text).ids == hugging(text).input_ids == ids
        assert theirs.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
        assert theirs.decode(ids) == tokenizer.decode(ids)
    broken = [198, 198, 172, 243, 162, 100, 255]
    assert theirs.decode(broken) == tokenizer.decode(broken)
    assert (hugging.bos_token_id, hugging.eos_token_id, hugging.pad_token_id) == (1, 2, 0)
    assert (hugging.chat_template, hugging.padding_side) == ("{{ messages }}", "left")


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "plain")
    tokenizer.chat_template = "{{ 1 }}"
    tokenizer.save(tmp_path / "chat")
    for name, template in (("plain", None), ("chat", "{{ 1 }}")):
        loaded = load_tokenizer(tmp_path / name)
        assert isinstance(loaded, ByteTokenizer)
        assert loaded.chat_template == template


def test_it_has_a_name(tmp_path, monkeypatch):
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    documents = load_text_tokenizer("bytes")
    assert (documents.name, documents.vocab_size) == ("bytes", 259)
    assert documents.encode(["a", ""]) == [[1, 100, 2], [1, 2]]
    # A folder of that name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer("bytes")
