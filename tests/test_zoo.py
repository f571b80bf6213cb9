"""Named models: the look-up, its errors, and what ships."""

import dataclasses
from pathlib import Path

import pytest
import torch

import mamba3
from mamba3 import cli, zoo
from mamba3.config import Mamba3Config
from mamba3.data.tokenizer import load_tokenizer
from mamba3.models.lm import Mamba3LM
from mamba3.zoo import MODELS, list_models, load_model, public_name, resolve

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
    assert NAME in list_models("arith*")
    assert NAME in list_models(shipped=True)
    assert {MODELS[name].repo_id for name in list_models(shipped=True)} == {None}
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


@pytest.mark.parametrize("name", ["arithmetic-tinny", "aritmetic_tiny", "arithmetic-t"])
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


@pytest.mark.parametrize(
    ("name", "rows", "width"),
    [
        ("siso-187m", 3432, 1536),
        ("siso-443m", 4480, 2048),
        ("siso-893m", 6576, 3072),
        ("siso-1.5b", 8672, 4096),
        ("mimo-187m", 4200, 1280),
        ("mimo-444m", 5248, 1792),
        ("mimo-894m", 7344, 2816),
        ("mimo-1.5b", 9440, 3840),
    ],
)
def test_official_architectures(name, rows, width):
    model = MODELS[f"mamba3-{name}"]
    assert model.repo_id == f"state-spaces/mamba3-{name}"
    block = Mamba3LM(dataclasses.replace(model.config(), n_layer=1), device="meta").backbone.layers
    assert block[0].mixer.in_proj.weight.shape[0] == rows
    assert block[0].mlp.fc2.weight.shape[1] == width
    count, unit = float(name[5:-1]), {"m": 1e6, "b": 1e9}[name[-1]]
    assert abs(model.parameters() / unit - count) < (0.6 if unit == 1e6 else 0.01)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mamba-130m", 129_135_360),
        ("mamba-370m", 371_516_416),
        ("mamba-790m", 793_204_224),
        ("mamba-1.4b", 1_372_178_432),
        ("mamba-2.8b", 2_768_345_600),
        ("mamba-2.8b-slimpj", 2_768_345_600),
        ("mamba-130m-hf", 129_135_360),
        ("falcon-mamba-7b", 7_272_665_088),
    ],
)
def test_mamba_1_models(name, parameters):
    """Their released numbers of parameters."""
    model = MODELS[name]
    assert model.repo_id.endswith(name)
    assert model.parameters() == parameters
    assert set(model.config().kinds) == {"mamba"}


def test_the_parameters_of_a_known_file():
    """Counted in the file that the revision names; its bytes are two each, and the pickle's own."""
    model = MODELS["mamba3-siso-187m"]
    assert model.parameters() == 186_849_600
    assert 0 < model.size - 2 * model.parameters() < 1e5


def test_info_of_a_model_on_the_hub_downloads_nothing(monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr("socket.socket.connect", never)
    assert cli.main(["info", "mamba3-siso-187m"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["parameters"] == "186,849,600"
    assert facts["form"] == "SISO, 12 layers of 24 heads"
    assert facts["files"] == "config.json, pytorch_model.bin (373.7 MB)"
    assert facts["d_intermediate"] == "1536"
    assert "to train" in facts["memory"]


def test_info_of_a_mamba_1_model(capsys):
    assert cli.main(["info", "mamba-130m-hf"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["form"] == "Mamba-1, 24 layers"
    assert facts["files"] == "config.json, safetensors"
    # 24 layers of 1536 channels, each with 3 tokens and a state of 16, in float32.
    assert facts["state"] == f"{24 * 1536 * 19 * 4 / 1e6:.3f} MB per sequence, whatever its length"
    assert cli.main(["info", "mamba-130m-hf", "--optimizer"]) == 0
    assert "mixer.x_proj.weight[low]" in capsys.readouterr().out


def test_list_takes_a_pattern(capsys):
    assert cli.main(["list", "mimo*"]) == 0
    lines = capsys.readouterr().out.splitlines()[::2]
    assert [line.split()[0] for line in lines] == list_models("mimo*")
    assert lines[1].endswith("187,291,968 parameters, on the Hub: state-spaces/mamba3-mimo-187m")
    assert cli.main(["list", "gpt*"]) == 2
    assert "no model has a name like 'gpt*'" in capsys.readouterr().err


@pytest.mark.parametrize("name", list_models(shipped=True))
def test_what_ships(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = load_model(name)
    assert MODELS[name].parameters() == sum(p.numel() for p in model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert load_tokenizer(resolve(name)).vocab_size == model.config.vocab_size
    assert f"\n# {name}\n" in (resolve(name) / "README.md").read_text(encoding="utf-8")
    assert sum(f.stat().st_size for f in resolve(name).rglob("*") if f.is_file()) <= 4e6


def test_what_cards_call_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert public_name("arithmetic-tiny") == "arithmetic-tiny"
    assert public_name("mamba3-siso-187m") == "state-spaces/mamba3-siso-187m"
    assert public_name("hf-hub:me/x@v1") == public_name("me/x") == "me/x"
    for path in ("./runs/one", "local-dir:runs/one", str(tmp_path / "runs" / "one")):
        assert public_name(path) == "one"
    (tmp_path / "runs" / "one" / "best").mkdir()
    assert public_name("runs/one/best") == public_name("./gone/one/best") == "one"
