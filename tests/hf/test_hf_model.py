"""The transformers classes against `Mamba3LM`, of which they are to be another form."""

import copy
import importlib
import json
import sys

import pytest
import torch
import transformers
from compare import DEVICE, TOLERANCE, assert_close, assert_same, randomise
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.hf import Mamba3ForCausalLM, Mamba3HFConfig
from mamba3.hf.model import CACHE
from mamba3.hub import load_pretrained, save_pretrained

SISO = {"vocab_size": 21, "d_model": 16, "n_layer": 2, "d_state": 6, "headdim": 8}
SISO |= {"d_intermediate": 24, "mlp_multiple": 8}
MIMO = SISO | {"is_mimo": True, "mimo_rank": 2, "tie_embeddings": False, "is_outproj_norm": True}
HYBRID = SISO | {"layers": ["mamba", "mamba3"], "mamba": {"d_state": 5, "expand": 1}}


def language_model(**fields):
    return randomise(Mamba3LM(Mamba3Config(**fields), device=DEVICE)).eval()


@pytest.fixture(scope="module", params=[SISO, MIMO, HYBRID], ids=["siso", "mimo", "hybrid"])
def pair(request, tmp_path_factory):
    """A model, and the same read by transformers from the folder it was saved to."""
    model = language_model(**request.param)
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(model, folder)
    return model, AutoModelForCausalLM.from_pretrained(folder, device_map={"": DEVICE})


def prompts():
    """Three rows, the first two with pads on the left."""
    ids = torch.randint(3, 21, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, :1] = 0
    return ids.to(DEVICE), mask.to(DEVICE)


def grads(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def test_logits_loss_and_gradients_are_the_same_to_the_bit(pair):
    model, wrapped = pair
    ids, mask = prompts()
    mask[2, -2:] = 0
    labels = ids.clone()
    labels[:, 4] = -100
    for options in ({}, {"attention_mask": mask}):
        expected = model(ids, labels=labels, **options)
        out = wrapped(ids, labels=labels, **options)
        assert torch.equal(out.logits, expected.logits[..., :21])
        assert torch.equal(out.loss, expected.loss)
        assert CACHE not in out
        expected.loss.backward()
        out.loss.backward()
        assert_same(grads(wrapped), grads(model))
    loss, logits = wrapped(ids, labels=labels, return_dict=False, **options)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, out.logits)
    last = wrapped(ids, logits_to_keep=2, **options).logits
    assert torch.equal(last, model(ids, logits_to_keep=2, **options).logits[..., :21])


def test_gradient_checkpointing_changes_no_gradient(pair):
    _, wrapped = pair
    # The name that transformers has had since 5.23.
    name = "activation" if hasattr(wrapped, "activation_checkpointing_enable") else "gradient"
    ids, _ = prompts()
    wrapped(ids, labels=ids).loss.backward()
    expected = grads(wrapped)
    getattr(wrapped, f"{name}_checkpointing_enable")()
    assert wrapped.backbone.recompute == "full"
    assert getattr(wrapped, f"is_{name}_checkpointing")
    wrapped(ids, labels=ids).loss.backward()
    assert_same(grads(wrapped), expected)
    with pytest.raises(ValueError, match="every_n_layers is 2, but all blocks"):
        wrapped._set_gradient_checkpointing(every_n_layers=2)
    getattr(wrapped, f"{name}_checkpointing_disable")()
    assert wrapped.backbone.recompute is None


def test_greedy_generation_is_that_of_mamba3_with_pads_and_ends(pair):
    model, wrapped = pair
    ids, mask = prompts()
    eos = int(model.generate(ids, 4, attention_mask=mask)[0, -1])
    options = {"attention_mask": mask, "eos_token_id": eos, "pad_token_id": 1}
    expected = model.generate(ids, 12, **options)
    options |= {"do_sample": False, "max_new_tokens": 12}
    got = wrapped.generate(ids, **options)
    assert torch.equal(got, expected)
    assert (got[0] == 1).any()
    for way in ({"use_cache": False}, {"prefill_chunk_size": 2}, {"num_return_sequences": 1}):
        assert torch.equal(wrapped.generate(ids, **options, **way), expected)


