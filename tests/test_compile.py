"""Under torch.compile everything gives what it gives without, in one graph and without recompiling.

On a GPU, Inductor compiles; elsewhere its front alone, which needs no C compiler.
"""

import pytest
import torch
import torch.nn.functional as F
from compare import (
    DEVICE,
    TOLERANCE,
    assert_close,
    call_arguments,
    error,
    gradients,
    randomise,
    scan_inputs,
)
from torch._dynamo.testing import CompileCounterWithBackend

from mamba3 import Mamba3Config, Mamba3LM, Mamba3State, TMamba3Layer, ops
from mamba3.layers import MambaState, TMambaLayer

COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"
# What each backend is tested in: Triton's kernels leave float64 to the torch path.
DTYPES = {"torch": torch.float64, "triton": torch.float32}
SIZES = {"d_state": 6, "headdim": 16}
LAYERS = {
    "siso": SIZES,
    "mimo-norm": SIZES | {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True, "ngroups": 2},
}
BOUNDS = (0, 4, 4, 9)

# Inductor advises TF32, and imports what is deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:TensorFloat32", "ignore:`torch.jit:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


@pytest.fixture(params=DTYPES)
def dtype(request, monkeypatch):
    """A backend's dtype, with that backend in use by the threads of autograd too."""
    monkeypatch.setenv("MAMBA3_BACKEND", request.param)
    return DTYPES[request.param]


def compiled(function, fullgraph=True):
    return torch.compile(function, fullgraph=fullgraph, backend=COMPILER)


def normal(*shape, dtype=torch.float64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def tokens(*shape, seed=3):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def language_model(dtype=torch.float64):
    config = Mamba3Config(vocab_size=50, d_model=16, n_layer=1, d_intermediate=12, **SIZES)
    return randomise(Mamba3LM(config, dtype=dtype, device=DEVICE), scale=0.3)


def assert_same(run, tensors, tolerance, fullgraph=True):
    """Compare the outputs of run() and their gradients by `tensors` with those of it compiled."""
    expected, got = run(), compiled(run, fullgraph)()
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    assert_close(got, expected, tolerance, "output")
    assert_close(gradients(got, tensors), gradients(expected, tensors), 2 * tolerance, "gradient")


@pytest.mark.parametrize("options", LAYERS)
def test_layer(options, dtype):
    layer = randomise(TMamba3Layer(16, **LAYERS[options], device=DEVICE, dtype=dtype))
    tensors = {"u": normal(1, 5, 16, dtype=dtype)}
    for i, (name, t) in enumerate(layer.new_state(1)._asdict().items()):
        tensors[name] = normal(*t.shape, dtype=dtype, seed=i)
    for t in tensors.values():
        t.requires_grad_()

    def run():
        u, *state = tensors.values()
        y, final = layer(u, state=Mamba3State(*state), return_state=True)
        return y, *final

    assert_same(run, tensors | dict(layer.named_parameters()), TOLERANCE[dtype])


@pytest.mark.parametrize("packed", [False, True])
def test_mamba_layer(packed, dtype):
    """The Mamba-1 layer, from a state and with one, of one row or of several sequences in it."""
    layer = randomise(TMambaLayer(8, d_state=2, device=DEVICE, dtype=dtype))
    tensors = {"u": normal(1, 9, 8, dtype=dtype)}
    for i, (name, t) in enumerate(layer.new_state(3 if packed else 1)._asdict().items()):
        tensors[name] = normal(*t.shape, dtype=dtype, seed=i)
    for t in tensors.values():
        t.requires_grad_()
    cu_seqlens = torch.tensor(BOUNDS, device=DEVICE) if packed else None

    def run():
        u, *state = tensors.values()
        options = {"cu_seqlens": cu_seqlens, "return_state": True}
        y, final = layer(u, state=MambaState(*state), **options)
        return y, *final

    assert_same(run, tensors | dict(layer.named_parameters()), TOLERANCE[dtype])


@pytest.mark.parametrize("op", ["selective_scan", "causal_conv"])
def test_mamba_op_is_what_it_declares(op):
    """Shapes, dtypes, strides, aliases and gradients, of views of wider rows."""
    wide = normal(2, 5, 17).split((4, 4, 4, 2, 3), -1)
    x, dt, z, b, _ = (t.detach().requires_grad_() for t in wide)
    rest = {"selective_scan": (dt, -normal(4, 2).exp(), b, b, normal(4), z, normal(2, 4, 2))}
    rest |= {"causal_conv": (normal(4, 3), normal(4), normal(2, 4, 2))}
    given = (x, *rest[op], None, *([True] if op == "selective_scan" else []))
    given = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in given]
    torch.library.opcheck(getattr(torch.ops.mamba3, op).default, given)


def scan_arguments(dtype, **options):
    """Tensors of a scan by name and its call, on the device."""
    tensors, _ = scan_inputs(**{"length": 7, "heads": 2, "dtype": dtype} | options)
    tensors = {name: t.detach().to(DEVICE).requires_grad_() for name, t in tensors.items()}
    return tensors, call_arguments(tensors)


