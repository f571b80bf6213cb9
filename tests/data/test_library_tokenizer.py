import json
import pickle
import sys

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mamba3.data.library_tokenizer import LibraryTokenizer
from mamba3.data.tokenizer import load_tokenizer

CONFIG = {
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True},
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "chat_template": "{{ messages }}",
    "model_max_length": 2048,
}
TEXTS = ("the cat sat", " über 😀 the\n", "a</s>b", "")


def write(folder, *, opens=True, **config):
    """A byte-level BPE that learned a few merges, with special tokens."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat with the other cats"] * 3, trainer)
    if opens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "tokenizer")


def test_it_equals_transformers(folder, tmp_path):
    from transformers import AutoTokenizer

    ours = load_tokenizer(folder)
    assert isinstance(ours, LibraryTokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    ids = (ours.pad_token_id, ours.bos_token_id, ours.eos_token_id)
    assert ids == (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert ours.chat_template == theirs.chat_template
    for text in TEXTS:
        assert ours.encode_prompt(text) == theirs(text).input_ids
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_answer(text) == [*ours.encode(text), 2]
        assert ours.decode([1, *ours.encode(text), 2, 0]) == text.replace("</s>", "")
    # Neither padded to 5 tokens nor cut to 3, as the file says.
    assert len(ours.encode("the cat")) < 5 <= len(ours.encode("über"))


@pytest.mark.parametrize(
    ("opens", "stated", "expected"),
    [(True, None, True), (False, None, False), (False, True, True), (True, False, False)],
)
def test_texts_open_with_bos_where_they_should(tmp_path, opens, stated, expected):
    tokenizer = load_tokenizer(write(tmp_path / "t", opens=opens, add_bos_token=stated))
    assert tokenizer.bos_token_id == 1
    assert (tokenizer.encode_prompt("the")[0] == 1) is expected
    if expected:  # one that is written out is not doubled
        assert tokenizer.encode_prompt("<s>the") == tokenizer.encode_prompt("the")


def test_without_bos_and_pad(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "t", bos_token=None, pad_token=None))
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (None, 2)
    assert tokenizer.special_tokens == {"eos_token": "</s>"}
    assert tokenizer.encode_prompt("the") == tokenizer.encode("the")


def test_save_and_load(folder, tmp_path):
    saved = load_tokenizer(folder, eos_token="<pad>")
    saved.chat_template = "{{ 'é' }}"
    saved.save(tmp_path / "new")
    loaded = load_tokenizer(tmp_path / "new")
    assert (loaded.eos_token_id, loaded.chat_template) == (0, "{{ 'é' }}")
    assert [loaded.encode_prompt(t) for t in TEXTS] == [saved.encode_prompt(t) for t in TEXTS]
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **CONFIG,
        "eos_token": "<pad>",
        "chat_template": "{{ 'é' }}",
    }
    assert pickle.loads(pickle.dumps(saved)).encode(TEXTS[1]) == saved.encode(TEXTS[1])


def test_where_chat_templates_are_kept(folder):
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    write(folder, chat_template=several)
    assert load_tokenizer(folder).chat_template == "b"
    (folder / "chat_template.jinja").write_text("c")
    assert load_tokenizer(folder / "tokenizer.json").chat_template == "c"


def test_errors(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"tokenizer\.json has no token '<end>'"):
        load_tokenizer(folder, eos_token="<end>")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is not the configuration"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="nothing says which token"):
        load_tokenizer(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RuntimeError, match=r"pip install 'mamba3\[tokenizers\]'"):
        load_tokenizer(folder)


class Hub:
    """Stands in for hf_hub_download: repositories are folders."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.asked = folder, []
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self)

    def __call__(self, repository, name, *, revision=None):
        self.asked.append((repository, name, revision))
        if repository == "org/unreachable":
            raise LocalEntryNotFoundError("no connection")
        if not (self.folder / name).is_file() or repository == "org/empty":
            raise EntryNotFoundError(name)
        return str(self.folder / name)


def test_only_the_tokenizer_is_downloaded(folder, tmp_path, monkeypatch):
    hub = Hub(folder, monkeypatch)
    monkeypatch.chdir(tmp_path)
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert load_tokenizer("org/model-1.5b").encode("the") == load_tokenizer(folder).encode("the")
    assert hub.asked == [("org/model-1.5b", name, None) for name in names]
    hub.asked.clear()
    load_tokenizer("hf-hub:org/model@refs/pr/1")
    assert hub.asked == [("org/model", name, "refs/pr/1") for name in names]
    with pytest.raises(FileNotFoundError, match=r"org/empty of the Hub holds no tokenizer\.json"):
        load_tokenizer("org/empty")
    with pytest.raises(FileNotFoundError, match=r"org/unreachable, .* not wholly in the cache"):
        load_tokenizer("org/unreachable")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer among its files: Llama 3\.1"):
        load_tokenizer("mamba3-siso-187m")
    # What is a folder here is not looked for there.
    hub.asked.clear()
    write(tmp_path / "org")
    load_tokenizer("./org")
    (tmp_path / "org" / "model").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer("./org/model")
    assert not hub.asked