def test_no_token_of_the_paddings_vocabulary_is_made(pair):
    _, wrapped = pair
    ids, _ = prompts()
    torch.manual_seed(0)
    out = wrapped.generate(ids, max_new_tokens=30, do_sample=True, temperature=100.0, top_k=0)
    assert out.max() < 21


def test_beams_are_the_same_with_and_without_a_cache(pair):
    _, wrapped = pair
    ids, mask = prompts()
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    with_cache = wrapped.generate(ids, **options)
    assert torch.equal(with_cache, wrapped.generate(ids, **options, use_cache=False))
    assert not torch.equal(with_cache, wrapped.generate(ids, **options | {"num_beams": 1}))


def test_a_cache_carries_on(pair):
    model, wrapped = pair
    ids, mask = prompts()
    options = {"do_sample": False, "max_new_tokens": 4, "return_dict_in_generate": True}
    first = wrapped.generate(ids, attention_mask=mask, **options)
    cache = first[CACHE]
    assert cache.get_seq_length() == 10
    longer = torch.cat([first.sequences, ids[:, 3:]], dim=1)
    mask = torch.cat([mask, torch.ones_like(longer[:, 7:])], dim=1)
    expected = model.generate(longer, 4, attention_mask=mask)
    fork = {CACHE: copy.copy(cache)}
    second = wrapped.generate(longer, attention_mask=mask, **options, **fork)
    assert torch.equal(second.sequences, expected)
    # The fork moved on, the cache did not; the pass over several tokens goes on from it.
    assert cache.get_seq_length() == 10
    out = wrapped(longer[:, 10:], attention_mask=mask, **{CACHE: cache})
    expected = model(longer, attention_mask=mask).logits[:, -1, :21]
    assert_close(out.logits[:, -1], expected, TOLERANCE[torch.float32])
    with pytest.raises(ValueError, match=r"has read 15 tokens a row, and input_ids holds 4"):
        wrapped.generate(
            ids[:, 3:], attention_mask=mask[:, :4] * 0 + 1, **options, **{CACHE: cache}
        )


def test_arguments_that_mean_nothing_here_are_refused(pair):
    _, wrapped = pair
    ids, _ = prompts()
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        wrapped.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(TypeError, match="cache is a DynamicCache, expected the Mamba3Cache"):
        wrapped(ids, **{CACHE: transformers.DynamicCache()})
    with pytest.raises(ValueError, match="output_hidden_states are not supported"):
        wrapped(ids, output_hidden_states=True)


def test_what_transformers_saves_mamba3_loads(pair, tmp_path):
    model, wrapped = pair
    wrapped.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    back = load_pretrained(tmp_path)
    assert back.config == model.config
    assert_same(back.to(DEVICE).state_dict(), model.state_dict())
    assert (back.lm_head.weight is back.backbone.embedding.weight) == model.config.tie_embeddings
    wrapped.config.eos_token_id = 2
    wrapped.save_pretrained(tmp_path)
    assert load_pretrained(tmp_path).config == model.config
    assert AutoConfig.from_pretrained(tmp_path).eos_token_id == 2
    wrapped.config.eos_token_id = None


