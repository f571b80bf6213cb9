"""TMambaLayer: against transformers' Mamba and Falcon-Mamba mixers; its contract."""

import warnings

import pytest
import torch
from compare import assert_close, gradients, randomise

from mamba3.layers import TMambaLayer
from mamba3.optim import ParamGroupEngine

WIDTH = 24
KINDS = {
    "mamba": {"d_state": 5},
    "biases": {"d_state": 4, "d_conv": 3, "bias": True, "conv_bias": False, "dt_rank": 3},
    "falcon": {"d_state": 5, "maps_norm_eps": 1e-6},
}

LEAKS = ("biases", True)


def make(kind, dtype=torch.float64):
    return randomise(TMambaLayer(WIDTH, **KINDS[kind], dtype=dtype), scale=0.3)


def theirs(layer, kind):
    """The mixer of transformers with the layer's weights."""
    import transformers
    from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config_class, mixer = (
        (transformers.FalconMambaConfig, FalconMambaMixer)
        if kind == "falcon"
        else (transformers.MambaConfig, MambaMixer)
    )
    config = config_class(
        vocab_size=3, hidden_size=WIDTH, num_hidden_layers=1, state_size=layer.sizes.d_state,
        conv_kernel=layer.sizes.d_conv, expand=2, time_step_rank=layer.dt_rank,
        use_bias=layer.in_proj.bias is not None, use_conv_bias=layer.conv1d.bias is not None,
    )  # fmt: skip
    # Falcon-Mamba's own initialisation fails on a mixer alone.
    mixer = mixer(config, 0, initialize_mixer_weights=False).double()
    mixer.load_state_dict(layer.state_dict())
    return mixer


def normal(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "padded"),
    # Where in_proj has a bias, transformers lets pads into the convolution of what follows.
    [(kind, padded) for kind in KINDS for padded in (False, True) if (kind, padded) != LEAKS],
)
def test_transformers(kind, padded):
    """Outputs, and gradients of the input and of every weight; pads on the left."""
    layer = make(kind)
    u, weight = normal(2, 9, WIDTH).requires_grad_(), normal(2, 9, WIDTH, seed=4)
    mask = torch.ones(2, 9, dtype=torch.int64)
    if padded:
        mask[0, :4] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = theirs(layer, kind)
        expected = other(u, attention_mask=mask)
    # It computes something at pads, too, which nobody reads.
    real = mask[..., None] * weight
    (expected * real).sum().backward()
    wanted = {name: p.grad for name, p in other.named_parameters()} | {"u": u.grad}
    u.grad = None
    y = layer(u, attention_mask=mask)
    assert_close(y * mask[..., None], (expected * mask[..., None]).detach(), 1e-5)
    (y * real).sum().backward()
    got = {name: p.grad for name, p in layer.named_parameters()} | {"u": u.grad}
    assert_close(got, wanted, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_go_on_from_a_state(kind):
    """Halves, single tokens and rows packed into one, with gradients through the state."""
    layer, u = make(kind), normal(2, 10, WIDTH).requires_grad_()
    parameters = dict(layer.named_parameters()) | {"u": u}
    y, final = layer(u, return_state=True)
    wanted = gradients((y, *final), parameters)
    first, state = layer(u[:, :4], return_state=True)
    second, state = layer(u[:, 4:], state=state, return_state=True)
    halves = (torch.cat((first, second), 1), *state)
    assert_close(halves, (y, *final), 1e-10)
    assert_close(gradients(halves, parameters), wanted, 1e-10)

    state, steps = layer.new_state(2), []
    for t in range(10):
        out, state = layer.step(u[:, t], state)
        steps.append(out)
    assert_close((torch.stack(steps, 1), *state), (y, *final), 1e-10)

    bounds = torch.tensor([0, 10, 20])
    packed, state = layer(u.reshape(1, 20, WIDTH), cu_seqlens=bounds, return_state=True)
    assert_close((packed.view_as(y), *state), (y, *final), 1e-10)
    assert_close(gradients((packed, *state), parameters), wanted, 1e-10)


def test_a_step_in_place():
    layer, u = make("mamba"), normal(2, WIDTH)
    state = layer.new_state(2)
    _, state = layer.step(normal(2, WIDTH, seed=5), state)
    expected, wanted = layer.step(u, state)
    with torch.no_grad():
        y, new = layer.step(u.unsqueeze(1), state, inplace=True)
    assert all(t is old for t, old in zip(new, state, strict=True))
    assert_close((y.squeeze(1), *new), (expected, *wanted), 1e-12)


def test_initialisation():
    """Step sizes, decays and skips as the official code has them; meta weights are filled later."""
    torch.manual_seed(0)
    layer = TMambaLayer(256, device="meta")
    layer.to_empty(device="cpu").reset_parameters()
    dt = torch.nn.functional.softplus(layer.dt_proj.bias)
    assert 1e-3 <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1 + 1e-6
    assert torch.equal(layer.A_log.exp().round(), torch.arange(1.0, 17).expand(512, 16))
    assert torch.equal(layer.D, torch.ones(512))
    bound = layer.dt_rank**-0.5
    assert 0.99 * bound < layer.dt_proj.weight.abs().max() <= bound
    assert layer.dt_rank == 16


def test_half_precision_keeps_what_steers_in_float32():
    layer = TMambaLayer(WIDTH).to(torch.bfloat16)
    narrow = {name for name, p in layer.named_parameters() if p.dtype == torch.bfloat16}
    assert {n for n, _ in layer.named_parameters()} - narrow == {"A_log", "D"}
    y, state = layer(torch.randn(2, 3, WIDTH, dtype=torch.bfloat16), return_state=True)
    assert (y.dtype, state.h.dtype, state.conv.dtype) == (torch.bfloat16,) + (torch.float32,) * 2


def test_optimizer_layout():
    """Projections go to Muon by their parts; what steers the recurrence takes no decay."""
    plan = {(p.name, p.label): p for p in ParamGroupEngine(TMambaLayer(WIDTH)).pieces}
    muon = {key for key, piece in plan.items() if piece.rule == "muon"}
    assert muon == {
        ("in_proj.weight", "x"), ("in_proj.weight", "z"), ("x_proj.weight", "low"),
        ("x_proj.weight", "B"), ("x_proj.weight", "C"), ("dt_proj.weight", ""),
        ("out_proj.weight", ""),
    }  # fmt: skip
    assert all(plan[key].weight_decay == 0 for key in plan if key not in muon)


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="d_conv must be more than 0 and finite, got 0"):
        TMambaLayer(WIDTH, d_conv=0)
    with pytest.raises(ValueError, match=r"with d_model = 24, got \(2, 3, 5\)"):
        TMambaLayer(WIDTH)(torch.zeros(2, 3, 5))
    with pytest.raises(TypeError, match=r"floating-point input .* got torch.int64"):
        TMambaLayer(WIDTH)(torch.zeros(2, 3, WIDTH, dtype=torch.int64))
