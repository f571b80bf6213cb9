"""Mamba3LM: packing, padding, state, loss, initialisation, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import TOLERANCE, assert_close, error, gradients, randomise

from mamba3 import Mamba3Config, Mamba3LM

SIZES = {"vocab_size": 45, "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8}
KINDS = {
    "siso": {"d_intermediate": 20},
    "mimo": {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
    "untied": {"d_intermediate": 20, "tie_embeddings": False, "ngroups": 2},
}


def make(kind="siso", dtype=torch.float64, **changes):
    config = Mamba3Config(**(SIZES | KINDS[kind] | changes))
    return randomise(Mamba3LM(config, dtype=dtype), scale=0.4)


def tokens(*shape, seed=0, vocab=45):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def expected_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_the_definition(kind):
    """Embedding, blocks, norm and head, written out over the mixers."""
    model = make(kind)
    ids = tokens(2, 9)

    def norm(x, module):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * module.weight

    x = model.backbone.embedding.weight[ids]
    for block in model.backbone.layers:
        x = x + block.mixer(norm(x, block.norm))
        if block.mlp is not None:
            value, gate = (norm(x, block.norm2) @ block.mlp.fc1.weight.T).chunk(2, -1)
            x = x + (value * gate * torch.sigmoid(gate)) @ block.mlp.fc2.weight.T
    logits = norm(x, model.backbone.norm_f) @ model.lm_head.weight.T
    out = model(ids, labels=ids)
    assert_close(out.logits, logits, TOLERANCE[torch.float64], "logits")
    assert out.loss.item() == pytest.approx(expected_loss(logits, ids).item(), rel=1e-12)
    assert out.state is None
    assert out.logits.shape[-1] == 48
    tied = model.lm_head.weight is model.backbone.embedding.weight
    assert tied == (kind != "untied")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_separate(kind):
    model = make(kind)
    lengths = [1, 17, 25, 64]
    ids = tokens(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    seq_idx = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).unsqueeze(0)
    parts = ids.split(lengths, 1)
    outs = [model(part, return_state=True) for part in parts]
    logits = torch.cat([out.logits for out in outs], 1)
    # The mean over every scored position: a sequence of L tokens has L - 1 of them.
    losses = [
        expected_loss(out.logits, part) * (part.shape[1] - 1)
        for out, part in zip(outs[1:], parts[1:], strict=True)
    ]
    loss = sum(losses) / (sum(lengths) - len(lengths))
    wanted = gradients((logits, loss), dict(model.named_parameters()))
    for packing in ({"cu_seqlens": bounds}, {"seq_idx": seq_idx}):
        got = model(ids, labels=ids, return_state=True, **packing)
        assert_close(got.logits, logits, TOLERANCE[torch.float64], "logits")
        assert got.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        for i, out in enumerate(outs):
            one = got.state.reorder(torch.tensor([i]))
            for mine, theirs in zip(one.layers, out.state.layers, strict=True):
                assert_close(mine.h, theirs.h, TOLERANCE[torch.float64], f"state {i}")
        grads = gradients((got.logits, got.loss), dict(model.named_parameters()))
        assert_close(grads, wanted, 2 * TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["siso", "mimo"])
def test_padded_rows_equal_single_rows(kind, side):
    model = make(kind)
    lengths = [9, 4, 1, 6]
    ids, mask = tokens(4, 9), torch.zeros(4, 9, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        (row[9 - length :] if side == "left" else row[:length]).fill_(1)
    got = model(ids, labels=ids, attention_mask=mask, return_state=True)
    next_ids = tokens(4, seed=5)
    stepped, _ = model.step(next_ids, got.state)
    continued = model(next_ids[:, None].expand(-1, 3), state=got.state)
    losses, count = 0, 0
    for i, length in enumerate(lengths):
        real = mask[i].bool()
        row = ids[i : i + 1, real]
        alone = model(row, return_state=True)
        tolerance = TOLERANCE[torch.float64]
        assert_close(got.logits[i : i + 1, real], alone.logits, tolerance, f"row {i}")
        step, _ = model.step(next_ids[i : i + 1], alone.state)
        assert_close(stepped[i : i + 1], step, tolerance, f"step {i}")
        more = model(next_ids[i : i + 1, None].expand(-1, 3), state=alone.state)
        assert_close(continued.logits[i : i + 1], more.logits, tolerance, f"continuation {i}")
        if length > 1:
            losses = losses + expected_loss(alone.logits, row) * (length - 1)
            count += length - 1
    assert got.loss.item() == pytest.approx((losses / count).item(), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_any_continuation_equals_one_pass(kind):
    model = make(kind)
    ids = tokens(2, 70)
    expected = model(ids).logits
    state, logits, start = None, [], 0
    for length in (1, 33, 2, 17, 1, 16):
        out = model(ids[:, start : start + length], state=state, return_state=True)
        logits.append(out.logits)
        state, start = out.state, start + length
    assert start == 70
    assert_close(torch.cat(logits, 1), expected, TOLERANCE[torch.float64], "logits")


def test_logits_to_keep():
    model = make()
    ids = tokens(2, 9)
    full = model(ids).logits
    for keep in (1, 4, 9):
        assert_close(model(ids, logits_to_keep=keep).logits, full[:, -keep:], 1e-14, f"{keep}")


def test_ignored_labels():
    model = make()
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[0, :6] = -100
    labels[1, 3] = -100
    logits = model(ids).logits
    picked = [(i, t) for i in range(2) for t in range(1, 9) if labels[i, t] != -100]
    expected = -sum(logits[i, t - 1].log_softmax(-1)[ids[i, t]] for i, t in picked) / len(picked)
    got = model(ids, labels=labels).loss
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("head", ["plain", "hooked"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_without_logits(kind, head):
    model = make(kind)
    if head == "hooked":
        model.lm_head.register_forward_hook(lambda module, args, out: out * 3)
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = mask[1, 8:] = 0
    named = dict(model.named_parameters())
    for packing in ({}, {"attention_mask": mask}, {"seq_idx": tokens(3, 12, seed=2, vocab=2)}):
        expected = model(ids, labels=ids, **packing)
        got = model(ids, labels=ids, return_logits=False, return_state=True, **packing)
        assert got.logits is None
        assert got.state is not None
        assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
        wanted = gradients((expected.loss,), named)
        assert_close(gradients((got.loss,), named), wanted, 1e-11, "gradient")


@pytest.mark.parametrize("kind", KINDS)
def test_initialisation(kind):
    torch.manual_seed(0)
    model = Mamba3LM(Mamba3Config(**(SIZES | KINDS[kind] | {"d_model": 64, "n_layer": 8})))
    config = model.config
    assert model.backbone.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    additions = 16 if config.mlp_width else 8
    for block in model.backbone.layers:
        bound = 1 / math.sqrt(config.d_inner * additions)
        assert 0.95 * bound < block.mixer.out_proj.weight.abs().max() <= bound
        if block.mlp is not None:
            bound = 1 / math.sqrt(config.mlp_width * additions)
            assert 0.95 * bound < block.mlp.fc2.weight.abs().max() <= bound
            assert 0.95 / 8 < block.mlp.fc1.weight.abs().max() <= 1 / 8
            assert (block.norm2.weight == 1).all()
        assert (block.norm.weight == 1).all()
        assert (block.mixer.D == 1).all()
    assert (model.backbone.norm_f.weight == 1).all()


def test_initial_loss_is_that_of_a_guess():
    torch.manual_seed(0)
    model = Mamba3LM(Mamba3Config(**(SIZES | KINDS["siso"])))
    ids = tokens(4, 50)
    assert model(ids, labels=ids).loss.item() == pytest.approx(math.log(48), rel=0.02)


def test_which_parameters_stay_float32():
    names = make("mimo", d_intermediate=20).float32_parameter_names()
    small = {name.split(".")[-1] for name in names}
    assert small == {"dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"}
    assert len(names) == 2 * len(small)


def test_bfloat16_keeps_the_residual_in_float32():
    model = make(dtype=torch.bfloat16)
    wide = Mamba3LM(model.config, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    seen = []
    model.backbone.layers[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    ids = tokens(2, 40)
    out = model(ids, labels=ids)
    assert seen == [torch.float32]
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    assert error(out.logits, wide(ids).logits) < 3e-2
    plain = make(dtype=torch.bfloat16, residual_in_fp32=False)
    plain.backbone.layers[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    plain(ids)
    assert seen[1] == torch.bfloat16


def test_trains_on_a_long_sequence():
    model = make(dtype=torch.float32, n_layer=1)
    ids = tokens(1, 16384)
    model(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_bad_input():
    model = make()
    ids = tokens(2, 9)
    bad = ids.clone()
    bad[1, 3] = 45
    negative = ids.clone()
    negative[0, 0] = -1
    cases = [
        (lambda: model(bad), r"input_ids holds 45, expected tokens in \[0, 45\)"),
        (lambda: model(negative), "input_ids holds -1"),
        (lambda: model(ids, labels=bad), "labels holds 45"),
        (lambda: model(ids, labels=ids[:, :5]), "labels have shape"),
        (lambda: model(ids.float()), "expected input_ids .* of int64 or int32, got torch.float32"),
        (lambda: model(ids[0]), r"expected input_ids \(B, L\)"),
        (lambda: model(ids[:, :0]), "input_ids has no token"),
        (lambda: model(ids, labels=ids, logits_to_keep=1), "labels need every logit"),
        (lambda: model(ids, return_logits=False), "leaves only the loss: pass labels"),
        (lambda: model(ids, state=model.new_state(3)), "holds 3 sequences, the input 2"),
        (lambda: model.step(ids, model.new_state(2)), r"expected input_ids \(B,\) or \(B, 1\)"),
        (lambda: model.step(bad[:, 3], model.new_state(2)), "input_ids holds 45"),
        (lambda: model.step(ids[:1, 0], model.new_state(2)), "holds 2 sequences, the input 1"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
