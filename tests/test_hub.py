"""Loading and saving models: every tensor as it was, or an error that names what is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from mamba3.checkpoint_files import read_weights
from mamba3.config import Mamba3Config
from mamba3.data.tokenizer import CharTokenizer, load_tokenizer
from mamba3.hub import EMBEDDING, HEAD
from mamba3.models.lm import Mamba3LM

GOLDENS = sorted((Path(__file__).parent / "assets" / "goldens").iterdir())
MIXER = "backbone.layers.1.mixer."


def tiny(seed=0, dtype=None, **changes):
    """A small MIMO model with every parameter random."""
    sizes = {"vocab_size": 30, "d_model": 16, "n_layer": 2, "d_intermediate": 20, "d_state": 8}
    sizes |= {"headdim": 8, "mlp_multiple": 8, "is_mimo": True, "mimo_rank": 2}
    model = Mamba3LM(Mamba3Config(**(sizes | changes)), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def assert_same(model, other):
    assert model.config == other.config
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def load(path, **options):
    return Mamba3LM.from_pretrained(path, **options)


def rewrite(folder, change):
    """Change the tensors of model.safetensors in place of the file."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    tiny().save_pretrained(folder)
    return folder


# Loading official folders


@pytest.mark.parametrize("folder", GOLDENS, ids=lambda path: path.name)
def test_goldens_load_exactly(folder):
    model = load(folder, a_activation="heavy_tail")
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    loaded = model.state_dict()
    assert loaded.keys() == stored.keys()
    wide = model.float32_parameter_names()
    assert MIXER + "dt_bias" in wide
    for name, tensor in stored.items():
        expected = tensor.float() if name in wide else tensor
        assert loaded[name].dtype == expected.dtype, name
        assert torch.equal(loaded[name], expected), name
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert not any(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("folder", GOLDENS, ids=lambda path: path.name)
def test_goldens_round_trip_as_safetensors(folder, tmp_path):
    model = load(folder, a_activation="softplus")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.a_activation == "softplus"
    assert_same(again, model)


def test_official_config_without_a_activation_warns():
    with pytest.warns(UserWarning, match="a_activation='heavy_tail'"):
        assert load(GOLDENS[0]).config.a_activation == "heavy_tail"


def test_legacy_pickle_format(tmp_path, saved):
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(tensors, saved / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(load(saved), tiny())


# dtype, device and memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("folder", [GOLDENS[0], GOLDENS[1]], ids=lambda path: path.name)
def test_dtype(folder, dtype):
    model = load(folder, a_activation="heavy_tail", dtype=dtype)
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    at_least_float32 = torch.float64 if dtype == torch.float64 else torch.float32
    wide = model.float32_parameter_names()
    for name, tensor in model.state_dict().items():
        expected = stored[name].to(at_least_float32 if name in wide else dtype)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.complex64])
def test_bad_dtype(saved, dtype):
    with pytest.raises(ValueError, match=r"dtype must be one of torch.float32.*got"):
        load(saved, dtype=dtype)


def test_device(saved):
    assert {p.device.type for p in load(saved, device="meta").parameters()} == {"meta"}
    assert {p.device.type for p in load(saved).parameters()} == {"cpu"}


@pytest.mark.parametrize("official", [False, True])
def test_weights_are_held_once_and_apart_from_the_file(saved, official):
    file = saved / "model.safetensors"
    if official:
        tensors = safetensors.torch.load_file(file)
        file.unlink()
        file = saved / "pytorch_model.bin"
        torch.save(tensors, file)
    model = load(saved)
    for name, parameter in model.named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
    with open(file, "r+b") as opened:  # in place: a mapped file would show through
        opened.write(b"\xff" * file.stat().st_size)
    assert_same(model, tiny())


def test_nothing_is_built_in_memory_first(saved, monkeypatch):
    built = []

    class Recorded(Mamba3LM):
        def __init__(self, config, **options):
            super().__init__(config, **options)
            built.append({parameter.device.type for parameter in self.parameters()})

    monkeypatch.setattr("mamba3.hub.Mamba3LM", Recorded)
    assert_same(load(saved), tiny())
    assert built == [{"meta"}]


MEMORY = """
import sys, torch
from pathlib import Path
from mamba3 import Mamba3LM

def status(key):
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key)]
    return 1024 * int(line.split()[1])

def peak():  # not ru_maxrss, which counts the process that this one was forked from
    return status("VmHWM")

tiny, large = sys.argv[1:]
Mamba3LM.from_pretrained(tiny).save_pretrained(tiny)  # what is imported once
before = status("VmRSS")
model = Mamba3LM.from_pretrained(large)
loaded = peak()
model.save_pretrained(large, max_shard_size="20MB")
size = sum(parameter.nbytes for parameter in model.parameters())
print((loaded - before) / size, (peak() - before) / size, size)
"""


