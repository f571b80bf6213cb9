"""Faults put into a model, a batch or a pass are found where they were put, and nothing changes."""

import datetime
import math

import pytest
import torch
import torch.distributed as dist
from compare import DEVICE, randomise
from ranks import spawn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data.problems import Batch
from mamba3.models.lm import IGNORE
from mamba3.optim import HybridOptimizer
from mamba3.train.nonfinite import first_nonfinite
from mamba3.train.parallel import Ranks
from mamba3.train.step import TrainStep

VOCAB = 19


def step_of(model=None, **options):
    model = model or model_of()
    return TrainStep(model, HybridOptimizer(model, lr=0.01, dtype=torch.float32), **options)


def model_of(device=DEVICE):
    sizes = {"vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "d_state": 6, "headdim": 8}
    model = Mamba3LM(Mamba3Config(**sizes, d_intermediate=12, mlp_multiple=1), device=device)
    return randomise(model, scale=0.3)


def batch_of(rows=6, length=9):
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:3, :4] = IGNORE
    return Batch(ids, labels, ids.numel())


def layer_of(step, i):
    return step.model.backbone.layers[i]


def draw(monkeypatch, module):
    """Let a module draw a random number in its forward pass, as dropout would."""
    forward = module.forward
    monkeypatch.setattr(module, "forward", lambda x: forward(x) + 0 * torch.rand(()).item())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_nothing_is_found_and_nothing_changes(accumulate, recompute, monkeypatch):
    step, batch = step_of(accumulate=accumulate), batch_of()
    step.model.backbone.recompute = recompute
    step.model.train()
    layer_of(step, 0).eval()
    step(batch)
    weights = {name: t.clone() for name, t in step.model.state_dict().items()}
    gradients = [p.grad for p in step.model.parameters()]
    values = [t.clone() for t in gradients]
    draw(monkeypatch, step.model.backbone.norm_f)
    rng = torch.get_rng_state()
    assert first_nonfinite(step, batch) is None
    assert all(torch.equal(t, weights[name]) for name, t in step.model.state_dict().items())
    for p, gradient, value in zip(step.model.parameters(), gradients, values, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, value)
        assert not p._backward_hooks
    assert torch.equal(torch.get_rng_state(), rng)
    assert (step.model.training, layer_of(step, 0).training) == (True, False)


def test_a_step_that_had_no_gradients_has_none_after():
    step = step_of()
    layer_of(step, 1).mlp.fc1.weight.data.fill_(3e38)
    assert first_nonfinite(step, batch_of()) is not None
    assert all(p.grad is None for p in step.model.parameters())
    layer_of(step, 1).mlp.fc1.weight.data.fill_(0.1)
    assert first_nonfinite(step, batch_of()) is None
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_a_weight():
    step = step_of()
    layer_of(step, 0).mlp.fc2.weight.data[3, 2:4] = math.inf
    layer_of(step, 1).mixer.D.data[0] = math.nan
    rows, columns = layer_of(step, 0).mlp.fc2.weight.shape
    expected = f"weight backbone.layers.0.mlp.fc2.weight (2 of {rows * columns} values)"
    assert first_nonfinite(step, batch_of()) == expected
    layer_of(step, 0).mlp.fc2.weight.data.fill_(0.1)
    found = first_nonfinite(step, batch_of())
    assert found == "weight backbone.layers.1.mixer.D (1 of 4 values)"


def test_the_output_of_a_module():
    step = step_of()
    layer_of(step, 1).norm2.weight.data.fill_(1e6)
    layer_of(step, 1).mlp.fc1.weight.data[5] = 0
    layer_of(step, 1).mlp.fc1.weight.data[5, 0] = 3e38  # which is finite
    found = first_nonfinite(step, batch_of())
    assert found == f"output of backbone.layers.1.mlp.fc1 (54 of {54 * 24} values)"
    layer_of(step, 0).mixer.out_proj.weight.data.fill_(3e38)
    found = first_nonfinite(step, batch_of())
    assert found.startswith("output of backbone.layers.0.mixer.out_proj (")


def test_what_is_made_between_modules():
    """The scan is no module: what it gives is out_proj's input."""
    step = step_of()
    layer_of(step, 1).mixer.D.data.fill_(3e38)
    found = first_nonfinite(step, batch_of())
    assert found.startswith("input of backbone.layers.1.mixer.out_proj (")


def test_the_loss():
    step = step_of()
    step.model.lm_head.weight = torch.nn.Parameter(torch.full((32, 16), 3e38, device=DEVICE))
    assert first_nonfinite(step, batch_of()) == "loss (1 of 1 values)"


def spoil(monkeypatch, module, change, calls=None):
    """Pass what a module gives, in these calls of it or in all, through a function."""
    forward, count = module.forward, iter(range(1000))

    def spoilt(*args, **options):
        output = forward(*args, **options)
        return change(output) if calls is None or next(count) in calls else output

    monkeypatch.setattr(module, "forward", spoilt)


def spoilt_gradient(t):
    t = t * 1
    t.register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor([0], device=t.device), math.nan)
    )
    return t


