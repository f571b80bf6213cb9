"""generate and stream against recomputing the whole sequence at every token."""

import math

import pytest
import torch
from compare import randomise

from mamba3.config import Mamba3Config
from mamba3.generate import (
    Sampler,
    generate,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    left_pad,
    penalize_repetition,
    stream,
)
from mamba3.models.lm import Mamba3LM

VOCAB = 29  # padded to 32
PAD = 0


def make_model(*, is_mimo=False, seed=13):
    """A tiny model, every parameter randomised; untied, since tied ones just repeat a token."""
    config = Mamba3Config(
        vocab_size=VOCAB,
        d_model=16,
        n_layer=2,
        d_state=8,
        headdim=8,
        ngroups=2,
        is_mimo=is_mimo,
        mimo_rank=3,
        dt_max=1.0,
        tie_embeddings=False,
    )
    return randomise(Mamba3LM(config), seed)


@pytest.fixture(scope="module", params=["siso", "mimo"])
def model(request):
    return make_model(is_mimo=request.param == "mimo")


@pytest.fixture(scope="module")
def siso():
    return make_model()


def prompts_of(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]


def padded(rows, side):
    """Rows as one batch with its mask, padded with PAD on a side ("mixed" alternates)."""
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        left = side == "left" or (side == "mixed" and i % 2 == 0)
        where = slice(length - len(row), length) if left else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return ids, mask


@torch.no_grad()
def recomputed(model, prompt, new_tokens, *, penalty=1.0, eos=()):
    """Greedy continuation of one unpadded prompt, from a whole new pass for every token."""
    row = prompt.tolist()
    for _ in range(new_tokens):
        logits = model(torch.tensor([row])).logits[0, -1, :VOCAB].tolist()
        for token in set(row):
            value = logits[token]
            logits[token] = value / penalty if value > 0 else value * penalty
        row.append(max(range(VOCAB), key=logits.__getitem__))
        if row[-1] in eos:
            break
    return row[len(prompt) :]


@pytest.mark.parametrize("side", ["left", "right", "mixed"])
def test_greedy_equals_recomputation(model, side):
    rows = prompts_of([1, 9, 4, 6])
    ids, mask = padded(rows, side)
    out = generate(model, ids, 20, attention_mask=mask)
    left_ids, _ = padded(rows, "left")
    assert torch.equal(out[:, :9], left_ids)
    expected = [recomputed(model, row, 20) for row in rows]
    assert out[:, 9:].tolist() == expected
    assert len({tuple(row) for row in expected}) == 4
    assert all(len(set(row)) > 3 for row in expected)


def test_prompts_without_padding_need_no_mask(model):
    ids = torch.stack(prompts_of([7, 7, 7]))
    expected = [recomputed(model, row, 12) for row in ids]
    assert generate(model, ids, 12)[:, 7:].tolist() == expected
    assert (
        generate(model, ids.int(), 12, attention_mask=torch.ones(3, 7))[:, 7:].tolist() == expected
    )


def test_batch_equals_single_rows(model):
    rows = prompts_of([3, 8, 5])
    ids, mask = padded(rows, "left")
    batch = generate(model, ids, 15, attention_mask=mask)[:, 8:]
    for row, continued in zip(rows, batch, strict=True):
        assert torch.equal(generate(model, row[None], 15)[0, len(row) :], continued)


def test_prompt_is_read_once(siso, monkeypatch):
    calls = []
    forward, step = siso.forward, siso.step

    def spy_forward(ids, **options):
        calls.append((tuple(ids.shape), options["logits_to_keep"]))
        return forward(ids, **options)

    def spy_step(ids, state):
        calls.append(tuple(ids.shape))
        return step(ids, state)

    monkeypatch.setattr(siso, "forward", spy_forward)
    monkeypatch.setattr(siso, "step", spy_step)
    generate(siso, torch.stack(prompts_of([6, 6])), 4)
    assert calls == [((2, 6), 1), (2,), (2,), (2,)]