@pytest.mark.parametrize("fields", [MIMO, HYBRID], ids=["mimo", "hybrid"])
def test_half_precision_keeps_the_parameters_that_steer_in_float32(fields, tmp_path):
    model = language_model(**fields)
    save_pretrained(model, tmp_path)
    for dtype in (torch.bfloat16, torch.float64):
        wrapped = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        expected = load_pretrained(tmp_path, dtype=dtype).state_dict()
        assert_same(wrapped.state_dict(), expected)
        found = {name: t.dtype for name, t in wrapped.state_dict().items()}
        assert found == {name: t.dtype for name, t in expected.items()}
    # Nothing in our config.json says the dtype; it is found from the weights.
    save_pretrained(load_pretrained(tmp_path, dtype=torch.bfloat16), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path):
    save_pretrained(language_model(**SISO), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    with pytest.raises(ValueError, match=r"missing: backbone\.layers\.2\.mixer\.D"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 1}))
    with pytest.raises(ValueError, match=r"unexpected: backbone\.layers\.1\.mixer\.D"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"d_state": 8}))
    with pytest.raises(
        ValueError, match=r"wrong shape: .*\.0\.mixer\.B_bias is \[4, 1, 6\], expec"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_head_of_its_own_in_a_tied_model_is_refused(tmp_path):
    model = language_model(**SISO)
    save_pretrained(model, tmp_path)
    tensors = {name: t.cpu().clone() for name, t in model.state_dict().items()}
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"different: lm_head.weight and backbone.embedding.weig"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_new_model_starts_as_mamba3s_does():
    torch.manual_seed(3)
    expected = Mamba3LM(Mamba3Config(**MIMO)).state_dict()
    torch.manual_seed(3)
    config = Mamba3HFConfig(**MIMO)
    assert_same(AutoModelForCausalLM.from_config(config).state_dict(), expected)


def test_a_model_in_memory_is_shared():
    model = language_model(**SISO)
    wrapped = Mamba3ForCausalLM.from_mamba3(model)
    assert not wrapped.training
    ids, _ = prompts()
    wrapped(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad is wrapped.get_input_embeddings().weight.grad
    assert model.lm_head.weight.grad.any()


def test_embeddings_are_resized_with_their_padding(tmp_path):
    wrapped = Mamba3ForCausalLM.from_mamba3(language_model(**SISO))
    ids, _ = prompts()
    expected = wrapped(ids).logits
    wrapped.resize_token_embeddings(33)
    assert wrapped.lm_head.weight is wrapped.backbone.embedding.weight
    logits = wrapped(ids).logits
    assert logits.shape[-1] == 33
    assert_close(logits[..., :21], expected, TOLERANCE[torch.float32])
    wrapped.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    assert model.config.vocab_size == 33
    assert torch.equal(model.to(DEVICE)(ids).logits[..., :33], logits)


def test_config_has_the_fields_of_mamba3_and_the_names_of_transformers(tmp_path):
    config = Mamba3HFConfig(vocab_size=5, hidden_size=16, num_hidden_layers=3, headdim=8)
    assert config.to_mamba3() == Mamba3Config(vocab_size=5, d_model=16, n_layer=3, headdim=8)
    config.num_hidden_layers = 4
    config.quantization_config = {"quant_method": "some"}
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path, d_state=10)
    assert (read.n_layer, read.d_state, read.state_size) == (4, 10, 10)
    assert read.quantization_config == config.quantization_config
    with pytest.raises(TypeError, match="no key 'd_modle'; the nearest is 'd_model'"):
        Mamba3HFConfig(vocab_size=5, d_modle=16, n_layer=3)
    with pytest.raises(TypeError, match="config lacks d_model, n_layer"):
        Mamba3HFConfig(vocab_size=5)
    with pytest.raises(ValueError, match="headdim must divide"):
        Mamba3HFConfig(vocab_size=5, d_model=16, n_layer=3, headdim=7)


def test_official_folders_are_read_by_the_classes_themselves(tmp_path):
    model = language_model(**SISO | {"pad_vocab_size_multiple": 8, "mlp_multiple": 128})
    ssm = {"layer": "Mamba3", "d_state": 6, "headdim": 8}
    official = {"d_model": 16, "n_layer": 2, "vocab_size": 21, "d_intermediate": 24, "ssm_cfg": ssm}
    (tmp_path / "config.json").write_text(json.dumps(official))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    wrapped = Mamba3ForCausalLM.from_pretrained(tmp_path, a_activation="heavy_tail")
    assert_same(wrapped.to(DEVICE).state_dict(), model.state_dict())
    assert wrapped.config.to_mamba3() == model.config


def test_models_that_transformers_has_a_class_for_are_left_to_it(tmp_path):
    transformers.MambaConfig(vocab_size=21, hidden_size=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type 'mamba': load it with AutoModelForCausalLM"):
        Mamba3HFConfig.from_pretrained(tmp_path)


def test_without_a_transformers_that_will_do_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "mamba3.hf")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["transformers"], "__version__", "5.7.0")
        with pytest.raises(ImportError, match=r"5\.8 or later, found 5\.7\.0: .*'mamba3\[hf\]'"):
            importlib.import_module("mamba3.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers.*pip install -U 'mamba3\[hf\]'"):
        importlib.import_module("mamba3.hf")
