"""A step against the plainest training code, in parts, in every precision, recorded and not."""

import copy
import logging
import math
import sys

import pytest
import torch
from compare import DEVICE, assert_close, randomise

from mamba3 import Mamba3Config, Mamba3LM, ops
from mamba3.data.problems import Batch
from mamba3.models.lm import IGNORE
from mamba3.optim import HybridOptimizer
from mamba3.train import step_cache
from mamba3.train.parts import split
from mamba3.train.precision import LossScaler
from mamba3.train.step import TrainStep
from mamba3.train.step_cache import BOUND, RECORDERS, WARM_UP, CachedStep

VOCAB = 19


def model_of(dtype=torch.float64, **options):
    sizes = {"vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "d_state": 6, "headdim": 8}
    model = Mamba3LM(Mamba3Config(**sizes, d_intermediate=12, **options), device=DEVICE)
    return randomise(model, scale=0.3).to(dtype)


def batch_of(rows=5, length=9, seed=0):
    """Rows with answers of different lengths; one has none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    for i in range(rows):
        labels[i, : 2 + i] = IGNORE
    labels[-1] = IGNORE
    return Batch(ids, labels, ids.numel())


def optimizer_of(model, **options):
    return HybridOptimizer(model, lr=0.01, dtype=torch.float32, **options)


def by_hand(model, batch, clip):
    """Loss and norm of a step, by torch's own loss of all logits."""
    model.zero_grad()
    optimizer = optimizer_of(model)
    logits = model(batch.input_ids.to(DEVICE)).logits[:, :-1].flatten(0, 1)
    targets = batch.labels[:, 1:].flatten().to(DEVICE)
    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss, norm


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5, 8])
def test_a_step_in_parts_is_that_of_the_whole_batch(accumulate):
    mine, plain = model_of(), model_of()
    for clip in (0.05, 100.0):
        batch = batch_of(seed=int(clip))
        step = TrainStep(mine, optimizer_of(mine), grad_clip=clip, accumulate=accumulate)
        output = step(batch)
        loss, norm = by_hand(plain, batch, clip)
        assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
        assert output.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert clip == 100.0 or norm > clip
    assert_close(dict(mine.named_parameters()), dict(plain.named_parameters()), 1e-6)


def test_packed_documents_are_steps_of_their_own():
    """Packed rows in two parts against the documents side by side, with their pads."""
    batch, generator = batch_of(rows=6, length=5), torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 6, (6,), generator=generator).tolist()
    packed = torch.zeros(3, 3, 10, dtype=torch.int64)  # ids, labels and documents of three rows
    packed[1] = IGNORE
    packed[2] = -1
    separate = Batch(batch.input_ids.clone(), batch.input_ids.clone(), 0)
    for i, n in enumerate(lengths):
        row, start = i // 2, lengths[i - 1] if i % 2 else 0
        separate.labels[i, n:] = IGNORE
        packed[0, row, start : start + n] = separate.input_ids[i, :n]
        packed[1, row, start : start + n] = separate.labels[i, :n]
        packed[2, row, start : start + n] = i
    outputs, models = [], []
    for given, accumulate in ((separate, 1), (Batch(packed[0], packed[1], 0, packed[2]), 2)):
        models.append(model_of())
        step = TrainStep(models[-1], optimizer_of(models[-1]), accumulate=accumulate)
        outputs.append(step(given))
    assert outputs[0].loss.item() == pytest.approx(outputs[1].loss.item(), rel=1e-6)
    assert_close(*(dict(model.named_parameters()) for model in models), 1e-6)