def test_left_pad_moves_padding_wherever_it_is():
    ids = torch.tensor([[5, 6, 0, 0], [0, 0, 7, 8], [1, 0, 2, 0], [1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    moved, moved_mask = left_pad(ids, mask)
    assert moved.tolist() == [[0, 0, 5, 6], [0, 0, 7, 8], [0, 0, 1, 2], [1, 2, 3, 4]]
    assert moved_mask.long().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]]


def test_padding_may_hold_any_number(siso):
    rows = prompts_of([2, 5])
    ids, mask = padded(rows, "left")
    expected = generate(siso, ids, 6, attention_mask=mask)
    strange = ids.masked_fill(mask == 0, -100)
    out = generate(siso, strange, 6, attention_mask=mask)
    assert torch.equal(out[:, 5:], expected[:, 5:])
    assert out[0, :3].tolist() == [-100] * 3


def test_model_is_left_as_it_was(siso):
    before = {name: p.clone() for name, p in siso.named_parameters()}
    for training in (True, False):
        siso.train(training)
        generate(siso, torch.stack(prompts_of([4])), 5)
        assert siso.training is training
    assert all(torch.equal(before[name], p) for name, p in siso.named_parameters())
    assert all(p.grad is None for p in siso.parameters())


def test_result_can_be_trained_on():
    model = make_model()
    ids = generate(model, torch.stack(prompts_of([4, 4])), 5)
    model(ids, labels=ids).loss.backward()
    assert model.backbone.embedding.weight.grad.abs().sum() > 0


def eos_that_ends_rows_apart(model, rows, new_tokens):
    """A token that at least two rows reach greedily, at different steps."""
    texts = [recomputed(model, row, new_tokens) for row in rows]
    for token in range(VOCAB):
        ends = [text.index(token) for text in texts if token in text]
        if len(set(ends)) > 1:
            return token
    raise AssertionError("no such token; use another seed")


@pytest.mark.parametrize("pad", [None, 3, 31, -100])
def test_rows_end_at_their_own_eos(model, pad):
    rows = prompts_of([4, 7, 2, 5, 3, 6])
    eos = eos_that_ends_rows_apart(model, rows, 24)
    ids, mask = padded(rows, "left")
    out = generate(model, ids, 24, attention_mask=mask, eos_token_id=eos, pad_token_id=pad)[:, 7:]
    for row, tokens in zip(rows, out.tolist(), strict=True):
        text = recomputed(model, row, 24, eos=[eos])
        fill = eos if pad is None else pad
        assert tokens == text + [fill] * (out.shape[1] - len(text))


def test_generation_stops_when_all_rows_have_ended(siso):
    rows = prompts_of([4, 4])
    texts = [recomputed(siso, row, 10) for row in rows]
    eos = [texts[0][2], texts[1][4]]
    length = max(next(i for i, token in enumerate(text) if token in eos) + 1 for text in texts)
    out = generate(siso, torch.stack(rows), 10, eos_token_id=eos)
    assert out.shape[1] == 4 + length < 14
    assert len(list(stream(siso, torch.stack(rows), 10, eos_token_id=eos))) == length


def test_stream_yields_what_generate_returns(model):
    rows = prompts_of([4, 7])
    ids, mask = padded(rows, "right")
    options = {"attention_mask": mask, "temperature": 1.3, "top_k": 9, "seed": 5, "eos_token_id": 2}
    steps = list(stream(model, ids, 9, **options))
    assert all(step.shape == (2,) and step.dtype == torch.int64 for step in steps)
    assert torch.equal(torch.stack(steps, 1), generate(model, ids, 9, **options)[:, 7:])


def test_stream_computes_only_what_is_asked_for(siso, monkeypatch):
    steps = []
    step = siso.step
    monkeypatch.setattr(siso, "step", lambda ids, state: steps.append(1) or step(ids, state))
    tokens = stream(siso, torch.stack(prompts_of([4])), 1000)
    assert not steps
    next(tokens)
    next(tokens)
    assert len(steps) == 1


def test_stream_leaves_the_callers_grad_mode_alone(siso):
    for _ in stream(siso, torch.stack(prompts_of([4])), 3):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_stream_checks_arguments_at_the_call(siso):
    with pytest.raises(ValueError, match="max_new_tokens"):
        stream(siso, torch.ones(1, 3, dtype=torch.int64), 0)


def naive_filter(row, keep):
    return [value if i in keep else -math.inf for i, value in enumerate(row)]


def softmax(row):
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    return [weight / sum(weights) for weight in weights]


def naive_top_k(row, k):
    return naive_filter(row, sorted(range(len(row)), key=lambda i: -row[i])[:k])


def naive_top_p(row, p):
    probabilities, keep, total = softmax(row), set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: -row[i]):
        if keep and total >= p:
            break
        keep.add(i)
        total += probabilities[i]
    return naive_filter(row, keep)


