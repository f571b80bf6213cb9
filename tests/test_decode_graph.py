"""Decoding by replays against decoding by calls, on every device there is.

Without a GPU, a stand-in plays the part of CUDA graphs: all but the graph itself is tested.
"""

import contextlib
import copy
import gc
import logging
import pickle
import weakref
from unittest import mock

import pytest
import torch
from compare import call_arguments, scan_inputs
from test_generate import VOCAB, eos_that_ends_rows_apart, make_model, padded, prompts_of
from torch import nn

from mamba3 import decode_graph
from mamba3.decode_graph import RECORDERS, WORTHWHILE, DecodeGraph, Decoder, forget
from mamba3.generate import generate, stream
from mamba3.models.lm import LMState, Mamba3LM
from mamba3.ops import Mamba3State, mamba3_step, use_backend

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LONG = WORTHWHILE + 8


def repeat(function, device):
    """As `record_cuda`, by calling the function again: same buffers, same output tensor."""
    for _ in range(3):
        output = function()
    output = output.clone()
    return lambda: output.copy_(function())


def once(function, device):
    """A stand-in that does not refer to the model afterwards, as a CUDA graph; tokens are wrong."""
    output = function().clone()
    return lambda: output


class Recorder:
    """Records in the device's way, and counts."""

    def __init__(self, record):
        self.record, self.recorded, self.replayed = record, 0, 0

    def __call__(self, function, device):
        self.recorded += 1
        replay = self.record(function, device)

        def counting():
            self.replayed += 1
            return replay()

        return counting


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def recorder(device, monkeypatch):
    counting = Recorder(RECORDERS.get(device, repeat))
    monkeypatch.setitem(RECORDERS, device, counting)
    monkeypatch.setattr(decode_graph, "_warn_once", decode_graph.logger.warning)
    return counting


def eagerly(function, *args, **kwargs):
    with mock.patch.dict(RECORDERS, clear=True):
        return function(*args, **kwargs)


def prompts(device, batch=3, seed=1):
    return torch.stack(prompts_of([5] * batch, seed)).to(device)


def tensors(state):
    return [t for layer in state.layers for t in layer]


def clone(state):
    return LMState(tuple(Mamba3State(*(t.clone() for t in layer)) for layer in state.layers))


@pytest.mark.parametrize("is_mimo", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}]
)
def test_tokens_equal_eager(is_mimo, options, device, recorder):
    model = make_model(is_mimo=is_mimo).to(device)
    rows = prompts_of([4, 7, 2, 5, 3, 6])
    ids, mask = (t.to(device) for t in padded(rows, "mixed"))
    options = {"attention_mask": mask, **options}
    expected = eagerly(generate, model, ids, LONG, **options)
    assert recorder.recorded == 0
    assert torch.equal(generate(model, ids, LONG, **options), expected)
    assert (recorder.recorded, recorder.replayed) == (1, LONG - 1)
    assert len({tuple(row) for row in expected[:, 7:].tolist()}) == 6
    streamed = torch.stack(list(stream(model, ids, LONG, **options)), 1)
    assert torch.equal(streamed, expected[:, 7:])
    assert recorder.recorded == 1


def test_rows_end_and_state_is_right(device, recorder):
    model = make_model()
    rows = prompts_of([4, 7, 2, 5, 3, 6])
    eos = eos_that_ends_rows_apart(model, rows, LONG)
    model.to(device)
    ids, mask = (t.to(device) for t in padded(rows, "left"))
    options = {"attention_mask": mask, "eos_token_id": eos, "return_state": True}
    expected, expected_state = eagerly(generate, model, ids, LONG, **options)
    tokens, state = generate(model, ids, LONG, **options)
    assert recorder.replayed
    assert torch.equal(tokens, expected)
    assert all(map(torch.equal, tensors(state), tensors(expected_state)))
    more = eagerly(generate, model, ids, LONG, state=state)
    assert torch.equal(generate(model, ids, LONG, state=state), more)


