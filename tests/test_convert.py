"""Checkpoints in other packages' forms: the same tensors, the same numbers, or an error."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from compare import assert_same, randomise

from mamba3 import Mamba3Config, Mamba3LM, load_model, load_tokenizer
from mamba3.cli import main
from mamba3.convert import convert
from mamba3.forms import form_of, from_fla, from_official, to_fla, to_official, to_transformers
from mamba3.zoo import resolve

GOLDENS = sorted(path for path in (Path(__file__).parent / "assets/goldens").iterdir())
NO_MLP = next(path for path in GOLDENS if path.name == "siso_outnorm_nomlp")

# What the constructor of fla 0.6.0's Mamba3ForCausalLM makes of FLA_CONFIG, written down from it.
FLA_CONFIG = {
    "A_floor": 0.0001,
    "architectures": ["Mamba3ForCausalLM"],
    "bos_token_id": 1,
    "chunk_size": 64,
    "dt_init_floor": 0.0001,
    "dt_max": 0.1,
    "dt_min": 0.001,
    "dtype": "float32",
    "eos_token_id": 2,
    "expand": 2,
    "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False,
    "fuse_norm": True,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "is_mimo": True,
    "is_outproj_norm": True,
    "mimo_rank": 2,
    "model_type": "mamba3",
    "n_groups": 2,
    "norm_eps": 1e-05,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": True,
    "rope_fraction": 0.5,
    "state_size": 12,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_bias": False,
    "use_cache": True,
    "use_l2warp": False,
    "vocab_size": 32,
}
FLA_LAYER = {
    "norm.weight": (16,),
    "mixer.dt_bias": (4,),
    "mixer.B_bias": (4, 2, 12),
    "mixer.C_bias": (4, 2, 12),
    "mixer.mimo_x": (4, 2, 8),
    "mixer.mimo_z": (4, 2, 8),
    "mixer.mimo_o": (4, 2, 8),
    "mixer.D": (4,),
    "mixer.in_proj.weight": (175, 16),
    "mixer.B_norm.weight": (12,),
    "mixer.C_norm.weight": (12,),
    "mixer.norm.weight": (32,),
    "mixer.out_proj.weight": (16, 32),
}
FLA_SHAPES = {
    "backbone.embeddings.weight": (32, 16),
    "backbone.norm_f.weight": (16,),
    "lm_head.weight": (32, 16),
    **{f"backbone.layers.{i}.{name}": shape for i in (0, 1) for name, shape in FLA_LAYER.items()},
}


@pytest.fixture
def fla_folder(tmp_path):
    """A folder as fla writes it, of random weights."""
    generator = torch.Generator().manual_seed(3)
    folder = tmp_path / "fla"
    folder.mkdir()
    tensors = {n: torch.randn(s, generator=generator) for n, s in FLA_SHAPES.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(FLA_CONFIG))
    return folder, tensors


def small(**options):
    config = {"vocab_size": 29, "d_model": 16, "n_layer": 2, "d_state": 12, "headdim": 8} | options
    return randomise(Mamba3LM(Mamba3Config(**config)), scale=0.3).eval()


def logits(folder, **options):
    model = load_model(folder, **options)
    ids = torch.arange(46).view(2, 23) % model.config.vocab_size
    with torch.no_grad():
        return model(ids).logits


# Official and ours


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:this config does not say")
def test_official_to_ours_and_back_is_the_identity(golden, tmp_path):
    ours, back = tmp_path / "ours", tmp_path / "back"
    done = convert(golden, ours, to="mamba3")
    assert (done.source_form, done.form, done.difference) == ("mamba_ssm", "mamba3", 0)
    assert convert(ours, back, to="mamba_ssm").difference == 0
    assert {f.name for f in back.iterdir()} == {"config.json", "pytorch_model.bin", "README.md"}

    before = torch.load(golden / "pytorch_model.bin", weights_only=True)
    after = torch.load(back / "pytorch_model.bin", weights_only=True)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].to(tensor.dtype), tensor)
        assert torch.equal(tensor.to(after[name].dtype), after[name])
    assert after["lm_head.weight"].data_ptr() == after["backbone.embedding.weight"].data_ptr()

    told = json.loads((golden / "config.json").read_text())
    written = json.loads((back / "config.json").read_text())
    told["ssm_cfg"].pop("chunk_size", None)
    for name, value in told.pop("ssm_cfg").items():
        assert written["ssm_cfg"][name] == value, name
    width = from_official(written).mlp_width
    assert width == load_model(golden).config.mlp_width
    for name, value in told.items():
        if name not in ("d_intermediate", "fused_add_norm"):
            assert written[name] == value, name


def test_the_official_form_says_the_activation(tmp_path):
    """Without a warning on loading it again, and with the numbers of softplus."""
    model = small(a_activation="softplus", d_intermediate=40)
    model.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "official", to="mamba_ssm")
    assert torch.equal(logits(tmp_path / "official"), logits(tmp_path / "ours"))
    # The top level goes to a dataclass of the official code, which refuses what it does not know.
    assert json.loads((tmp_path / "official/config.json").read_text()).keys() == {
        "d_model", "d_intermediate", "n_layer", "vocab_size", "ssm_cfg", "attn_layer_idx",
        "attn_cfg", "rms_norm", "residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple",
        "tie_embeddings",
    }  # fmt: skip


def test_dtype(tmp_path):
    small().save_pretrained(tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "half", to="mamba_ssm", dtype=torch.bfloat16)
    model = load_model(tmp_path / "half")
    assert done.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model.backbone.layers[0].mixer.dt_bias.dtype == torch.float32
    assert 1e-4 < done.difference < 0.05
    assert_same(
        dict(model.named_parameters()),
        dict(load_model(tmp_path / "ours", dtype=torch.bfloat16).named_parameters()),
    )


# fla


def test_from_fla(fla_folder, tmp_path):
    folder, tensors = fla_folder
    done = convert(folder, tmp_path / "ours", to="mamba3")
    assert (done.source_form, done.difference) == ("fla", 0)
    model = load_model(tmp_path / "ours")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    assert_same(model.state_dict(), tensors)
    config = model.config
    assert (config.vocab_size, config.padded_vocab_size, config.d_model) == (32, 32, 16)
    assert (config.n_layer, config.d_state, config.headdim, config.expand) == (2, 12, 8, 2)
    assert (config.is_mimo, config.mimo_rank, config.ngroups) == (True, 2, 2)
    assert (config.a_activation, config.mlp_width, config.is_outproj_norm) == ("softplus", 0, True)


def test_fla_and_back(fla_folder, tmp_path):
    folder, tensors = fla_folder
    convert(folder, tmp_path / "official", to="mamba_ssm")
    convert(tmp_path / "official", tmp_path / "back", to="fla")
    assert_same(safetensors.torch.load_file(tmp_path / "back/model.safetensors"), tensors)
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written.keys() <= FLA_CONFIG.keys()
    unset = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "chunk_size": 32}
    assert written == {name: FLA_CONFIG[name] for name in written} | unset


def test_a_tied_and_padded_model_to_fla(tmp_path):
    model = small(a_activation="softplus")
    model.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "fla", to="fla")
    tensors = safetensors.torch.load_file(tmp_path / "fla/model.safetensors")
    head = tensors.pop("lm_head.weight")
    assert torch.equal(head, tensors["backbone.embeddings.weight"])
    written = json.loads((tmp_path / "fla/config.json").read_text())
    assert (written["vocab_size"], written["tie_word_embeddings"]) == (32, True)
    convert(tmp_path / "fla", tmp_path / "back", to="mamba3")
    assert torch.equal(
        load_model(tmp_path / "back")(torch.arange(9)[None]).logits,
        model(torch.arange(9)[None]).logits,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_intermediate": 8, "a_activation": "softplus"}, "no MLP, and this model has one of"),
        ({}, "fla would give other numbers"),
        ({"rope_fraction": 0.25, "a_activation": "softplus"}, "rope_fraction of 0.5 or 1.0"),
        ({"layers": ["mamba", "mamba3"]}, "layers alone, and this one: hybrid of 1 Mamba-1 and 1"),
    ],
)
def test_what_fla_cannot_express(options, message):
    with pytest.raises(ValueError, match=message):
        to_fla(small(**options).config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_eps": 1e-6}, r"norm_eps 1e-06 \(it would be 1e-05\)"),
        ({"d_intermediate": 24, "mlp_multiple": 8}, r"an MLP of width 24 \(it would be 128\)"),
        ({"rope_fraction": 0.25}, "rope_fraction of 0.5 or 1.0"),
        ({"layers": ["mamba", "mamba3"]}, "one kind of layers in a model, and this one: hybrid"),
    ],
)
def test_what_the_official_form_cannot_express(options, message):
    with pytest.raises(ValueError, match=message):
        to_official(small(**options).config)


FALCON = {"layers": "mamba", "mamba": {"maps_norm_eps": 1e-6}}


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (to_official, FALCON, "no norms over the step size, B and C"),
        (to_official, {"layers": "mamba", "norm_eps": 1e-6}, "norm_eps 1e-06"),
        (to_transformers, FALCON | {"d_intermediate": 8}, "no MLP, and this model has one of"),
        (to_transformers, {"d_state": 12}, "layers alone, and this model: SISO. With mamba3.hf"),
        (to_transformers, {"layers": ["mamba", "mamba3"]}, "this model: hybrid of 1 Mamba-1"),
    ],
)
def test_what_the_forms_of_mamba_1_cannot_express(write, options, message):
    with pytest.raises(ValueError, match=message):
        write(Mamba3Config(vocab_size=29, d_model=32, n_layer=2, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"use_bias": True}, "use_bias is true"), ({"head_dim": None}, "lacks head_dim")],
)
def test_what_cannot_be_read_of_fla(change, message):
    data = {k: v for k, v in (FLA_CONFIG | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        from_fla(data)


def test_an_fla_folder_that_does_not_fit(fla_folder, tmp_path):
    folder, tensors = fla_folder
    tensors["backbone.layers.1.mixer.D"] = torch.ones(5)
    del tensors["backbone.norm_f.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="norm_f") as error:
        convert(folder, tmp_path / "ours", to="mamba3")
    assert "layers.1.mixer.D" in str(error.value)
    assert not (tmp_path / "ours").exists()


# The destination


def test_overwrite_replaces_the_checkpoint_and_nothing_else(tmp_path):
    one, out = tmp_path / "one", tmp_path / "out"
    small().save_pretrained(one)
    small(n_layer=3).save_pretrained(out, max_shard_size=2000)
    (out / "notes.txt").write_text("mine")
    assert len(list(out.glob("*.safetensors"))) > 1
    before = sorted(file.name for file in out.iterdir())
    with pytest.raises(FileExistsError, match=r"already holds config\.json"):
        convert(one, out, to="mamba_ssm")
    assert sorted(file.name for file in out.iterdir()) == before
    convert(one, out, to="mamba_ssm", overwrite=True)
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "pytorch_model.bin", "notes.txt"}
    assert torch.equal(logits(out), logits(one))


def test_a_checkpoint_that_does_not_load_as_the_model_is_discarded(tmp_path, monkeypatch):
    small().save_pretrained(tmp_path / "ours")

    save = torch.save

    def spoil(tensors, file):
        name = "backbone.norm_f.weight"
        save(tensors | {name: tensors[name] * (1 + 1e-6)}, file)

    monkeypatch.setattr("torch.save", spoil)
    with pytest.raises(RuntimeError, match=r"backbone\.norm_f\.weight changed"):
        convert(tmp_path / "ours", tmp_path / "out", to="mamba_ssm")
    assert not (tmp_path / "out").exists()


def test_tokenizer_and_card_come_along(tmp_path):
    convert("arithmetic-tiny", tmp_path / "out", to="mamba_ssm")
    assert load_tokenizer(tmp_path / "out").encode("1") == load_tokenizer("arithmetic-tiny").encode(
        "1"
    )
    card = (resolve("arithmetic-tiny") / "README.md").read_text()
    assert (tmp_path / "out/README.md").read_text() == card


def test_a_card_where_there_was_none(fla_folder, tmp_path):
    folder, _ = fla_folder
    done = convert(folder, tmp_path / "mine", to="mamba3", dtype=torch.bfloat16)
    assert sorted(done.files) == sorted(file.name for file in (tmp_path / "mine").iterdir())
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "Converted by mamba3 from fla, a checkpoint in the form fla; its tensors were" in card
    assert "were made bfloat16." in card
    assert "# mine\n" in card
    (tmp_path / "mine" / "README.md").write_text("my own")
    convert(folder, tmp_path / "mine", to="mamba3", overwrite=True)
    assert (tmp_path / "mine" / "README.md").read_text() == "my own"


def test_bad_requests(tmp_path):
    small().save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="the same folder"):
        convert(tmp_path / "ours", tmp_path / "ours", to="mamba_ssm", overwrite=True)
    with pytest.raises(ValueError, match="one of mamba_ssm, mamba3, fla, transformers, got 'onnx'"):
        convert(tmp_path / "ours", tmp_path / "out", to="onnx")
    with pytest.raises(ValueError, match="dtype must be one of"):
        convert(tmp_path / "ours", tmp_path / "out", to="mamba3", dtype=torch.int8)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        convert(tmp_path / "ours", tmp_path / "file", to="mamba3")
    with pytest.raises(TypeError, match="must be a mapping"):
        form_of([])


# The command


@pytest.mark.filterwarnings("ignore:this config does not say")
def test_the_command(tmp_path, capsys):
    out = str(tmp_path / "fla")
    command = ["convert", str(NO_MLP), out, "--to", "fla"]
    assert main(command) == 2
    assert "fla would give other numbers" in capsys.readouterr().err
    assert main([*command, "--a-activation", "softplus", "--dtype", "bfloat16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["source_form"], told["form"], told["dtype"]) == ("mamba_ssm", "fla", "bfloat16")
    assert told["destination"] == out
    assert set(told["files"]) == {file.name for file in Path(out).iterdir()}
    assert main([*command, "--a-activation", "softplus"]) == 2
    assert "already holds config.json" in capsys.readouterr().err
    assert main([*command, "--a-activation", "softplus", "--overwrite"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{NO_MLP} (mamba_ssm) to {out} (fla)"
    assert "float32; wrote config.json, model.safetensors" in printed[1]
    assert printed[2].endswith("differ from the source's by 0 (RMS)")