def test_a_batch_without_a_scored_token_changes_nothing():
    model = model_of()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = batch_of()
    optimizer = optimizer_of(model)
    output = TrainStep(model, optimizer)(batch._replace(labels=torch.full((5, 9), IGNORE)))
    assert math.isnan(output.loss.item())
    assert optimizer.skipped_steps == 1
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("bf16", 0.03), ("fp16", 0.004), ("bf16-weights", 0.03)]
)
def test_half_precision_is_near_float32(precision, tolerance):
    """Gradients of every parameter, weights that stay what they are, and a loss that falls."""
    half = precision == "bf16-weights"
    plain = model_of(torch.float32)
    model = copy.deepcopy(plain).to(torch.bfloat16) if half else copy.deepcopy(plain)
    if half:
        plain.load_state_dict(model.state_dict())
    dtypes = [p.dtype for p in model.parameters()]
    optimizer = optimizer_of(model, extra_bits=half)
    step = TrainStep(model, optimizer, precision=precision, grad_clip=1e9)
    expected = TrainStep(plain, optimizer_of(plain), grad_clip=1e9)
    batch = batch_of()
    got, true = step(batch), expected(batch)
    assert got.loss.dtype == torch.float32
    assert got.loss.item() == pytest.approx(true.loss.item(), rel=tolerance)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad.float() - q.grad).norm() < tolerance * 2 * q.grad.norm(), name
    losses = [step(batch).loss.item() for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    assert [p.dtype for p in model.parameters()] == dtypes


def test_the_loss_scale_backs_off_grows_and_goes_on():
    scaler = LossScaler(torch.device(DEVICE), initial=8.0, interval=3)
    yes, no = (torch.tensor(value, device=DEVICE) for value in (True, False))
    seen = []
    for finite in (no, yes, yes, no, yes, yes, yes, yes):
        scaler.update(finite)
        seen.append(scaler.scale.item())
    assert seen == [4, 4, 4, 2, 2, 2, 4, 4]
    other = LossScaler(torch.device(DEVICE), interval=3)
    other.load_state_dict(scaler.state_dict())
    for _ in range(2):
        other.update(yes)
    assert other.scale.item() == 8
    for _ in range(40):
        other.update(no)
    assert other.scale.item() == 1


def test_an_overflow_in_float16_leaves_the_step_out():
    model = model_of(torch.float32)
    optimizer = optimizer_of(model)
    step = TrainStep(model, optimizer, precision="fp16")
    step.scaler.scale.fill_(2.0**24)
    batch, scales = batch_of(), []
    before = model.lm_head.weight.detach().clone()
    for _ in range(12):
        step(batch)
        scales.append(math.log2(step.scaler.scale.item()))
        if optimizer.skipped_steps == len(scales):
            assert torch.equal(model.lm_head.weight, before)
    skipped = optimizer.skipped_steps
    assert 0 < skipped < 12
    assert scales == [24 - min(i, skipped) for i in range(1, 13)]
    assert not torch.equal(model.lm_head.weight, before)


# packed rows


def packed_batch(seed=0):
    """Two rows of 12 tokens, of five and three documents."""
    batch = batch_of(rows=2, length=12, seed=seed)
    numbers = [[0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]]
    return batch._replace(labels=batch.input_ids, seq_idx=torch.tensor(numbers))


def test_packed_rows_are_one_with_room_for_more_documents():
    batch = packed_batch()
    [part], _ = split(batch)
    assert part.cu_seqlens.tolist() == [0, 3, 4, 8, 10, 12, 17, 22, *[24] * 9]
    assert part.input_ids.tolist() == part.labels.tolist() == [batch.input_ids.flatten().tolist()]
    rows = [0, 3, 4, 8, 10], [0, 5, 10]
    for row, part in zip(rows, split(batch, accumulate=2).parts, strict=True):
        assert part.cu_seqlens.tolist() == [*row, *[12] * (9 - len(row))]
    many = torch.arange(12).expand(2, 12)
    assert len(split(batch._replace(seq_idx=many)).parts[0].cu_seqlens) == 33


def test_packed_rows_ask_the_host_for_nothing(monkeypatch):
    """On the kernels, as where a step is recorded: the same loss and gradients to the last bit."""
    config = Mamba3Config(vocab_size=VOCAB, d_model=8, n_layer=1, d_state=6, headdim=16)
    model = randomise(Mamba3LM(config, device=DEVICE), scale=0.3)
    (part, _), _ = split(packed_batch(), accumulate=2)
    inputs = {name: t.to(DEVICE) for name, t in part.inputs.items()}

    def found():
        model.zero_grad()
        with ops.use_backend("triton"):
            loss = model(**inputs, return_logits=False).loss
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    wanted = found()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[ops.mamba3_scan.__module__], "capturing", lambda device: True)
        for name in ("tolist", "item", "nonzero", "__bool__"):
            patch.setattr(torch.Tensor, name, None)
        got = found()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# recorded steps