def test_states_handed_out_stay_as_they_are(device, recorder):
    model = make_model().to(device)
    _, state = generate(model, prompts(device), LONG, return_state=True)
    before = clone(state)
    generate(model, prompts(device, seed=2), LONG, state=state)
    generate(model, prompts(device, seed=3), LONG)
    assert recorder.recorded == 1
    assert all(map(torch.equal, tensors(state), tensors(before)))


def test_a_graph_equals_the_models_steps(device):
    model = make_model(is_mimo=True).to(device)
    ids = torch.randint(VOCAB, (6, 3), generator=torch.Generator().manual_seed(5)).to(device)
    with torch.inference_mode():
        start = model(prompts(device), return_state=True).state
        before = clone(start)
        graph = DecodeGraph(model, start, RECORDERS.get(device, repeat))
        for _ in range(2):
            graph.load(start)
            state = start
            for token in ids:
                expected, state = model.step(token, state)
                assert torch.equal(graph.step(token), expected)
    assert all(map(torch.equal, tensors(start), tensors(before)))


def assign_new_weights(model):
    weights = {name: 1.5 * t for name, t in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)


CHANGES = {
    "weights": assign_new_weights,
    "dtype": lambda model: model.to(torch.bfloat16),
    "layer": lambda model: setattr(
        model, "lm_head", nn.Linear(16, 32, bias=False, device=model.lm_head.weight.device)
    ),
}


@pytest.mark.parametrize("change", ["batch", "backend", *CHANGES])
def test_recorded_again_where_it_must_be(change, device, recorder):
    model = make_model().to(device)
    before = generate(model, prompts(device), LONG)
    CHANGES.get(change, lambda model: None)(model)
    ids = prompts(device, batch=2 if change == "batch" else 3)
    with use_backend("reference") if change == "backend" else contextlib.nullcontext():
        expected = eagerly(generate, model, ids, LONG)
        for _ in range(2):
            assert torch.equal(generate(model, ids, LONG), expected)
    assert recorder.recorded == 2
    assert torch.equal(expected, before) is (change == "backend")


def test_weights_changed_in_place_are_seen(device, recorder):
    model = make_model().to(device)
    before = generate(model, prompts(device), LONG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.ones_like(parameter).cumsum(0).sin())
    expected = eagerly(generate, model, prompts(device), LONG)
    assert torch.equal(generate(model, prompts(device), LONG), expected)
    assert not torch.equal(expected, before)
    assert recorder.recorded == 1


def test_two_streams_at_a_time(device, recorder):
    model = make_model().to(device)
    inputs = [prompts(device, seed=1), prompts(device, seed=2)]
    expected = [eagerly(generate, model, ids, LONG)[:, 5:] for ids in inputs]
    for recorded in (2, 3):  # the second time, one was kept
        pairs = zip(*(stream(model, ids, LONG) for ids in inputs), strict=True)
        for found, wanted in zip(zip(*pairs, strict=True), expected, strict=True):
            assert torch.equal(torch.stack(found, 1), wanted)
        assert recorder.recorded == recorded


def test_a_dropped_stream_hands_its_recording_on(device, recorder):
    model = make_model().to(device)
    tokens = stream(model, prompts(device, seed=2), LONG)
    for _ in range(3):
        next(tokens)
    del tokens
    expected = eagerly(generate, model, prompts(device), LONG)
    assert torch.equal(generate(model, prompts(device), LONG), expected)
    assert recorder.recorded == 1


def test_few_steps_are_not_worth_a_recording(device, recorder):
    model = make_model().to(device)
    expected = eagerly(generate, model, prompts(device), 6)
    assert torch.equal(generate(model, prompts(device), 6), expected)
    generate(model, prompts(device), WORTHWHILE)
    assert recorder.recorded == 0
    generate(model, prompts(device), WORTHWHILE + 1)
    assert (recorder.recorded, recorder.replayed) == (1, WORTHWHILE)
    generate(model, prompts(device, batch=2), 6)
    assert torch.equal(generate(model, prompts(device), 6), expected)
    assert (recorder.recorded, recorder.replayed) == (1, WORTHWHILE + 5)