@pytest.mark.parametrize(
    "options",
    [
        {"gate": False},
        {"mimo": True, "rank": 2, "norm": True},
        {"batch": 1, "length": 9, "sequences": 3, "norm": True},
    ],
    ids=["plain", "mimo-norm", "packed"],
)
def test_scan(options, dtype):
    tensors, call = scan_arguments(dtype, **options)
    if "sequences" in options:
        call["cu_seqlens"] = torch.tensor(BOUNDS, device=DEVICE)

    def run():
        y, state = ops.mamba3_scan(**call, chunk_size=4)
        return y, *state

    assert_same(run, tensors, TOLERANCE[dtype])


def test_scan_without_states():
    tensors, call = scan_arguments(torch.float64)
    tensors = {name: t for name, t in tensors.items() if not name.startswith("state.")}
    del call["state"]

    def run():
        y, state = ops.mamba3_scan(**call, return_state=False)
        assert state is None
        return (y,)

    assert_same(run, tensors, TOLERANCE[torch.float64])


def test_scan_differentiates_what_is_asked_for():
    """Nothing that needs a gradient reaches the output that is differentiated."""
    tensors, call = scan_arguments(torch.float64)
    for name, t in tensors.items():
        t.requires_grad_(name == "d")
    _, state = compiled(ops.mamba3_scan)(**call)
    (grad,) = torch.autograd.grad(state.k.sum(), tensors["d"])
    assert not grad.any()


