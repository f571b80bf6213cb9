"""TMamba3Layer: its own maths against the definition, its contract, its initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import TOLERANCE, assert_close, error, gradients, randomise, turned

from mamba3 import TMamba3Layer, ops

OPTIONS = {
    "siso": {"d_state": 16, "headdim": 16},
    "siso-softplus-groups": {
        "d_state": 10, "headdim": 8, "ngroups": 2, "rope_fraction": 1.0, "a_activation": "softplus"
    },
    "siso-norm": {"d_state": 16, "headdim": 32, "is_outproj_norm": True, "rope_fraction": 0.3},
    "mimo": {"d_state": 16, "headdim": 16, "is_mimo": True},
    "mimo-norm": {
        "d_state": 6, "headdim": 8, "is_mimo": True, "mimo_rank": 3, "is_outproj_norm": True,
        "ngroups": 4,
    },
    "mimo-R1": {"d_state": 16, "headdim": 16, "is_mimo": True, "mimo_rank": 1},
}  # fmt: skip


def make(options, d_model=16, seed=0):
    layer = TMamba3Layer(d_model, **OPTIONS[options], dtype=torch.float64)
    return randomise(layer, seed)


def normal(*shape, seed=3, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def differentiate(layer, outputs, *inputs):
    named = dict(layer.named_parameters()) | {f"input{i}": t for i, t in enumerate(inputs)}
    return gradients(outputs, named)


@pytest.mark.parametrize("options", OPTIONS)
def test_projection_follows_the_official_order(options):
    """Rows of in_proj, activations and norms, written out from the definition."""
    layer = make(options)
    config = layer.config
    u = normal(2, 5, 16)
    rows = layer.in_proj(u)
    maps = config.rank * config.ngroups * config.d_state
    sizes = [config.d_inner, config.d_inner, maps, maps]
    sizes += [config.n_heads] * 3 + [config.n_angles]
    z, x, b, c, dd_dt, dd_a, trap, angle = rows.split(sizes, -1)
    shape = (2, 5, config.rank, config.ngroups, config.d_state)
    if config.a_activation == "softplus":
        f = torch.log1p(dd_a.exp())
    else:
        f = torch.where(dd_a >= 0, 1 + dd_a, 1 / (1 - dd_a))
    mimo = (layer.mimo_x, layer.mimo_z, layer.mimo_o) if config.is_mimo else None
    weight = layer.norm.weight.view(-1, config.headdim) if config.is_outproj_norm else None
    heads = (2, 5, config.n_heads, config.headdim)
    with ops.use_backend("reference"):
        y, state = ops.mamba3_scan(
            x.reshape(heads),
            F.rms_norm(b.reshape(shape), shape[-1:], layer.B_norm.weight, 1e-5),
            F.rms_norm(c.reshape(shape), shape[-1:], layer.C_norm.weight, 1e-5),
            torch.log1p((dd_dt + layer.dt_bias).exp()),
            -torch.maximum(f, torch.tensor(1e-4)),
            1 / (1 + torch.exp(-trap)),
            math.pi * torch.tanh(angle),
            layer.B_bias,
            layer.C_bias,
            layer.D,
            z.reshape(heads),
            mimo=mimo,
            norm_weight=weight,
        )
    expected = y.flatten(2) @ layer.out_proj.weight.T
    got, got_state = layer(u, return_state=True)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(turned(got_state), turned(state), TOLERANCE[torch.float64], "state")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("squeezed", [True, False])
def test_steps_equal_one_pass(options, squeezed):
    layer = make(options)
    u = normal(3, 21, 16).requires_grad_()
    y, final = layer(u, return_state=True)
    got, state = layer(u[:, :9], return_state=True)
    ys = [got]
    for i in range(9, 21):
        token = u[:, i] if squeezed else u[:, i : i + 1]
        out, state = layer.step(token, state)
        assert out.shape == token.shape
        ys.append(out.view(3, 1, 16))
    got = (torch.cat(ys, 1), *turned(state))
    expected = (y, *turned(final))
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(
        differentiate(layer, got, u),
        differentiate(layer, expected, u),
        2 * TOLERANCE[torch.float64],
        "gradient",
    )


@pytest.mark.parametrize("options", ["siso", "mimo-norm"])
def test_steps_from_nothing(options):
    layer = make(options)
    u = normal(2, 6, 16)
    state = layer.new_state(2)
    with torch.no_grad():
        expected = layer(u)
        for i in range(6):
            y, state = layer.step(u[:, i], state)
            assert_close(y, expected[:, i], TOLERANCE[torch.float64], f"token {i}")


@pytest.mark.parametrize("options", ["siso-norm", "mimo"])
def test_packed_equals_separate(options):
    layer = make(options)
    lengths = [1, 17, 25, 64]
    u = normal(1, sum(lengths), 16).requires_grad_()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    got, state = layer(u, cu_seqlens=bounds, return_state=True)
    parts = [layer(part, return_state=True) for part in u.split(lengths, 1)]
    expected = torch.cat([y for y, _ in parts], 1)
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    for i, (_, separate) in enumerate(parts):
        one = turned(state.reorder(torch.tensor([i])))
        assert_close(one, turned(separate), TOLERANCE[torch.float64], f"state {i}")
    assert_close(
        differentiate(layer, (got,), u),
        differentiate(layer, (expected,), u),
        2 * TOLERANCE[torch.float64],
        "gradient",
    )


def test_seq_idx_equals_separate():
    layer = make("siso")
    u = normal(2, 20, 16).requires_grad_()
    # A number may come back: a run is a sequence, whatever its number was before.
    seq_idx = torch.tensor([[0] * 7 + [1] * 12 + [0], [5] * 20])
    got, state = layer(u, seq_idx=seq_idx, return_state=True)
    pieces = [u[:1, :7], u[:1, 7:19], u[:1, 19:], u[1:]]
    expected = [layer(piece) for piece in pieces]
    expected = torch.cat((torch.cat(expected[:3], 1), expected[3]))
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert state.batch_size == 4
    assert_close(
        differentiate(layer, (got,), u),
        differentiate(layer, (expected,), u),
        2 * TOLERANCE[torch.float64],
        "gradient",
    )


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("options", ["siso", "mimo-norm"])
def test_padding_equals_single_rows(options, with_state):
    layer = make(options)
    u = normal(4, 11, 16).requires_grad_()
    mask = torch.ones(4, 11, dtype=torch.long)
    mask[0, :4] = 0  # left
    mask[1, 6:] = 0  # right
    mask[2, 3:7] = 0  # in between
    mask[3, :2] = mask[3, 9:] = 0  # both sides
    before = None
    if with_state:
        with torch.no_grad():
            _, before = layer(normal(4, 5, 16, seed=9), return_state=True)
    got, state = layer(u, attention_mask=mask, state=before, return_state=True)
    ys, states = [], []
    for i in range(4):
        real = mask[i].bool()
        one = None if before is None else before.reorder(torch.tensor([i]))
        y, final = layer(u[i : i + 1, real], state=one, return_state=True)
        full = torch.zeros(11, 16, dtype=y.dtype)
        full[real] = y[0]
        ys.append(full)
        states.append(turned(final))
    expected = (torch.stack(ys), *(torch.cat(t) for t in zip(*states, strict=True)))
    got = (got, *turned(state))
    assert_close(got, expected, TOLERANCE[torch.float64], "output")
    assert_close(
        differentiate(layer, got, u),
        differentiate(layer, expected, u),
        2 * TOLERANCE[torch.float64],
        "gradient",
    )


def test_a_row_of_pads_keeps_its_state():
    layer = make("siso")
    _, before = layer(normal(2, 5, 16), return_state=True)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    y, state = layer(normal(2, 3, 16), attention_mask=mask, state=before, return_state=True)
    assert torch.equal(y[1], torch.zeros(3, 16, dtype=y.dtype))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(state, before, strict=True))


def test_state_reorders_like_its_rows():
    layer = make("mimo")
    u = normal(3, 8, 16)
    index = torch.tensor([2, 0, 0, 1])
    _, state = layer(u[:, :5], return_state=True)
    got = layer(u[index, 5:], state=state.reorder(index))
    assert_close(got, layer(u)[index, 5:], TOLERANCE[torch.float64], "output")


@pytest.mark.parametrize("options", ["siso-norm", "mimo"])
def test_float32_is_float32(options):
    layer = make(options)
    u = normal(2, 70, 16).requires_grad_()
    expected = layer(u)
    wanted = differentiate(layer, (expected,), u)
    layer.float()
    u = u.detach().float().requires_grad_()
    got = layer(u)
    assert got.dtype == torch.float32
    assert_close(got, expected, TOLERANCE[torch.float32], "output")
    grads = differentiate(layer, (got,), u)
    assert_close(grads, wanted, 4 * TOLERANCE[torch.float32], "gradient")


def test_half_precision_keeps_what_steers_the_recurrence():
    layer = randomise(TMamba3Layer(16, **OPTIONS["mimo"]))
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for convert in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()):
        convert(layer)
        for name in layer.float32_parameters:
            assert torch.equal(getattr(layer, name), before[name]), name
    assert layer.in_proj.weight.dtype == torch.bfloat16
    built = TMamba3Layer(16, **OPTIONS["mimo"], dtype=torch.bfloat16)
    for module in (layer, built):
        dtypes = {p.dtype for n, p in module.named_parameters() if n in layer.float32_parameters}
        assert dtypes == {torch.float32}
    u = normal(2, 9, 16, dtype=torch.bfloat16)
    y, state = layer(u, return_state=True)
    assert y.dtype == torch.bfloat16
    assert {t.dtype for t in state} == {torch.float32}
    y_next, _ = layer.step(u[:, 0], state)
    assert y_next.dtype == torch.bfloat16
    layer.double()
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_bfloat16_is_as_close_as_its_weights_allow():
    layer = randomise(TMamba3Layer(32, d_state=16, headdim=16), scale=0.3).to(torch.bfloat16)
    wide = TMamba3Layer(32, d_state=16, headdim=16, dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    u = normal(2, 40, 32, dtype=torch.bfloat16)
    # in_proj's rounding alone is 2^-9; it goes through exponentials and sums.
    assert error(layer(u), wide(u.double())) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(dtype):
    layer = randomise(TMamba3Layer(32, d_state=16, headdim=16, is_mimo=True), scale=0.3)
    u = normal(2, 40, 32, dtype=torch.float32).requires_grad_()
    expected = layer(u)
    wanted = differentiate(layer, (expected,), u)
    with torch.autocast("cpu", dtype):
        got = layer(u)
    assert error(got, expected) < 3e-2
    for name, grad in differentiate(layer, (got,), u).items():
        assert grad.dtype == torch.float32
        assert error(grad, wanted[name]) < 0.1, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    layer = make("mimo")
    u = normal(2, 30, 16).requires_grad_()
    expected = differentiate(layer, (layer(u),), u)
    y = torch.utils.checkpoint.checkpoint(layer, u, use_reentrant=reentrant)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(weight)
    got = {name: p.grad for name, p in layer.named_parameters()} | {"input0": u.grad}
    assert_close(got, expected, 1e-12, "gradient")


def test_linear_layers_are_called():
    """What wraps a Linear (LoRA, hooks, quantisation) must take part."""
    layer = make("siso")
    u = normal(2, 5, 16)
    called = []
    for name in ("in_proj", "out_proj"):
        getattr(layer, name).register_forward_hook(
            lambda module, args, out, name=name: called.append(name) or out * 2
        )
    plain = make("siso")
    with torch.no_grad():
        plain.in_proj.weight.mul_(2)
        plain.out_proj.weight.mul_(2)
    assert_close(layer(u), plain(u), 1e-12, "output")
    _, state = layer(u, return_state=True)
    assert_close(layer.step(u[:, 0], state)[0], plain.step(u[:, 0], state)[0], 1e-12, "step")
    assert called == ["in_proj", "out_proj"] * 3


@pytest.mark.parametrize("options", OPTIONS)
def test_initialisation(options):
    torch.manual_seed(0)
    layer = TMamba3Layer(64, **OPTIONS[options], dt_min=1e-2, dt_max=0.5, angle_init_scale=3.0)
    config = layer.config
    dt = F.softplus(layer.dt_bias.double())
    assert (dt > 1e-2 * 0.999).all()
    assert (dt < 0.5 * 1.001).all()
    assert dt.std() > 0
    bound = 1 / math.sqrt(64)
    split = layer.in_proj.out_features - config.n_angles
    assert bound * 0.95 < layer.in_proj.weight[:split].abs().max() <= bound
    angles = layer.in_proj.weight[split:]
    assert bound * 3 * 0.9 < angles.abs().max() <= bound * 3
    assert layer.out_proj.weight.abs().max() <= 1 / math.sqrt(config.d_inner)
    constants = {"D": 1, "B_bias": 1, "C_bias": 1, "B_norm.weight": 1, "C_norm.weight": 1}
    if config.is_mimo:
        constants |= {"mimo_x": 1 / config.rank, "mimo_z": 1, "mimo_o": 1 / config.rank}
    if config.is_outproj_norm:
        constants["norm.weight"] = 1
    named = dict(layer.named_parameters())
    for name, value in constants.items():
        assert (named.pop(name) == torch.tensor(value)).all(), name
    assert named.keys() == {"in_proj.weight", "out_proj.weight", "dt_bias"}


def test_dt_is_at_least_its_floor():
    layer = TMamba3Layer(64, headdim=1, dt_min=1e-6, dt_max=1e-5, dt_init_floor=1e-4)
    torch.testing.assert_close(
        F.softplus(layer.dt_bias), torch.full((128,), 1e-4), rtol=1e-3, atol=0
    )


def test_meta_device_and_materialising():
    expected = TMamba3Layer(32, **OPTIONS["mimo-norm"])
    torch.manual_seed(0)
    expected.reset_parameters()
    layer = TMamba3Layer(32, **OPTIONS["mimo-norm"], device="meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    for (name, got), wanted in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headdim": 24}, "headdim must divide expand \\* d_model: got headdim 24"),
        ({"ngroups": 3}, "ngroups must divide the number of heads"),
        ({"d_state": 7}, "d_state must be even"),
        ({"a_activation": "relu"}, "a_activation must be one of"),
        ({"mimo_rank": 0}, "mimo_rank must be more than 0"),
    ],
)
def test_bad_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        TMamba3Layer(16, **({"d_state": 16, "headdim": 16} | change))


def test_bad_inputs():
    layer = TMamba3Layer(16, **OPTIONS["siso"])
    u = torch.zeros(2, 5, 16)
    state = layer.new_state(2)
    bounds = torch.tensor([0, 5])
    mask = torch.ones(2, 5)
    cases = [
        (
            lambda: layer(u[0]),
            r"expected an input \(B, L, d_model\) with d_model = 16, got \(5, 16\)",
        ),
        (lambda: layer(u[..., :8]), "with d_model = 16"),
        (lambda: layer(u[:, :0]), "at least one token"),
        (lambda: layer.step(u, state), r"step takes one token.*got \(2, 5, 16\)"),
        (lambda: layer.step(u[:1, 0], state), "the state holds 2 sequences, the input 1"),
        (lambda: layer(u, state=layer.new_state(3)), "the state holds 3 sequences, the input 2"),
        (lambda: layer(u, attention_mask=mask[:, :4]), "attention_mask has shape"),
        (lambda: layer(u, attention_mask=mask * 0), "zero everywhere"),
        (lambda: layer(u, seq_idx=mask.long()[:1]), "seq_idx has shape"),
        (lambda: layer(u, cu_seqlens=bounds), "expected a batch of 1, got 2"),
        (lambda: layer(u, cu_seqlens=bounds, attention_mask=mask), "pass only one of"),
        (lambda: layer(u[:1], cu_seqlens=torch.tensor([0, 4])), "must rise from 0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="expected a floating-point input"):
        layer(u.long())


def test_a_hundred_steps_leave_the_parameters_alone():
    layer = randomise(TMamba3Layer(16, **OPTIONS["siso-norm"]))
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    state = layer.new_state(2)
    with torch.inference_mode():
        for i in range(100):
            _, state = layer.step(normal(2, 16, seed=i, dtype=torch.float32), state)
    for name, p in layer.named_parameters():
        assert torch.equal(p, before[name]), name