@pytest.mark.parametrize("form", ["shards", "pickle"])
def test_memory_of_loading_and_saving(tmp_path, form):
    """At most 1.1 times the checkpoint, which held twice would be 2."""
    tiny().save_pretrained(tmp_path / "tiny")
    sizes = {"vocab_size": 8192, "d_model": 1024, "n_layer": 7, "d_intermediate": 2048}
    model = Mamba3LM(Mamba3Config(**sizes), device="meta", dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    folder = tmp_path / "large"
    model.save_pretrained(folder, max_shard_size="50MB")
    if form == "pickle":
        for file in folder.glob("model*"):
            file.unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "tiny"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loading, saving, size = map(float, done.stdout.split())
    assert size > 1.8e8
    assert 0.9 < loading <= 1.1
    assert saving <= 1.1


def test_a_checkpoint_that_is_replaced_while_it_is_read(saved, monkeypatch):
    """Never a mixture of two: it is read in several passes."""
    taken = []

    def read_and_replace(folder):
        found = read_weights(folder)
        taken.append(found[0])
        tiny(1).save_pretrained(folder)
        return found

    monkeypatch.setattr("mamba3.hub.read_weights", read_and_replace)
    with pytest.raises(OSError, match=r"model.safetensors was replaced while it was read"):
        load(saved)
    assert taken


# Round trips


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("max_shard_size", ["5GB", 2000])
def test_round_trip(tmp_path, tied, dtype, max_shard_size):
    model = tiny(tie_embeddings=tied, dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    again = load(tmp_path)
    assert_same(again, model)
    assert (again.lm_head.weight is again.backbone.embedding.weight) == tied


def test_the_loaded_model_trains_with_its_tie(saved):
    model = load(saved).train()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    model(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert HEAD not in gradients
    reference = tiny()
    reference(ids, labels=ids).loss.backward()
    for name, parameter in reference.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def test_files_of_one(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path, metadata={"step": "7"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == model.config.to_dict()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}
        assert set(file.keys()) == model.state_dict().keys() - {HEAD}


def test_files_of_shards(tmp_path):
    model = tiny(tie_embeddings=False)
    model.save_pretrained(tmp_path, max_shard_size=2000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    expected = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, 99)]
    assert [shard.name for shard in shards] == expected[: len(shards)]
    for shard in shards:
        tensors = safetensors.torch.load_file(shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 2000
        assert {index["weight_map"][name] for name in tensors} == {shard.name}


def test_float32_parameters_are_saved_wide(tmp_path):
    model = tiny()
    for parameter in model.parameters():  # past Mamba3LM.to, which leaves some float32
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    wide = model.float32_parameter_names()
    for name, tensor in model.state_dict().items():
        if name != HEAD:
            expected = tensor.float() if name in wide else tensor
            assert stored[name].dtype == expected.dtype
            assert torch.equal(stored[name], expected)


@pytest.mark.parametrize("stride", [1, 2])
def test_views_into_one_buffer_are_saved_as_plain_tensors(tmp_path, stride):
    model = tiny()
    flat = torch.zeros(stride * sum(parameter.numel() for parameter in model.parameters()))
    parts = flat[::stride].split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        shape = parameter.shape
        part.copy_(parameter.data.flatten())
        parameter.data = part.view(shape)
    model.save_pretrained(tmp_path, max_shard_size=2000)
    assert_same(load(tmp_path), tiny())
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3


def test_compiled_parts_are_saved_under_plain_names(tmp_path):
    model = tiny()
    model.backbone.layers[0] = torch.compile(model.backbone.layers[0], backend="eager")
    assert any("_orig_mod" in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    assert_same(load(tmp_path), tiny())


def test_tokenizer_is_saved_along(tmp_path):
    tiny().save_pretrained(tmp_path, tokenizer=CharTokenizer("0123+="))
    assert load_tokenizer(tmp_path).encode("12+3") == CharTokenizer("0123+=").encode("12+3")
    ends = json.loads((tmp_path / "generation_config.json").read_text())
    assert ends == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda m: m.register_parameter("extra", m.lm_head.weight),
            ValueError,
            "unexpected: extra",
        ),
        (lambda m: m.to("meta"), TypeError, "is a meta Tensor"),
        (lambda m: m.to(torch.float8_e4m3fn), TypeError, "Tensor of torch.float8_e4m3fn, expected"),
        (
            lambda m: setattr(
                m.lm_head, "weight", torch.nn.Parameter(torch.zeros_like(m.lm_head.weight))
            ),
            ValueError,
            "different: lm_head.weight and backbone.embedding.weight",
        ),
    ],
    ids=["extra", "meta", "float8", "broken tie"],
)
def test_models_that_could_not_be_loaded_again_are_not_saved(tmp_path, change, error, message):
    model = tiny()
    change(model)
    with pytest.raises(error, match=message):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_tensor_subclasses_are_not_saved(tmp_path):
    class Quantised(torch.Tensor):
        pass

    model = tiny()
    weight = model.backbone.norm_f.weight.data.as_subclass(Quantised)
    model.backbone.norm_f.weight = torch.nn.Parameter(weight)
    with pytest.raises(TypeError, match=r"norm_f.weight is a Quantised .* gather or convert"):
        model.save_pretrained(tmp_path)


def test_bad_metadata(tmp_path):
    with pytest.raises(TypeError, match="strings to strings, got 7"):
        tiny().save_pretrained(tmp_path, metadata={"step": 7})


# Names and shapes


def test_every_misfit_is_named(saved):
    def change(tensors):
        del tensors[MIXER + "dt_bias"], tensors["backbone.norm_f.weight"]
        tensors[MIXER + "A_log"] = torch.zeros(3)
        tensors[MIXER + "D"] = torch.zeros(5)
        tensors[EMBEDDING] = torch.zeros(30, 16)

    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"model.safetensors does not fit config.json") as caught:
        load(saved)
    assert str(caught.value).split("\n  ")[1:] == [
        f"missing: {MIXER}dt_bias",
        "missing: backbone.norm_f.weight",
        f"unexpected: {MIXER}A_log",
        f"wrong shape: {EMBEDDING} is [30, 16], expected [32, 16]",
        f"wrong shape: {MIXER}D is [5], expected [4]",
    ]


def test_untied_head_may_not_be_missing(tmp_path):
    tiny(tie_embeddings=False).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(ValueError, match=r"missing: lm_head.weight$"):
        load(tmp_path)


@pytest.mark.parametrize("names", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_tied_head_under_either_name(saved, names):
    def change(tensors):
        weight = tensors.pop(EMBEDDING)
        tensors.update({name: weight.clone() for name in names})

    rewrite(saved, change)
    model = load(saved)
    assert_same(model, tiny())
    assert model.lm_head.weight is model.backbone.embedding.weight


@pytest.mark.parametrize(
    "other", [torch.ones(32, 16), torch.ones(30, 16), torch.ones(32, 16, dtype=torch.bfloat16)]
)
def test_tied_head_that_differs(saved, other):
    rewrite(saved, lambda tensors: tensors.update({HEAD: other}))
    with pytest.raises(
        ValueError, match=r"different: lm_head.weight .* needs tie_embeddings false"
    ):
        load(saved)


@pytest.mark.parametrize(
    "prefixed",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    ],
)
def test_prefixes_of_wrappers_are_stripped(saved, prefixed):
    def change(tensors):
        for name in list(tensors):
            tensors[prefixed(name)] = tensors.pop(name)

    rewrite(saved, change)
    assert_same(load(saved), tiny())


# Which folder, which model


def test_config_errors_name_the_file(saved):
    file = saved / "config.json"
    config = json.loads(file.read_text())
    for text, message in (
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("\xff", "is not valid JSON"),
        ("[]", "must be a mapping"),
        (json.dumps(config | {"d_conv": 4}), "no key 'd_conv'; the nearest is"),
        (json.dumps(config | {"d_model": -1}), "d_model must be more than 0"),
        (json.dumps({"model_type": "llama"}), "model_type 'llama', expected 'mamba3'"),
    ):
        file.write_text(text, encoding="latin-1")
        with pytest.raises((TypeError, ValueError), match=message) as caught:
            load(saved)
        assert str(file) in str(caught.value)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(file))} is missing"):
        load(saved)


def test_symbolic_links_as_in_a_download_cache(saved, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in saved.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert_same(load(snapshot), tiny())


@pytest.mark.parametrize("name", ["no/such/folder", "./no/folder", "nothing"])
def test_unknown_names_are_not_downloaded(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"'{name}' is neither a local folder nor"):
        load(name)


def test_save_into_a_file(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file, expected a folder"):
        tiny().save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"