class Adapter(nn.Linear):
    """As LoRA: its result depends on more than its weights."""

    scale = 1.0

    def forward(self, x):
        return self.scale * super().forward(x)


class Louder(Mamba3LM):
    def step(self, *args, **options):
        logits, state = super().step(*args, **options)
        return 2 * logits, state


def make_louder(model):
    model.__class__ = Louder


def adapt(model):
    model.lm_head.__class__ = Adapter


def hook(model):
    model.backbone.norm_f.register_forward_hook(lambda module, args, out: out * 1.5)


def hook_before(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def replace_method(model):
    block = model.backbone.layers[1]
    step = block.step
    block.step = lambda *args, **options: step(*args, **options)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (make_louder, "the model is a Louder"),
        (adapt, "lm_head is a Adapter"),
        (hook, "backbone.norm_f has forward hooks"),
        (hook_before, "lm_head has forward hooks"),
        (replace_method, "a method of backbone.layers.1 was replaced"),
        (lambda model: model.add_module("drop", nn.Dropout(0.5)), "drop is a Dropout"),
    ],
)
def test_models_that_python_may_change_are_called(change, reason, device, recorder, caplog):
    model = make_model().to(device)
    generate(model, prompts(device), LONG)
    assert recorder.recorded == 1
    change(model)
    replayed = recorder.replayed
    expected = eagerly(generate, model, prompts(device), LONG)
    assert torch.equal(generate(model, prompts(device), LONG), expected)
    assert (recorder.recorded, recorder.replayed) == (1, replayed)
    assert f"without a CUDA graph, which would be faster: {reason}" in caplog.text


def test_autocast_is_called(device, recorder, caplog):
    model = make_model().to(device)
    with torch.autocast(device, torch.bfloat16):
        expected = eagerly(generate, model, prompts(device), LONG)
        assert torch.equal(generate(model, prompts(device), LONG), expected)
    assert recorder.recorded == 0
    assert "torch.autocast is on" in caplog.text


def test_a_recording_that_fails(device, recorder, caplog):
    def fail(function, device):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder.record = fail
    model = make_model().to(device)
    for batch, tries in ((3, 1), (3, 1), (2, 2)):
        expected = eagerly(generate, model, prompts(device, batch), LONG)
        assert torch.equal(generate(model, prompts(device, batch), LONG), expected)
        assert recorder.recorded == tries
    assert "a batch of 3 failed with RuntimeError: operation not permitted" in caplog.text


def test_the_reason_is_said_once(device, monkeypatch, caplog):
    monkeypatch.setitem(RECORDERS, device, RECORDERS.get(device, repeat))
    model = make_model(seed=4).to(device)
    # A reason is said once in a process: another device's must be another reason.
    model.register_module(f"once_on_{device}", nn.Softplus())
    for _ in range(2):
        generate(model, prompts(device), LONG)
    said = [r for r in caplog.records if f"once_on_{device} is a Softplus" in r.message]
    assert [r.levelno for r in said] == [logging.WARNING]