def naive_min_p(row, p):
    probabilities = softmax(row)
    return naive_filter(
        row, {i for i, q in enumerate(probabilities) if q >= p * max(probabilities)}
    )


@pytest.mark.parametrize(
    ("fast", "naive", "value"),
    [
        *((keep_top_k, naive_top_k, k) for k in (1, 2, 7, 23, 100)),
        *((keep_top_p, naive_top_p, p) for p in (1e-9, 0.1, 0.5, 0.9, 0.999)),
        *((keep_min_p, naive_min_p, p) for p in (0.0, 0.01, 0.2, 0.9, 1.0)),
    ],
)
def test_filters_against_naive_references(fast, naive, value):
    logits = torch.randn(16, 23, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = [naive(row, value) for row in (logits * 2).tolist()]
    assert fast(logits * 2, value).tolist() == expected


def test_filters_follow_one_another():
    """Each filter sees what the one before left, as the tokens that sampling can reach show."""
    logits = torch.randn(1, 23, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sampler = Sampler(temperature=0.7, top_k=9, top_p=0.8, min_p=0.2)
    chosen = sampler(
        logits.expand(20_000, -1), torch.zeros(20_000, 23).bool(), torch.Generator().manual_seed(0)
    )
    row = [value / 0.7 for value in logits[0].tolist()]
    row = naive_min_p(naive_top_p(naive_top_k(row, 9), 0.8), 0.2)
    assert set(chosen.tolist()) == {i for i, value in enumerate(row) if value > -math.inf}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_follows_the_softmax(siso, temperature):
    prompt = prompts_of([5])[0]
    n = 20_000
    out = generate(siso, prompt.expand(n, -1), 1, temperature=temperature, seed=11)[:, -1]
    with torch.no_grad():
        logits = siso(prompt[None]).logits[0, -1, :VOCAB].double()
    expected = (logits / temperature).softmax(0)
    found = torch.bincount(out, minlength=VOCAB) / n
    deviation = (expected * (1 - expected) / n).sqrt()
    assert ((found - expected).abs() < 4.5 * deviation + 1e-4).all()


def test_a_tiny_temperature_is_greedy():
    """Divided by it, these logits would overflow."""
    logits = torch.tensor([[-200.0, 100.0, 300.0, 299.0]])
    chosen = Sampler(temperature=1e-37)(logits, torch.zeros(1, 4).bool(), None)
    assert chosen.tolist() == [2]


def test_same_seed_same_tokens_and_the_global_generator_is_left_alone(siso):
    ids = torch.stack(prompts_of([5, 5]))
    before = torch.get_rng_state()
    first = generate(siso, ids, 12, temperature=1.0, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(first, generate(siso, ids, 12, temperature=1.0, seed=7))
    assert not torch.equal(first, generate(siso, ids, 12, temperature=1.0, seed=8))


def test_without_a_seed_the_global_generator_decides(siso):
    ids = torch.stack(prompts_of([5, 5]))
    out = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out.append(generate(siso, ids, 12, temperature=1.0))
    assert torch.equal(out[0], out[1])
    assert not torch.equal(out[0], out[2])


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_padding_of_the_vocabulary_is_never_produced(temperature):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 100 * model.lm_head.weight[:3]
        ids = torch.stack(prompts_of([5] * 8))
        assert model(ids).logits[:, -1].argmax(-1).max() >= VOCAB
    out = generate(model, ids, 16, temperature=temperature, seed=0)
    assert out.max() < VOCAB


def test_filters_without_sampling_are_said_to_be_ignored(siso, caplog):
    ids = torch.stack(prompts_of([5]))
    out = generate(siso, ids, 3, top_k=4, min_p=0.25)
    assert torch.equal(out, generate(siso, ids, 3))
    assert [record.message for record in caplog.records] == [
        "top_k, min_p ignored: temperature is 0 (greedy); pass temperature=1.0 to sample"
    ]


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0, -1.0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_repetition_penalty_equals_recomputation(model, side):
    rows = prompts_of([3, 8, 5])
    ids, mask = padded(rows, side)
    out = generate(model, ids, 15, attention_mask=mask, repetition_penalty=1.7)[:, 8:]
    expected = [recomputed(model, row, 15, penalty=1.7) for row in rows]
    assert out.tolist() == expected
    assert expected != [recomputed(model, row, 15) for row in rows]


def test_repetition_penalty_does_not_count_padding(siso):
    """Padded with the very token, 0, that the row wants to say."""
    tries = (prompts_of([3], seed)[0] for seed in range(1000))
    row = next(row for row in tries if recomputed(siso, row, 1) == [PAD])
    ids = torch.cat([torch.tensor([PAD, PAD]), row])[None]
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    out = generate(siso, ids, 1, attention_mask=mask, repetition_penalty=50.0)
    assert out[0, -1] == PAD


@pytest.mark.parametrize("side", ["left", "right"])
def test_conversation_equals_one_long_prompt(model, side):
    rows = prompts_of([4, 7, 2, 5, 3, 6])
    eos = eos_that_ends_rows_apart(model, rows, 24)
    ids, mask = padded(rows, side)
    first, state = generate(
        model, ids, 24, attention_mask=mask, eos_token_id=eos, pad_token_id=-1, return_state=True
    )
    said = [[token for token in row if token >= 0] for row in first[:, 7:].tolist()]
    assert len({len(text) for text in said}) > 1

    replies = prompts_of([2, 5, 1, 3, 4, 2], seed=2)
    ids, mask = padded(replies, side)
    second, state = generate(model, ids, 6, attention_mask=mask, state=state, return_state=True)
    history = [
        torch.cat([row, torch.tensor(text), reply])
        for row, text, reply in zip(rows, said, replies, strict=True)
    ]
    expected = [recomputed(model, row, 6) for row in history]
    assert second[:, 5:].tolist() == expected

    last = torch.tensor([[1]] * 6)
    third = generate(model, last, 4, state=state)
    for row, text, found in zip(history, expected, third, strict=True):
        whole = torch.cat([row, torch.tensor([*text, 1])])
        assert found[1:].tolist() == recomputed(model, whole, 4)


def test_rows_end_where_on_step_says(model):
    rows, lengths = prompts_of([4, 7, 2]), torch.tensor([3, 6, 1])
    ids, mask = padded(rows, "left")
    seen = []

    def on_step(tokens):
        seen.append(tokens)
        return lengths == len(seen) if len(seen) != 2 else None

    options = {"attention_mask": mask, "pad_token_id": -1, "on_step": on_step}
    out, state = generate(model, ids, 20, return_state=True, **options)
    said = [recomputed(model, row, n) for row, n in zip(rows, lengths.tolist(), strict=True)]
    assert out[:, 7:].tolist() == [text + [-1] * (6 - len(text)) for text in said]
    assert torch.equal(torch.stack(seen, 1), out[:, 7:])

    reply = torch.tensor([[1]] * 3)
    for row, text, found in zip(rows, said, generate(model, reply, 5, state=state), strict=True):
        history = torch.cat([row, torch.tensor([*text, 1])])
        assert found[1:].tolist() == recomputed(model, history, 5)


def test_on_step_may_end_nothing(siso):
    ids = torch.stack(prompts_of([4, 4]))
    out = generate(siso, ids, 9, on_step=lambda tokens: None)
    assert torch.equal(out, generate(siso, ids, 9))


def test_state_can_be_trained_from(model):
    """As a prompt that was read once: the gradients are those of a state from a forward pass."""
    ids = torch.stack(prompts_of([4, 4]))
    out, state = generate(model, ids, 5, return_state=True)
    with torch.no_grad():
        expected_state = model(out, return_state=True).state
    gradients = []
    for start in (state, expected_state):
        model.zero_grad()
        model(ids, labels=ids, state=start).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    model.zero_grad()


def test_state_of_another_batch_size(siso):
    _, state = generate(siso, torch.stack(prompts_of([4, 4])), 2, return_state=True)
    with pytest.raises(ValueError, match="batch"):
        generate(siso, torch.stack(prompts_of([4, 4, 4])), 2, state=state)


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": [[1, 2]]}, TypeError, r"tensor of shape \(B, L\), got list"),
        ({"input_ids": IDS.float()}, TypeError, r"integers, got torch.float32"),
        ({"input_ids": IDS.bool()}, TypeError, r"integers, got torch.bool"),
        ({"input_ids": IDS[0]}, ValueError, r"got \(3,\); a single prompt is input_ids\[None\]"),
        ({"input_ids": IDS[:, :0]}, ValueError, r"at least one token a row, got shape \(2, 0\)"),
        ({"input_ids": IDS[:0]}, ValueError, r"at least one token a row, got shape \(0, 3\)"),
        ({"input_ids": IDS + 23}, ValueError, r"token 29, but this model knows 0 to 28"),
        ({"input_ids": IDS - 2}, ValueError, r"token -1, but this model knows 0 to 28"),
        ({"input_ids": IDS.to("meta")}, ValueError, r"on meta and the model is on cpu"),
        ({"max_new_tokens": 0}, ValueError, r"max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 1.5}, TypeError, r"float"),
        ({"attention_mask": [[1, 1, 1]] * 2}, TypeError, r"must be a tensor, got list"),
        ({"attention_mask": IDS[:, 1:]}, ValueError, r"\(2, 3\), got \(2, 2\)"),
        ({"attention_mask": IDS}, ValueError, r"1 \(real\) and 0 \(padding\)"),
        ({"attention_mask": (IDS > 3).long()}, ValueError, r"row 0 .* all padding"),
        ({"temperature": -0.1}, ValueError, r"temperature .* got -0.1"),
        ({"temperature": math.nan}, ValueError, r"temperature .* got nan"),
        ({"temperature": math.inf}, ValueError, r"temperature .* got inf"),
        ({"top_k": 0}, ValueError, r"top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, ValueError, r"top_p must be in \(0, 1\], got 1.1"),
        ({"min_p": -0.5}, ValueError, r"min_p must be in \[0, 1\], got -0.5"),
        ({"repetition_penalty": 0.0}, ValueError, r"repetition_penalty .* got 0.0"),
        ({"eos_token_id": 29}, ValueError, r"eos_token_id is 29, .* 0 to 28"),
        ({"eos_token_id": [1, -1]}, ValueError, r"eos_token_id is -1"),
        ({"unknown": 1}, TypeError, r"unknown"),
    ],
)
def test_errors(siso, arguments, error, message):
    call = {"input_ids": IDS, "max_new_tokens": 4} | arguments
    with pytest.raises(error, match=message):
        generate(siso, **call)


def test_a_broken_model_is_named():
    model = make_model()
    with torch.no_grad():
        model.backbone.norm_f.weight[3] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        generate(model, IDS, 3)
