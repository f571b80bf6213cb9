"""Named models: the look-up, its errors, and what ships."""

from pathlib import Path

import pytest
import torch

import mamba3
from mamba3 import zoo
from mamba3.config import Mamba3Config
from mamba3.data.tokenizer import load_tokenizer
from mamba3.models.lm import Mamba3LM
from mamba3.zoo import MODELS, list_models, load_model, resolve

NAME = "arithmetic-tiny"


def save_tiny(folder):
    config = Mamba3Config(vocab_size=20, d_model=8, n_layer=1, d_state=4, headdim=8)
    model = Mamba3LM(config)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Another model under the shipped name, and an empty current folder."""
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path / "weights")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return save_tiny(tmp_path / "weights" / NAME)


def assert_same_weights(model, other):
    theirs = other.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())


def test_list_models():
    assert list_models() == sorted(MODELS)
    assert list_models("arith*") == list_models(shipped=True) == [NAME]
    assert list_models("mimo*") == list_models("mamba3-mimo-*")
    assert len(list_models("mimo*", shipped=False)) == len(list_models("siso*")) == 4
    assert list_models("no-*") == list_models("mimo*", shipped=True) == []


def test_load_by_name(shipped):
    assert resolve(NAME) == zoo.WEIGHTS / NAME
    assert_same_weights(load_model(NAME), shipped)
    assert_same_weights(mamba3.load_model(NAME), shipped)
    assert_same_weights(Mamba3LM.from_pretrained(NAME), shipped)
    assert load_model(NAME, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    assert load_model(NAME, device="meta").lm_head.weight.is_meta


def test_load_by_folder(shipped, tmp_path):
    other = save_tiny(tmp_path / "other")
    for path in (tmp_path / "other", str(tmp_path / "other"), "../other"):
        assert_same_weights(load_model(path), other)


def test_name_that_is_also_a_folder(shipped):
    other = save_tiny(Path(NAME))
    with pytest.raises(ValueError, match=f"'./{NAME}' for the folder, or '{zoo.WEIGHTS / NAME}'"):
        resolve(NAME)
    assert_same_weights(load_model(f"./{NAME}"), other)
    assert_same_weights(load_model(Path(NAME)), other)
    assert_same_weights(load_model(str(zoo.WEIGHTS / NAME)), shipped)


@pytest.mark.parametrize("name", ["arithmetic-tinny", "aritmetic_tiny", "arithmetic"])
def test_near_names(shipped, name):
    message = f"'{name}' is neither a local folder nor a model with a name; did you mean {NAME}"
    with pytest.raises(FileNotFoundError, match=message):
        resolve(name)


@pytest.mark.parametrize("name", ["/no/nothing", "./nothing", Path("no/such")])
def test_unknown_names_list_what_there_is(shipped, name):
    with pytest.raises(FileNotFoundError) as caught:
        load_model(name)
    assert str(caught.value) == (
        f"'{name}' is neither a local folder nor a model with a name. Named models: "
        f"{', '.join(sorted(MODELS))}. Others on the Hugging Face Hub are called org/name"
    )


def test_file_instead_of_folder(shipped):
    Path("model.safetensors").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="is a file, expected the folder that holds"):
        load_model("model.safetensors")


def test_empty_name(shipped):
    with pytest.raises(ValueError, match="is empty"):
        load_model("")


def test_incomplete_installation(shipped, monkeypatch, tmp_path):
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"missing from this installation.*Reinstall"):
        load_model(NAME)


def test_parameters_count_a_tied_head_once(shipped):
    assert MODELS[NAME].parameters() == sum(p.numel() for p in shipped.parameters())


@pytest.mark.parametrize("name", list_models(shipped=True))
def test_what_ships(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = load_model(name)
    assert MODELS[name].parameters() == sum(p.numel() for p in model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert load_tokenizer(resolve(name)).vocab_size == model.config.vocab_size
    assert f"\n# {name}\n" in (resolve(name) / "README.md").read_text(encoding="utf-8")
    assert sum(f.stat().st_size for f in resolve(name).rglob("*") if f.is_file()) < 2e6