def test_one_recording_is_kept_as_long_as_the_model(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setitem(RECORDERS, device, once)
    model = make_model().to(device)
    graphs = []
    for batch in (1, 2):
        generate(model, prompts(device, batch), LONG)
        graphs.append(weakref.ref(decode_graph._kept[model]))
    gc.collect()
    assert graphs[0]() is None
    assert graphs[1]() is not None
    del model
    gc.collect()
    assert graphs[1]() is None


def test_forget(device, recorder):
    model = make_model().to(device)
    for recorded in (1, 2):
        generate(model, prompts(device), LONG)
        assert recorder.recorded == recorded
        forget(model)
        assert model not in decode_graph._kept
    forget(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_their_own_recording(copied, device, recorder):
    model = make_model().to(device)
    expected = generate(model, prompts(device), LONG)
    names = set(model.state_dict())
    twin = copied(model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert torch.equal(generate(twin, prompts(device), LONG), expected)
    assert recorder.recorded == 2
    assert set(twin.state_dict()) == names


def test_a_decoder_leaves_its_state_alone(device, recorder):
    model = make_model().to(device)
    with torch.no_grad():
        start = model(prompts(device), return_state=True).state
    before = clone(start)
    for steps in (1, LONG):
        with contextlib.closing(Decoder(model, start, steps)) as decoder:
            for token in prompts(device).T:
                decoder(token)
    assert recorder.replayed
    assert all(map(torch.equal, tensors(start), tensors(before)))


@pytest.mark.parametrize("is_mimo", [False, True])
def test_steps_in_place_equal_functional_ones(is_mimo, device):
    model = make_model(is_mimo=is_mimo).to(device)
    weights = {name: t.clone() for name, t in model.named_parameters()}
    ids = torch.randint(VOCAB, (100, 2), generator=torch.Generator().manual_seed(5)).to(device)
    state = model.new_state(2)
    own = clone(state)
    pointers = [t.data_ptr() for t in tensors(own)]
    with torch.no_grad():
        for token in ids:
            expected, state = model.step(token, state)
            logits, returned = model.step(token, own, inplace=True)
            assert torch.equal(logits, expected)
            assert all(map(torch.equal, tensors(own), tensors(state)))
    assert [t.data_ptr() for t in tensors(returned)] == pointers
    assert all(torch.equal(t, weights[name]) for name, t in model.named_parameters())
    with pytest.raises(ValueError, match="inplace=True records no gradient"):
        model.step(ids[0], own, inplace=True)


def test_slots_of_a_pool_can_be_recorded(device):
    """Which rows go where is read on the device, at every replay."""
    inputs, _ = scan_inputs(batch=3, length=4, mimo=True, rank=2, dtype=torch.float32)
    call = call_arguments({name: t.detach().to(device) for name, t in inputs.items()})
    start = call.pop("state")
    tokens = [
        {k: t[:, i] if k in ("x", "b", "c", "dt", "a", "lam", "rate", "z") else t
         for k, t in call.items()}
        for i in range(4)
    ]  # fmt: skip
    now = {k: t.clone() if torch.is_tensor(t) else t for k, t in tokens[0].items()}
    index = torch.zeros(3, dtype=torch.int32, device=device)
    pool = Mamba3State(*(t.new_zeros(5, *t.shape[1:]) for t in start))
    with torch.no_grad():
        index.copy_(torch.tensor([0, 1, 2]))
        replay = RECORDERS.get(device, repeat)(
            lambda: mamba3_step(**now, state=pool, inplace=True, state_indices=index)[0],
            torch.device(device),
        )
        for whole, own in zip(pool, start, strict=True):
            whole.zero_()[[4, 0, 3]] = own
        states = list(start)
        where = ([4, 0, 3], [4, -1, 3], [-1, -1, -1], [4, 0, 3])
        for token, rows in zip(tokens, where, strict=True):
            for name, t in token.items():
                if torch.is_tensor(t):
                    now[name].copy_(t)
            index.copy_(torch.tensor(rows))
            y = replay()
            live = [i for i, slot in enumerate(rows) if slot >= 0]
            wanted, after = mamba3_step(**token, state=Mamba3State(*states))
            states = [own.clone() for own in states]
            for own, new in zip(states, after, strict=True):
                own[live] = new[live]
            assert torch.equal(y[live], wanted[live])
            for whole, own in zip(pool, states, strict=True):
                assert torch.equal(whole[[4, 0, 3]], own)
                assert not whole[[1, 2]].any()