class Recorder:
    """Stands in for CUDA graphs where there is no GPU; counts in any case."""

    def __init__(self):
        self.recorded = self.replayed = 0
        self.record = RECORDERS.get(DEVICE, (lambda function, device, pool: function, object))

    def __call__(self, function, device, pool):
        self.recorded += 1
        replay = self.record[0](function, device, pool=pool)

        def counting():
            self.replayed += 1
            return replay()

        return counting


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(RECORDERS, DEVICE, (recorder, recorder.record[1]))
    return recorder


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16", "bf16-weights"])
def test_recorded_steps_are_the_steps(recorder, precision):
    """Every bit of losses, norms and weights, over shapes that change and numbers that change."""
    models, outputs = [], []
    for cached in (False, True):
        half = precision == "bf16-weights"
        model = model_of(torch.bfloat16 if half else torch.float32)
        optimizer = HybridOptimizer(model, lr=0.01, extra_bits=half)
        step = TrainStep(model, optimizer, precision=precision, accumulate=2)
        make, found = CachedStep(step) if cached else step, []
        for i in range(12):
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = 0.01 / (i + 1), 0.1 * i
            batch = batch_of(length=(9, 9, 6)[i % 3], seed=i)
            found += [t.clone() for t in make(batch)]
        models.append(model)
        outputs.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert_same_weights(*models)
    assert recorder.recorded == 2
    assert recorder.replayed == 12 - 2 * WARM_UP


def assert_same_weights(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_what_a_step_depends_on_is_recorded_anew(recorder, monkeypatch):
    model = model_of(torch.float32)
    optimizer = HybridOptimizer(model, lr=0.01)
    step = TrainStep(model, optimizer)
    make = CachedStep(step)

    def steps_recorded(batch):
        before = recorder.recorded
        for _ in range(WARM_UP + 2):
            make(batch)
        return recorder.recorded - before

    assert steps_recorded(batch_of()) == 1
    assert steps_recorded(batch_of(seed=3)) == 0
    assert steps_recorded(batch_of(length=8)) == 1
    assert steps_recorded(batch_of()) == 0  # the first is still there
    model.backbone.embedding.weight.requires_grad_(False)
    assert steps_recorded(batch_of()) == 1
    model.eval()
    assert steps_recorded(batch_of()) == 1
    step.grad_clip = 0.5
    assert steps_recorded(batch_of()) == 1
    optimizer.param_groups[1]["betas"] = (0.8, 0.9)
    assert steps_recorded(batch_of()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(step_cache, "backend", lambda device: "another")
        assert steps_recorded(batch_of()) == 1
    for length in range(10, 10 + BOUND):
        assert steps_recorded(batch_of(length=length)) == 1
    assert len(make._recorded) == BOUND
    optimizer.param_groups[1]["betas"] = (0.8, 0.9)
    assert steps_recorded(batch_of()) == 1  # it had to go


def test_what_cannot_be_recorded_runs_and_is_said_once(monkeypatch, caplog):
    def fail(function, device, pool):
        if DEVICE == "cuda":  # with a real one under way
            record(lambda: torch.ones(3, device=device).sum().item(), device, pool=pool())
        raise RuntimeError("no graph today")

    monkeypatch.setitem(RECORDERS, DEVICE, (fail, lambda: torch.cuda.graph_pool_handle))
    plain, cached = model_of(torch.float32), model_of(torch.float32)
    a = TrainStep(plain, HybridOptimizer(plain, lr=0.01))
    b = CachedStep(TrainStep(cached, HybridOptimizer(cached, lr=0.01)))
    with caplog.at_level(logging.WARNING):
        for i in range(WARM_UP + 3):
            a(batch_of(seed=i))
            b(batch_of(seed=i))
    assert_same_weights(plain, cached)
    [record] = caplog.records
    assert "recording one failed with" in record.getMessage()
    assert record.name == step_cache.__name__
    torch.rand(3, device=DEVICE)  # the generator knows that it is over
