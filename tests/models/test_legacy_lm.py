"""Models of Mamba-1 layers, and hybrids: against transformers, and by themselves.

transformers' Mamba and Falcon-Mamba are random and small; they are saved by it and loaded by us,
and the other way round.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, assert_same, gradients, randomise

from mamba3 import Mamba3Config, Mamba3LM, decode_graph, load_model
from mamba3.convert import convert
from mamba3.optim import HybridOptimizer, ParamGroupEngine

VOCAB = 29
SIZES = {"vocab_size": VOCAB, "d_model": 16, "n_layer": 3}
MAMBA3 = {"d_state": 6, "headdim": 8}
KINDS = {
    "mamba": {"layers": "mamba", "mamba": {"d_state": 5, "bias": True}},
    "falcon": {
        "layers": "mamba",
        "mamba": {"maps_norm_eps": 1e-6, "d_conv": 3, "conv_bias": False, "dt_rank": 3},
        "tie_embeddings": False,
    },
    "hybrid": {
        **MAMBA3,
        "layers": ["mamba", "mamba3", "mamba"],
        "mamba": {"d_state": 4, "expand": 1},
        "d_intermediate": 20,
        "is_mimo": True,
        "mimo_rank": 2,
    },
}


def make(kind, dtype=torch.float64, **changes):
    config = Mamba3Config(**(SIZES | KINDS[kind] | changes))
    return randomise(Mamba3LM(config, dtype=dtype), scale=0.3).eval()


def tokens(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def prompts():
    """Three rows, and a mask that leaves out pads on the left of two."""
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[0, :4] = mask[2, :1] = 0
    return tokens(3, 11), mask


# transformers


@pytest.fixture(scope="module", params=["mamba", "falcon_mamba"])
def pair(request, tmp_path_factory):
    """A model of transformers, and ours from the folder that it was saved to."""
    import transformers

    options = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "state_size": 5,
        "conv_kernel": 3,
        "layer_norm_epsilon": 1e-4,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    }
    if request.param == "mamba":
        config = transformers.MambaConfig(**options, time_step_rank=3, use_conv_bias=False)
        theirs = transformers.MambaForCausalLM(config)
    else:
        # As released: expand says one thing, intermediate_size another.
        options |= {"expand": 16, "intermediate_size": 48, "tie_word_embeddings": False}
        config = transformers.FalconMambaConfig(**options, mixer_rms_eps=1e-3)
        theirs = transformers.FalconMambaForCausalLM(config)
    randomise(theirs).eval()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, load_model(folder)


def named(gradients):
    """Under our names."""
    return {name.replace("embeddings", "embedding"): g for name, g in gradients.items()}


@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients_are_those_of_transformers(pair, padded):
    theirs, ours = pair
    ids, mask = prompts()
    mask = mask if padded else torch.ones_like(mask)
    # It scores a row's first token, too, from the pad before it.
    labels = ids.masked_fill(F.pad(mask, (1, 0))[:, :-1] == 0, -100)
    expected = theirs(ids, attention_mask=mask, labels=labels)
    got = ours(ids, attention_mask=mask, labels=labels)
    real = mask.bool()
    assert_close(got.logits[real], expected.logits[real], 1e-5)
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    wanted = named(gradients((expected.loss,), dict(theirs.named_parameters())))
    assert_close(gradients((got.loss,), dict(ours.named_parameters())), wanted, 1e-4)
    assert min(g.norm() for g in wanted.values()) > 0


@pytest.mark.parametrize("padded", [False, True])
def test_greedy_generation_is_that_of_transformers(pair, padded):
    theirs, ours = pair
    ids, mask = prompts()
    mask = mask if padded else torch.ones_like(mask)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = theirs.generate(ids, **options)
    assert torch.equal(theirs.generate(ids, **options, use_cache=False), expected)
    assert torch.equal(ours.generate(ids, 12, attention_mask=mask), expected)
    for _ in range(12):  # without a state
        logits = ours(ids, attention_mask=mask, logits_to_keep=1).logits[:, 0]
        ids, mask = (
            torch.cat((ids, logits.argmax(-1, keepdim=True)), 1),
            F.pad(mask, (0, 1), value=1),
        )
    assert torch.equal(ids, expected)
    assert len({tuple(row) for row in expected[:, 11:].tolist()}) == 3
    assert len(expected[:, 11:].unique()) > 10


@pytest.mark.parametrize("kind", ["mamba", "falcon"])
def test_transformers_loads_what_is_saved(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = make(kind, torch.float32)
    ours.save_pretrained(tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "theirs", to="transformers")
    assert (done.form, done.difference) == ("transformers", 0)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert (
        type(theirs).__name__ == {"mamba": "Mamba", "falcon": "FalconMamba"}[kind] + "ForCausalLM"
    )
    assert not any(info.values())
    ids = tokens(2, 13)
    assert_close(ours(ids).logits, theirs(ids).logits, 1e-5)
    convert(tmp_path / "theirs", tmp_path / "back", to="mamba3")
    back = load_model(tmp_path / "back")
    assert_same(back.state_dict(), ours.state_dict())
    # The padding of the vocabulary has become part of it.
    assert (back.config.vocab_size, ours.config.padded_vocab_size) == (32, 32)
    assert back.config.mamba == ours.config.mamba


# The official form

# What mamba_ssm's MambaLMHeadModel has at d_model 32, n_layer 2, vocab_size 29: names and shapes.
OFFICIAL_LAYER = {
    "norm.weight": (32,),
    "mixer.A_log": (64, 16),
    "mixer.D": (64,),
    "mixer.in_proj.weight": (128, 32),
    "mixer.conv1d.weight": (64, 1, 4),
    "mixer.conv1d.bias": (64,),
    "mixer.x_proj.weight": (34, 64),
    "mixer.dt_proj.weight": (64, 2),
    "mixer.dt_proj.bias": (64,),
    "mixer.out_proj.weight": (32, 64),
}
OFFICIAL_SHAPES = {
    "backbone.embedding.weight": (32, 32),
    **{f"backbone.layers.{i}.{name}": s for i in (0, 1) for name, s in OFFICIAL_LAYER.items()},
    "backbone.norm_f.weight": (32,),
}
# The keys of the released ones.
OFFICIAL_CONFIG = {
    "d_model": 32,
    "n_layer": 2,
    "vocab_size": 29,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}


@pytest.fixture
def official(tmp_path):
    """A folder as the official code writes it, and its tensors."""
    generator = torch.Generator().manual_seed(3)
    tensors = {n: 0.3 * torch.randn(s, generator=generator) for n, s in OFFICIAL_SHAPES.items()}
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    folder = tmp_path / "official"
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(OFFICIAL_CONFIG))
    return folder, tensors


def test_the_official_form_comes_back_as_it_was(official, tmp_path):
    folder, tensors = official
    model = load_model(folder)
    assert_same(model.state_dict(), tensors)
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert convert(folder, tmp_path / "ours", to="mamba3").source_form == "mamba_ssm"
    assert load_model(tmp_path / "ours").config == model.config
    convert(tmp_path / "ours", tmp_path / "back", to="mamba_ssm")
    back = torch.load(tmp_path / "back/pytorch_model.bin", weights_only=True)
    assert_same(back, tensors)
    assert back["lm_head.weight"].data_ptr() == back["backbone.embedding.weight"].data_ptr()
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written["ssm_cfg"] == {
        "layer": "Mamba1", "d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": "auto",
        "bias": False, "conv_bias": True, "dt_min": 0.001, "dt_max": 0.1, "dt_init_floor": 0.0001,
        "dt_scale": 1.0,
    }  # fmt: skip
    for name, value in OFFICIAL_CONFIG.items():
        if name not in ("ssm_cfg", "fused_add_norm"):
            assert written[name] == value, name
    with pytest.raises(ValueError, match=r"a_activation: about Mamba-3 layers"):
        Mamba3LM.from_pretrained(folder, a_activation="softplus")


def test_the_official_form_becomes_that_of_transformers(official, tmp_path):
    """The way that the -hf checkpoints of the Hub were made."""
    from transformers import MambaForCausalLM

    folder, _ = official
    convert(folder, tmp_path / "theirs", to="transformers", dtype=torch.bfloat16)
    theirs = MambaForCausalLM.from_pretrained(tmp_path / "theirs")
    assert theirs.dtype == torch.bfloat16
    ids, ours = tokens(2, 9), load_model(folder, dtype=torch.bfloat16)
    assert_close(theirs(ids).logits, ours(ids).logits, 2e-2)


# By themselves


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_steps_are_one_pass(kind):
    model, ids = make(kind), tokens(3, 10)
    full = model(ids, return_state=True)
    parameters = dict(model.named_parameters())
    first = model(ids[:, :6], return_state=True)
    second = model(ids[:, 6:], state=first.state, return_state=True)
    halves = torch.cat((first.logits, second.logits), 1)
    assert_close(halves, full.logits, 1e-10)
    assert_close(
        gradients((halves,), parameters), gradients((full.logits,), parameters), 1e-10, "gradients"
    )
    order = torch.tensor([2, 0, 0])
    state, before = first.state.reorder(order), [t.clone() for t in flat(first.state)]
    with torch.no_grad():
        for t in range(6, 10):
            logits, state = model.step(ids[order, t], state, inplace=t > 6)
            assert_close(logits, full.logits[order, t], 1e-10)
    assert_close(flat(state), flat(full.state.reorder(order)), 1e-10)
    assert all(torch.equal(a, b) for a, b in zip(flat(first.state), before, strict=True))
    with pytest.raises(ValueError, match="holds 3 sequences, the input 2"):
        model(ids[:2], state=state)
    with pytest.raises(ValueError, match="holds 3 sequences, the input 1"):
        model.step(ids[:1, 0], state)


def flat(state):
    return [t for layer in state.layers for t in layer]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_padded_rows_are_as_if_alone(kind):
    model, lengths = make(kind), [1, 7, 3]
    rows = [tokens(1, n, seed=n) for n in lengths]
    alone = [model(row, return_state=True) for row in rows]
    wanted = torch.cat([out.logits for out in alone], 1)
    states = [torch.cat(each) for each in zip(*(flat(out.state) for out in alone), strict=True)]
    parameters = dict(model.named_parameters())
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = model(torch.cat(rows, 1), cu_seqlens=bounds, return_state=True)
    assert_close((packed.logits, *flat(packed.state)), (wanted, *states), 1e-10)
    grads = gradients((wanted,), parameters)
    assert_close(gradients((packed.logits,), parameters), grads, 1e-10, "gradients")
    for side in ("left", "right"):
        pads = [(7 - n, 0) if side == "left" else (0, 7 - n) for n in lengths]
        ids = torch.cat([F.pad(row, pad, value=5) for row, pad in zip(rows, pads, strict=True)])
        ones = [torch.ones(1, n, dtype=torch.bool) for n in lengths]
        mask = torch.cat([F.pad(one, pad) for one, pad in zip(ones, pads, strict=True)])
        padded = model(ids, attention_mask=mask, return_state=True)
        assert_close((padded.logits[mask][None], *flat(padded.state)), (wanted, *states), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_by_a_recorded_step(kind, monkeypatch):
    """A stand-in for CUDA graphs calls the step again, on the same buffers."""
    recorded = []

    def record(function, device):
        recorded.append(function)
        output = function().clone()
        return lambda: output.copy_(function())

    model = make(kind, torch.float32)
    ids, mask = prompts()
    expected = model.generate(ids, 20, attention_mask=mask)
    assert decode_graph.obstacle(model) is None
    monkeypatch.setitem(decode_graph.RECORDERS, "cpu", record)
    assert torch.equal(model.generate(ids, 20, attention_mask=mask), expected)
    assert len(recorded) == 1
    decode_graph.forget(model)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_gradient(recompute):
    model, ids = make("hybrid"), tokens(2, 9)
    parameters = dict(model.named_parameters())
    expected = gradients((model(ids, labels=ids).loss,), parameters)
    model.backbone.recompute = recompute
    assert_close(gradients((model(ids, labels=ids).loss,), parameters), expected, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(kind, dtype, tmp_path):
    model = make(kind, dtype)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert_same(loaded.state_dict(), model.state_dict())
    wide = {n.split(".")[-1] for n, p in loaded.named_parameters() if p.dtype == torch.float32}
    if dtype == torch.bfloat16:
        steering = {"dt_bias", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"}
        assert wide == {"A_log", "D"} | (steering if kind == "hybrid" else set())


def test_a_step_of_the_hybrid_optimizer():
    """Projections by Muon, what steers the recurrences and convolutions by AdamW without decay."""
    model, ids = make("hybrid", torch.float32).train(), tokens(4, 12)
    engine = ParamGroupEngine(model)
    first = {
        p.title.removeprefix("backbone.layers.0."): p for p in engine.pieces if ".0." in p.name
    }
    muon = {title for title, piece in first.items() if piece.rule == "muon"}
    assert muon == {
        "mixer.in_proj.weight[x]", "mixer.in_proj.weight[z]", "mixer.x_proj.weight[low]",
        "mixer.x_proj.weight[B]", "mixer.x_proj.weight[C]", "mixer.dt_proj.weight",
        "mixer.out_proj.weight", "mlp.fc1.weight[value]", "mlp.fc1.weight[gate]", "mlp.fc2.weight",
    }  # fmt: skip
    assert all(first[title].weight_decay == 0 for title in first.keys() - muon)
    assert "no layout" not in engine.plan()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = HybridOptimizer(model, lr=0.02)
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    assert model(ids, labels=ids).loss < loss
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_initialisation():
    """As the official code has it for a whole model: depth in out_proj, no bias but dt_proj's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "d_model": 64, "n_layer": 4, "layers": "mamba"}
    model = Mamba3LM(Mamba3Config(**sizes, mamba={"bias": True}))
    for block in model.backbone.layers:
        mixer = block.mixer
        assert (mixer.in_proj.bias == 0).all()
        assert (mixer.out_proj.bias == 0).all()
        bound = 1 / math.sqrt(128 * 4)
        assert 0.95 * bound < mixer.out_proj.weight.abs().max() <= bound
        step = F.softplus(mixer.dt_proj.bias)
        assert 0.9e-3 < step.min() < step.max() < 0.11
        assert 0.9 / 2 < mixer.dt_proj.weight.abs().max() <= 1 / 2
        assert (block.norm.weight == 1).all()
    assert 0.018 < model.backbone.embedding.weight.std() < 0.022


def test_initial_angles_are_scaled_in_a_model_as_in_a_layer():
    config = Mamba3Config(vocab_size=9, d_model=64, n_layer=1, angle_init_scale=8.0)
    weight = Mamba3LM(config).backbone.layers[0].mixer.in_proj.weight.abs()
    assert 0.95 < weight[-config.n_angles :].max() <= 1
    assert 0.95 / 8 < weight[: -config.n_angles].max() <= 1 / 8
