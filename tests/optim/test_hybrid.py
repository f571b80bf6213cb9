"""HybridOptimizer against torch's own optimizers and its parts, and in torch's machinery."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from compare import assert_same, randomise
from torch import nn

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.optim import ANVIL, HybridOptimizer, ParamGroupEngine, Rails, Tied, orthogonalize
from mamba3.optim.orthogonalize import lr_factor

RAILS = Rails(engage_step=3)
OPTIONS = {
    "default": {},
    "anvil": {**ANVIL, "rails": RAILS},
    "rails": {"rails": RAILS},
    "equalize": {"equalize": 0.9},
    "rows": {"row_equalize": True},
    "cautious": {"decay": "cautious"},
    "with lr": {"decay_with_lr": True, "decay_adjusted": True},
    "every 2": {"adam_every": 2},
    "no nesterov": {"nesterov": False, "preset": "keller5", "lr_rule": "spectral"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def layers(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Linear(10, 10, bias=False), nn.Linear(10, 6), nn.LayerNorm(6)
    ).to(dtype)


def language_model(**sizes):
    config = Mamba3Config(
        **{"vocab_size": 11, "d_model": 16, "n_layer": 2, "d_state": 6, "headdim": 8} | sizes
    )
    return randomise(Mamba3LM(config, dtype=torch.float32), scale=0.3)


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(model, step)
        before = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        assert_same({n: p.grad for n, p in model.named_parameters()}, before)
    return weights(model)


# against other optimizers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_adamw_is_torchs(dtype):
    mine, theirs = layers(dtype), layers(dtype)
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6}
    a = HybridOptimizer(mine, weight_decay=0.3, overrides={"*": "adamw"}, **options)
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() <= 1]
    b = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}],
        **options,
    )
    for step in range(5):
        for model, optimizer in ((mine, a), (theirs, b)):
            give_gradients(model, step)
            if step == 1:  # a parameter that is not used starts its own count later
                model[3].weight.grad = None
            optimizer.step()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(("rule", "torchs"), [("original",) * 2, ("match_rms", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_keller5_is_torchs_muon(rule, torchs, nesterov):
    shapes = [(10, 10), (10, 30), (30, 10), (10, 30)]
    mine = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in shapes)
    theirs = copy.deepcopy(mine)
    options = {"lr": 0.02, "weight_decay": 0.5, "nesterov": nesterov}
    a = HybridOptimizer(
        mine, preset="keller5", lr_rule=rule, momentum=0.9, dtype=torch.bfloat16, **options
    )
    b = torch.optim.Muon(theirs.parameters(), momentum=0.9, adjust_lr_fn=torchs, **options)
    for step in range(4):
        before = weights(mine)
        with torch.no_grad():
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                q.copy_(p)  # so that every step is compared by itself
        for model, optimizer in ((mine, a), (theirs, b)):
            give_gradients(model, step)
            optimizer.step()
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            change, expected = p - before[name], q - before[name]
            # bfloat16's rounding, which five steeply rising maps make larger in both.
            assert (change - expected).norm() < 0.05 * expected.norm(), name


# against the parts, in float64


@every_option
def test_a_model_of_every_kind_of_piece(options):
    """Every piece of a language model against a step written out for it alone."""
    model = language_model(d_intermediate=12, is_mimo=True, mimo_rank=2).double()
    groups = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.9, "betas": (0.7, 0.9), "eps": 1e-4}
    overrides = {"*[angle]": "adamw", "*.mlp.fc2*": {"lr_mul": 0.5, "weight_decay": 0.4}}
    optimizer = HybridOptimizer(model, overrides=overrides, **groups, **options)
    expected = weights(model)
    state = {piece.title: {} for piece in optimizer.engine.pieces}
    for step in range(5):
        lr = 0.03 * (1 + step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        give_gradients(model, step)
        optimizer.step()
        for piece in optimizer.engine.pieces:
            w = piece.of(expected[piece.name])
            g = piece.of(dict(model.named_parameters())[piece.name].grad)
            numbers = {**groups, "lr": lr * piece.lr_mul, "first_lr": 0.03}
            if piece.weight_decay is not None:
                numbers["weight_decay"] = piece.weight_decay
            alone(piece, w, g, state[piece.title], step + 1, numbers, options)
    for name, p in model.named_parameters():
        # Steps of AdamW are counted in float32.
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-6, atol=1e-7, msg=name)
    assert {"muon", "adamw"} == {piece.rule for piece in optimizer.engine.pieces}


def alone(piece, w, g, state, step, numbers, options):
    """One step of one piece, in the plainest words."""
    lr, decay = numbers["lr"], numbers["weight_decay"]
    if options.get("decay_with_lr") and piece.weight_decay is None:
        decay *= lr / piece.lr_mul / numbers["first_lr"]
    cautious = options.get("decay") == "cautious"
    if piece.rule == "adamw":
        if options.get("adam_every") == 2:
            g = g + state.pop("kept", 0)
            if step % 2:
                state["kept"] = g
                return
        t = state["t"] = state.get("t", 0) + 1
        (b1, b2), eps = numbers["betas"], numbers["eps"]
        m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", 0) + (1 - b2) * g**2
        w -= lr * decay * w * ((m * w >= 0) if cautious else 1)
        w -= lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        return
    mu, rails = numbers["momentum"], options.get("rails")
    beta, share = rails.at(step) if rails else (mu, 1.0)
    fast = state["fast"] = beta * state.get("fast", 0) + (1 - beta) * g
    slow = state["slow"] = 0.98 * state.get("slow", 0) + 0.02 * g
    blend = share * fast + (1 - share) * slow
    u = g + mu * (blend - g) if options.get("nesterov", True) else blend
    if options.get("row_equalize"):
        u = u / u.norm(dim=1, keepdim=True)
    u = orthogonalize(u, options.get("preset", "polar_express5"))
    if (beta2 := options.get("equalize")) is not None:
        along = u if u.shape[0] >= u.shape[1] else u.T
        mean = along.square().mean(1)
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * mean
        scaled = along / (v + 1e-10).sqrt()[:, None]
        scaled = scaled * u.norm() / scaled.norm()
        u = scaled if u.shape[0] >= u.shape[1] else scaled.T
    factor = lr_factor(options.get("lr_rule", "match_rms"), *w.shape)
    decay *= factor if options.get("decay_adjusted") else 1
    sign = (slow if rails else u) * w >= 0 if cautious else 1
    w -= lr * decay * sign * w
    w -= lr * factor * u


@every_option
def test_bfloat16_with_extra_bits_is_float32(options):
    """The same gradients, and the same bits of weights after every step."""
    half, full = layers(torch.bfloat16), layers(torch.float32)
    with torch.no_grad():
        for p, q in zip(half.parameters(), full.parameters(), strict=True):
            q.copy_(p)
    # torch's fused AdamW rounds in another order than the plain steps that extra bits need.
    overrides = {"*bias": {"lr_mul": 0}, "3.weight": {"lr_mul": 0}}
    a = HybridOptimizer(half, lr=1e-3, extra_bits=True, overrides=overrides, **options)
    b = HybridOptimizer(full, lr=1e-3, overrides=overrides, **options)
    for step in range(20):
        give_gradients(half, step)
        for p, q in zip(half.parameters(), full.parameters(), strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(half.parameters(), full.parameters(), strict=True):
        state = a.state[p]
        if "low" in state:
            from mamba3.optim.rules import join_bits

            assert torch.equal(join_bits(p.detach(), state["low"]), q)
            assert not torch.equal(p.float(), q)


# torch's machinery


def test_frozen_pieces_do_not_move_a_bit():
    model = language_model(d_intermediate=12)
    model.backbone.embedding.weight.requires_grad_(False)
    before = weights(model)
    overrides = {"*in_proj.weight[x]": {"lr_mul": 0}, "*.D": {"lr_mul": 0.0}}
    optimizer = HybridOptimizer(model, lr=0.1, overrides=overrides)
    after = run(model.requires_grad_(True), optimizer, 2)
    frozen = [p for p in optimizer.engine.pieces if not p.lr_mul]
    assert len(frozen) == 4
    for piece in optimizer.engine.pieces:
        same = torch.equal(piece.of(before[piece.name]), piece.of(after[piece.name]))
        assert same == (piece in frozen), piece.title
    assert torch.equal(before["backbone.embedding.weight"], after["backbone.embedding.weight"])


def test_decay_of_zero_is_none():
    model = layers()
    before = weights(model)
    optimizer = HybridOptimizer(model, lr=0.1, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(before, weights(model))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.step()
    torch.testing.assert_close(model[1].weight, before["1.weight"] * 0.95)
    assert torch.equal(model[1].weight, before["1.weight"] * (1 - 0.1 * 0.5))


def test_without_gradient_nothing_moves():
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()
    alone, both = copy.deepcopy(model), HybridOptimizer(model, lr=0.1)
    optimizer = HybridOptimizer(alone, lr=0.1)
    for step in range(3):
        for m in (model, alone):
            give_gradients(m, step)
        for i in (0, 2):
            model[i].zero_grad()
        both.step()
        optimizer.step()
    for i in range(4):
        same = [torch.equal(p, q) for p, q in
                zip(model[i].parameters(), alone[i].parameters(), strict=True)]  # fmt: skip
        assert all(same) if i in (1, 3) else not any(same)
        moved = [bool(t.any()) for p in model[i].parameters() for t in both.state[p].values()]
        assert all(moved) if i in (1, 3) else not any(moved)


@every_option
def test_state_goes_on_in_a_new_process(tmp_path, options):
    """Saved after 3 steps, loaded by another process, which makes the other 3."""
    model = language_model(d_intermediate=12)
    optimizer = HybridOptimizer(model, lr=1e-2, **options)
    run(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    expected = run(model, optimizer, 3, start=3)
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    again = language_model(d_intermediate=12)
    again.load_state_dict(loaded["model"])
    new = HybridOptimizer(again, lr=5.0, **options)
    addresses = [t.data_ptr() for p in again.parameters() for t in new.state[p].values()]
    new.load_state_dict(loaded["optimizer"])
    assert addresses == [t.data_ptr() for p in again.parameters() for t in new.state[p].values()]
    assert_same(run(again, new, 3, start=3), expected)


def test_state_by_a_process_that_is_really_new(tmp_path):
    model, code = layers(), (
        "import sys, torch; sys.path[:0] = sys.argv[2:];"
        "import test_hybrid as t; from mamba3.optim import HybridOptimizer;"
        "s = torch.load(sys.argv[1], weights_only=True); m = t.layers(seed=1);"
        "m.load_state_dict(s['model']); o = HybridOptimizer(m);"
        "o.load_state_dict(s['optimizer']); torch.save(t.run(m, o, 2, start=2), sys.argv[1])"
    )  # fmt: skip
    optimizer = HybridOptimizer(model, lr=1e-2)
    run(model, optimizer, 2)
    path = tmp_path / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    folders = [__file__.rpartition("/")[0], __file__.rpartition("/optim/")[0]]
    subprocess.run([sys.executable, "-c", code, str(path), *folders], check=True)
    assert_same(torch.load(path, weights_only=True), run(model, optimizer, 2, start=2))


def test_state_is_float32_whatever_the_weights_are():
    model = layers(torch.bfloat16)
    optimizer = HybridOptimizer(model, lr=1e-2)
    run(model, optimizer, 2)
    again = HybridOptimizer(model, lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        for name, t in again.state[p].items():
            assert t.dtype == torch.float32, name
            assert torch.equal(t, optimizer.state[p][name])


def test_state_that_does_not_fit_is_named():
    optimizer = HybridOptimizer(layers())
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"0\.weight has \['momentum'\].*\['lanes', 'momentum'\]"):
        HybridOptimizer(layers(), equalize=0.9).load_state_dict(state)
    with pytest.raises(ValueError, match=r"groups of \[3, 4\] parameters, this optimizer of \[7\]"):
        HybridOptimizer(layers(), overrides={"*": "adamw"}).load_state_dict(state)
    wider = nn.Sequential(nn.Linear(6, 12), *list(layers())[1:])
    with pytest.raises(ValueError, match=r"momentum of 0\.weight has shape \(10, 6\).*\(12, 6\)"):
        HybridOptimizer(wider).load_state_dict(state)
    renamed = nn.ModuleDict({f"m{i}": m for i, m in enumerate(layers())})
    with pytest.raises(ValueError, match=r"state is of 0\.weight where this optimizer has m0"):
        HybridOptimizer(renamed).load_state_dict(state)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    ],
)
def test_schedulers(make):
    """A step under a scheduler is that of an optimizer with the scheduled numbers."""
    model = layers()
    optimizer = HybridOptimizer(model, lr=0.1)
    scheduler = make(optimizer)
    seen = []
    for step in range(4):
        numbers = [{k: g[k] for k in ("lr", "betas", "momentum")} for g in optimizer.param_groups]
        seen.append(numbers[0]["lr"])
        alone = copy.deepcopy(model)
        by_hand = HybridOptimizer(alone, lr=0.1)
        by_hand.load_state_dict(optimizer.state_dict())
        for group, own in zip(by_hand.param_groups, numbers, strict=True):
            group.update(own)
        run(model, optimizer, 1, start=step)
        assert_same(weights(model), run(alone, by_hand, 1, start=step))
        scheduler.step()
    assert len(set(seen)) == 4


def test_overflow_under_a_grad_scaler_moves_nothing():
    model = layers(torch.float32)
    optimizer = HybridOptimizer(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    run(model, optimizer, 1)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    scaler.scale(model(torch.full((2, 6), 1e30)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(before, weights(model))
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, tensors in state["state"].items():
        assert_same(tensors, after["state"][key])
    assert scaler.get_scale() == 2.0**3
    optimizer.zero_grad()
    x = torch.randn(2, 6)
    scaler.scale(model(x).square().sum()).backward()
    scaler.step(optimizer)
    twin = layers(torch.float32)
    twin.load_state_dict(before)
    other = HybridOptimizer(twin, lr=0.1)
    other.load_state_dict(state)
    twin(x).square().sum().backward()
    other.step()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], p, msg=name)


def test_gradients_that_are_not_finite_skip_the_whole_step(caplog):
    model = layers()
    optimizer = HybridOptimizer(model, lr=0.1)
    run(model, optimizer, 1)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    for value in (torch.nan, torch.inf):
        give_gradients(model, 1)
        model[2].bias.grad[3] = value
        with caplog.at_level(logging.WARNING):
            optimizer.step()
    assert optimizer.skipped_steps == 2
    assert_same(before, weights(model))
    for key, tensors in optimizer.state_dict()["state"].items():
        assert_same(tensors, state[key])
    [record] = caplog.records
    assert "step 2 left out: the gradient of 2.bias is not finite" in record.getMessage()
    run(model, optimizer, 1)
    assert optimizer.skipped_steps == 2
    assert not torch.equal(before["0.weight"], model[0].weight)
    give_gradients(model, 1)
    model[2].bias.grad[3] = torch.nan
    heedless = HybridOptimizer(model, lr=0.1, skip_nonfinite=False)
    heedless.step()
    assert model[2].bias.isnan().any()


def test_closures_and_clipping():
    model, twin = layers(), layers()
    a, b = HybridOptimizer(model, lr=0.1), HybridOptimizer(twin, lr=0.1)
    x = torch.randn(3, 6, dtype=torch.float64)

    def closure():
        a.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    loss = a.step(closure)
    twin(x).square().sum().backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    b.step()
    assert loss.requires_grad
    assert_same(weights(model), weights(twin))


def test_add_param_group():
    model, more = layers(), nn.Linear(5, 7).double()
    optimizer = HybridOptimizer(model, lr=0.1)
    run(model, optimizer, 2)
    with pytest.raises(ValueError, match=r"group 2, parameter 0, of shape \(7, 5\), is in no rule"):
        optimizer.add_param_group({"params": [more.weight]})
    with pytest.raises(ValueError, match=r"shape \(7,\), and the rule 'muon' is for matrices"):
        optimizer.add_param_group({"params": [more.bias], "rule": "muon"})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [("w", more.weight)], "rule": "muon", "lr": 0.3})
    optimizer.add_param_group({"params": [("b", more.bias)], "rule": "adamw"})
    twin = copy.deepcopy(more)
    alone = HybridOptimizer(twin, lr=0.1)
    alone.param_groups[0]["lr"] = 0.3
    for m in (model, more, twin):
        give_gradients(m, 7)
    optimizer.step()
    twin.bias.grad, more_bias = more.bias.grad.clone(), more.bias
    alone.step()
    assert torch.equal(more.weight, twin.weight)
    decays = [g["weight_decay"] for g in optimizer.param_groups]
    assert decays == [0.1] * 4
    assert set(optimizer.state[more_bias]) == {"exp_avg", "exp_avg_sq", "step"}
    with pytest.raises(ValueError, match=r"duplicate|more than one parameter group"):
        optimizer.add_param_group({"params": [more.bias], "rule": "adamw"})


# tied embedding and head


class TwoTables(nn.Module):
    """An embedding and a head, stored apart."""

    def __init__(self, transposed=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Parameter(torch.randn(4, 7) if transposed else torch.randn(7, 4))
        self.transposed = transposed

    def forward(self, ids):
        head = self.head if self.transposed else self.head.T
        return self.middle(self.embedding(ids)) @ head


@pytest.mark.parametrize("transposed", [False, True])
def test_tied_tables_are_one_until_they_are_untied(transposed):
    model = TwoTables(transposed).double()
    tied = Tied("embedding.weight", "head", untie_step=4, transposed=transposed)
    one = TwoTables().double()  # the same, with one tensor
    one.head = one.embedding.weight
    one.embedding.weight.data.copy_(model.head.T if transposed else model.head)
    one.middle.load_state_dict(model.middle.state_dict())
    options = {"lr": 0.05, "weight_decay": 0.1}
    override = {"weight_decay": 0.2}
    a = HybridOptimizer(model, tied=tied, overrides={"embedding*": override, "head": override},
                        **options)  # fmt: skip
    b = HybridOptimizer(one, overrides={"embedding*": override}, **options)
    ids = torch.arange(5)
    turn = (lambda t: t.T) if transposed else (lambda t: t)
    for _ in range(3):
        for m, optimizer in ((model, a), (one, b)):
            m.zero_grad()
            m(ids).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(turn(model.head), one.embedding.weight)
        assert torch.equal(turn(model.head), model.embedding.weight)
    # From here on each has its own gradient, and both the moments of the head.
    state = {name: t.clone() for name, t in a.state[model.head].items()}
    before = model.embedding.weight.detach().clone()
    model.zero_grad()
    model(ids).square().mean().backward()
    a.step()
    assert not torch.equal(turn(model.head), model.embedding.weight)
    g = model.embedding.weight.grad
    m = turn(state["exp_avg"]) if transposed else state["exp_avg"]
    v = turn(state["exp_avg_sq"]) if transposed else state["exp_avg_sq"]
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    expected = before * (1 - 0.05 * 0.2)
    expected -= 0.05 * m / (1 - 0.9**4) / ((v / (1 - 0.95**4)).sqrt() + 1e-8)
    torch.testing.assert_close(model.embedding.weight.detach(), expected)


def test_tied_errors():
    with pytest.raises(ValueError, match=r"tied names table, which AdamW does not train"):
        HybridOptimizer(TwoTables(), tied=Tied("table", "head"))
    with pytest.raises(ValueError, match=r"\(7, 4\) and the head \(4, 7\) do not fit"):
        HybridOptimizer(TwoTables(transposed=True), tied=Tied("embedding.weight", "head"))


# errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "keller"}, "'keller' is none of keller5"),
        ({"lr_rule": "rms"}, "'rms' is none of match_rms"),
        ({"decay": "caution"}, "'caution' is none of decoupled, cautious"),
        ({"equalize": 1.0}, r"equalize is a beta in \[0, 1\) or None, got 1.0"),
        ({"adam_every": 0}, "adam_every must be at least 1, got 0"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"betas": (0.9, 2)}, r"betas\[1\] must be in \[0, 1\), got 2"),
        ({"extra_bits": True}, r"extra_bits is for bfloat16 weights, and the matrices are float64"),
        ({"overrides": {"3.weight": "muon"}}, r"3.weight has shape \(6,\), and the rule 'muon'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        HybridOptimizer(layers(), **options)


def test_extra_bits_of_a_model_that_keeps_float32_parameters():
    model = language_model().to(torch.bfloat16)
    for overrides in (None, {"*": "adamw"}):
        optimizer = HybridOptimizer(model, extra_bits=True, overrides=overrides)
        for name, p in model.named_parameters():
            keys = {key.rpartition(".")[2] for key in optimizer.state[p]}
            assert ("low" in keys) == (p.dtype == torch.bfloat16), name


def test_a_number_that_became_wrong_is_an_error_at_the_step():
    model = layers()
    optimizer = HybridOptimizer(model)
    optimizer.param_groups[1]["weight_decay"] = float("nan")
    give_gradients(model, 0)
    before = weights(model)
    with pytest.raises(ValueError, match="weight_decay must be at least 0, got nan"):
        optimizer.step()
    assert_same(before, weights(model))


def test_an_engine_is_taken_as_it_is():
    engine = ParamGroupEngine(layers(), {"0.weight": "adamw"})
    optimizer = HybridOptimizer(engine)
    assert optimizer.plan() == engine.plan()
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "2.weight"]