def test_a_gradient_in_the_order_of_the_backward_pass(monkeypatch):
    step = step_of()
    spoil(monkeypatch, layer_of(step, 1).mlp, spoilt_gradient)
    found = first_nonfinite(step, batch_of())
    assert found == f"gradient of backbone.layers.1.mlp.fc2.weight ({16 * 12} of {16 * 12} values)"
    spoil(monkeypatch, step.model.backbone.norm_f, spoilt_gradient)
    found = first_nonfinite(step, batch_of())
    assert found == "gradient of backbone.norm_f.weight (16 of 16 values)"


def test_the_part_of_a_batch(monkeypatch):
    step = step_of(accumulate=3)
    spoil(monkeypatch, layer_of(step, 0).mixer, lambda output: (output[0] * math.nan, output[1])
          if isinstance(output, tuple) else output * math.nan, calls=[1])  # fmt: skip
    found = first_nonfinite(step, batch_of())
    assert found == "output of backbone.layers.0.mixer (288 of 288 values) in part 2 of 3"


def test_float16_says_what_an_overflow_of_scaled_gradients_is():
    step = step_of(precision="fp16")
    step.scaler.scale.fill_(2.0**24)
    found = first_nonfinite(step, batch_of())
    assert found.startswith("gradient of ")
    assert "of the loss times 1.67772e+07, which in float16 overflows now and then" in found
    assert step.scaler.scale == 2.0**24
    step.scaler.scale.fill_(1.0)
    assert first_nonfinite(step, batch_of()) is None
    layer_of(step, 1).mlp.fc1.weight.data[5] = 3e4
    assert first_nonfinite(step, batch_of()).startswith("output of backbone.layers.1.mlp.fc1 (")


def test_what_is_gone_through_is_the_step(monkeypatch):
    """The gradients on the way are the step's own, as it scales and shares them."""
    step, batch = step_of(precision="fp16", accumulate=3), batch_of()
    step.scaler.scale.fill_(512.0)
    step.optimizer.param_groups[0]["lr"] = step.optimizer.param_groups[1]["lr"] = 0.0
    gradients = []

    def watched(t):
        t.register_hook(gradients.append)
        return t

    spoil(monkeypatch, step.model.backbone.norm_f, watched)
    step(batch)
    assert first_nonfinite(step, batch) is None
    assert len(gradients) == 6
    for mine, own in zip(gradients[3:], gradients[:3], strict=True):
        assert torch.equal(mine, own)


def test_the_batch():
    step, batch = step_of(), batch_of()
    unscored = batch._replace(labels=torch.full_like(batch.labels, IGNORE))
    assert first_nonfinite(step, unscored).startswith("batch: no token of it is scored")
    alone = batch._replace(seq_idx=torch.arange(9).expand(6, 9))  # every token a document
    assert first_nonfinite(step, alone).startswith("batch: no token of it is scored")
    for name, wrong in (("input_ids", 19), ("input_ids", IGNORE), ("labels", -1)):
        ids = getattr(batch, name).clone()
        ids[2, 3] = wrong
        expected = f"batch: {name} hold {wrong}, and the model knows tokens from 0 to 18"
        assert first_nonfinite(step, batch._replace(**{name: ids})) == expected


def start_ranks(rank, world, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip


def test_next_to_distributed_data_parallel(tmp_path):
    """It stays out of the exchange of gradients, which goes on after."""
    start_ranks(0, 1, tmp_path)
    try:
        step, batch = step_of(model_of("cpu")), batch_of()
        forward = DistributedDataParallel(step.model, gradient_as_bucket_view=True)
        seen = []
        for _ in range(3):
            step.model.zero_grad()
            forward(batch.input_ids, labels=batch.labels, return_logits=False).loss.backward()
            seen.append([p.grad.clone() for p in step.model.parameters()])
            assert first_nonfinite(step, batch) is None
            for p, gradient in zip(step.model.parameters(), seen[0], strict=True):
                assert torch.equal(p.grad, gradient)
        assert len(seen) == 3
    finally:
        dist.destroy_process_group()


def spread_weights(rank, folder):
    torch.set_num_threads(1)
    start_ranks(rank, 2, folder)
    model = model_of("cpu")
    for block in model.backbone.layers:
        fully_shard(block)
    fully_shard(model)
    step = step_of(model)
    step.ranks = Ranks(rank, 2)
    assert first_nonfinite(step, batch_of()) is None
    # On one rank alone, which must not leave the other one waiting.
    mixer = model.backbone.layers[0].mixer
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            spoil(patch, mixer.out_proj, lambda output: output * math.nan)
        found = first_nonfinite(step, batch_of())
    if rank == 1:
        expected = f"output of backbone.layers.0.mixer.out_proj ({27 * 16} of {27 * 16} values)"
        assert found == expected
    else:  # where gradients are of both
        assert found.startswith("gradient of backbone.")
    with torch.no_grad():
        mine = mixer.dt_bias.to_local()
        if rank == 1:
            mine.fill_(math.nan)
    found = first_nonfinite(step, batch_of())
    if rank == 1:
        assert found == "weight backbone.layers.0.mixer.dt_bias (2 of 2 values)"
    else:
        assert found.startswith("input of backbone.layers.0.mixer.out_proj (")
    assert all(p.grad is None for p in model.parameters())
    dist.destroy_process_group()


def test_spread_weights(tmp_path):
    spawn(spread_weights, (str(tmp_path),), 2)