def test_scan_checks_its_arguments():
    tensors, _ = scan_arguments(torch.float64, length=5)
    call = call_arguments({name: t.detach() for name, t in tensors.items()})
    for name, wrong, message in (
        ("dt", call["dt"][:, :3], "dt has shape"),
        ("x", call["x"][0], "expected x"),
        ("state", call["state"].reorder(torch.tensor([0], device=DEVICE)), "holds 1 sequences"),
        ("cu_seqlens", torch.tensor([0, 6, 5], device=DEVICE), "batch must be 1"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled(ops.mamba3_scan)(**call | {name: wrong})


@pytest.mark.parametrize("op", ["scan", "scan_backward", "step", "step_inplace"])
@pytest.mark.parametrize("options", [{}, {"mimo": True, "rank": 2, "norm": True}])
def test_op_is_what_it_declares(op, options):
    """Shapes, dtypes, strides, aliases and gradients, and that autograd is on in scan_backward."""
    tensors, _ = scan_inputs(heads=2, length=5, **options)
    streams = ("mimo_x", "mimo_z", "mimo_o", "norm_weight")
    state = [f"state.{name}" for name in Mamba3State._fields]
    given = [tensors.get(name) for name in (*list(tensors)[:11], *streams, *state)]
    if "step" in op:
        given = [t[:, 0] if i < 7 or i == 10 else t for i, t in enumerate(given)]
    # Leaves on the device, since what autograd does is compared by their gradients.
    given = [None if t is None else t.detach().to(DEVICE) for t in given]
    if op == "scan":
        given = [None if t is None else t.requires_grad_() for t in given]
    index = torch.tensor([1, -1], device=DEVICE)
    y, *state = given[0], *given[-4:]
    wanted = [t is not None for t in given] + [False] * 4
    arguments = {
        "scan": (*given, None, 1e-5, None, True),
        "scan_backward": ([y, None, *state[1:]], *given, None, 1e-5, None, True, wanted),
        "step": (*given, 1e-5),
        "step_inplace": (*given, index, 1e-5),
    }
    torch.library.opcheck(getattr(torch.ops.mamba3, op).default, arguments[op])


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_loss_op_is_what_it_declares(wanted):
    x, weight = normal(16, 7), normal(16, 50, seed=4)
    x, weight = (t.T.requires_grad_(want) for t, want in zip((x, weight), wanted, strict=True))
    torch.library.opcheck(
        torch.ops.mamba3.linear_cross_entropy.default, (x, weight, tokens(7), -100, *wanted)
    )


def test_model(dtype):
    model, ids = language_model(dtype), tokens(1, 6)

    def run():
        out = model(ids, labels=ids, return_state=True, return_logits=False)
        return out.loss, *out.state.layers[0]

    assert_same(run, dict(model.named_parameters()), TOLERANCE[dtype])


@pytest.mark.parametrize("packing", [{}, {"cu_seqlens": BOUNDS}])
def test_model_with_logits(packing):
    model, ids = language_model(), tokens(1, 9)
    packing = {name: torch.tensor(bounds, device=DEVICE) for name, bounds in packing.items()}

    def run():
        out = model(ids, labels=ids, **packing)
        return out.loss, out.logits

    assert_same(run, dict(model.named_parameters()), TOLERANCE[torch.float64])


def test_padding_breaks_the_graph_and_nothing_else():
    model, ids = language_model(), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def run():
        return (model(ids, labels=ids, attention_mask=mask).loss,)

    tolerance = TOLERANCE[torch.float64]
    assert_same(run, dict(model.named_parameters()), tolerance, fullgraph=False)


def test_loss_under_autocast():
    """In half precision, as without compiling, and leaving the weight's gradient to later uses."""
    tensors = {
        "x": normal(7, 16, dtype=torch.float32).requires_grad_(),
        "weight": normal(50, 16, dtype=torch.float32, seed=4).requires_grad_(),
    }
    labels = tokens(7)

    def run():
        x, weight = tensors.values()
        with torch.autocast(DEVICE, torch.bfloat16):
            return ops.linear_cross_entropy(x, weight, labels), F.linear(x, weight)

    assert_same(run, tensors, TOLERANCE[torch.bfloat16])
    got, half = compiled(run)()[0], run()[0]
    assert_close(got, half, 1e-6, "loss")
    assert error(got, ops.linear_cross_entropy(*tensors.values(), labels)) > 1e-6


@pytest.mark.parametrize("marked", [True, False])
def test_lengths_compile_once_more_at_most(marked):
    model, counter = language_model(), CompileCounterWithBackend(COMPILER)
    run = torch.compile(model, fullgraph=True, backend=counter)
    for length, compilations in ((9, 1), (9, 1), (7, 2), (12, 2), (5, 2)):
        ids = tokens(2, length)
        if marked:
            torch._dynamo.mark_dynamic(ids, 1)
        loss = run(ids, labels=ids, return_logits=False).loss
        assert_close(loss, model(ids, labels=ids).loss, TOLERANCE[torch.float64], "loss")
        assert counter.frame_count == (1 if marked else compilations)


@pytest.mark.parametrize("options", LAYERS)
def test_step(options, dtype):
    """Decoding: the state returned anew, in place, and in slots of a pool."""
    layer = randomise(TMamba3Layer(16, **LAYERS[options], device=DEVICE, dtype=dtype))
    u = normal(2, 16, dtype=dtype)
    state = Mamba3State(
        *(normal(*t.shape, dtype=dtype, seed=i) for i, t in enumerate(layer.new_state(3)))
    )
    index = torch.tensor([2, 0], device=DEVICE)

    def in_slots(u, state):
        tensors, call = layer._project(u)
        return ops.mamba3_step(*tensors, **call, state=state, inplace=True, state_indices=index)

    def in_place(u, state):
        return layer.step(u, state, inplace=True)

    for step, rows, returns_own in (
        (layer.step, 2, False),
        (in_place, 2, True),
        (in_slots, 3, True),
    ):
        own, others = (Mamba3State(*(t[:rows].clone() for t in state)) for _ in range(2))
        with torch.no_grad():
            y, after = step(u, own)
            got, got_after = compiled(step)(u, others)
        assert_close((got, *got_after), (y, *after), TOLERANCE[dtype])
        assert_close(others, own, TOLERANCE[dtype])
        assert (got_after.h is others.h) == returns_own


@pytest.mark.parametrize("options", LAYERS)
def test_step_is_differentiable(options, dtype):
    layer = randomise(TMamba3Layer(16, **LAYERS[options], device=DEVICE, dtype=dtype))
    tensors = {"u": normal(2, 16, dtype=dtype)}
    for i, (name, t) in enumerate(layer.new_state(2)._asdict().items()):
        tensors[name] = normal(*t.shape, dtype=dtype, seed=i)
    for t in tensors.values():
        t.requires_grad_()

    def run():
        u, *state = tensors.values()
        y, after = layer.step(u, Mamba3State(*state))
        return y, *after

    assert_same(run, tensors | dict(layer.named_parameters()), TOLERANCE[dtype])


@pytest.mark.parametrize("interleaved", [True, False])
def test_small_ops(interleaved, dtype):
    shapes = {
        "a": (3, 2, 5, 10), "b": (3, 1, 1, 6), "x": (3, 2, 8), "weight": (2, 4, 8),
        "h": (3, 2, 8, 10), "k": (3, 2, 4, 10), "decay": (3, 2), "phasor": (3, 2, 6),
        "gate": (3, 2, 8), "scale": (8,),
    }  # fmt: skip
    tensors = {
        name: normal(*shape, dtype=dtype, seed=i).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }

    def run():
        a, b, x, weight, h, k, decay, phasor, gate, scale = tensors.values()
        pairing = {"interleaved": interleaved}
        streams = ops.broadcast_streams(x, weight)
        return (
            ops.complex_mul(a, b, **pairing),
            ops.complex_add(a, b, **pairing),
            ops.mix_streams(streams, weight),
            ops.complex_state_update(h, streams, k, decay, phasor, **pairing),
            ops.rms_norm(x, scale, 1e-3, gate),
            *ops.add_rms_norm(x, gate, scale, 1e-3),
        )

    assert_same(run, tensors, TOLERANCE[dtype])
