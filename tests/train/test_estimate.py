import dataclasses
from unittest import mock

import pytest
import torch

from mamba3 import Mamba3Config, Mamba3LM, cli, zoo
from mamba3.ops import use_backend
from mamba3.train import Recipe, load_recipe
from mamba3.train import step as train_step
from mamba3.train.config import OptimRecipe, StepRecipe
from mamba3.train.estimate import (
    BATCHES,
    estimate,
    estimate_step,
    measure_step,
    measured,
    rows_that_fit,
)
from mamba3.train.loop import make_step
from mamba3.train.rehearsal import CUBLAS_BYTES, GRANULE, Account, rehearse
from mamba3.train.step import Part
from mamba3.train.tasks import task_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter would take minutes.
BACKENDS = ["torch", "triton"] if DEVICE == "cuda" else ["torch"]

SMALL = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "headdim": 16, "d_state": 16}
FORMS = {
    "siso": {"d_intermediate": 48},
    "mimo": {"d_intermediate": 48, "is_mimo": True, "mimo_rank": 2},
    "hybrid": {"layers": ["mamba", "mamba3"], "mamba": {"d_state": 4}},
}
BIG = {"vocab_size": 128256, "d_model": 768, "n_layer": 12, "headdim": 64, "d_state": 128}
BIG_FORMS = {
    "siso": {"d_intermediate": 1536},
    "mimo": {"d_intermediate": 1280, "is_mimo": True, "mimo_rank": 4},
}
# Peaks in GB of 8 rows of 2048 tokens, by scripts/bench_training.py on one H200, 2026-11-30.
MEASURED = [
    ("siso", "adamw", {}, 22.6),
    ("siso", "adamw", {"precision": "bf16"}, 13.4),
    ("siso", "hybrid", {"precision": "bf16"}, 13.1),
    ("siso", "adamw", {"precision": "bf16-weights"}, 13.0),
    ("siso", "adamw", {"precision": "bf16", "recompute": "selective"}, 8.2),
    ("siso", "adamw", {"precision": "bf16", "recompute": "full"}, 5.0),
    ("mimo", "adamw", {"precision": "bf16"}, 19.7),
    ("mimo", "adamw", {"precision": "bf16", "recompute": "full"}, 5.4),
]


@pytest.mark.parametrize(("form", "optimizer", "how", "gigabytes"), MEASURED)
def test_estimates_are_near_what_was_measured(form, optimizer, how, gigabytes):
    found = estimate_step(
        Mamba3Config(**BIG, **BIG_FORMS[form]),
        8,
        2048,
        OptimRecipe(lr=1e-4, name=optimizer),
        StepRecipe(**how),
    )
    assert found.total / 1e9 == pytest.approx(gigabytes, rel=0.15)


def small(form="siso"):
    return Mamba3Config(**SMALL, **FORMS[form])


def small_step(how=None, rows=4, length=24, optimizer="adamw", form="siso", **options):
    optim = OptimRecipe(lr=1e-3, name=optimizer)
    return estimate_step(small(form), rows, length, optim, StepRecipe(**(how or {})), **options)


def token_recipe():
    """Rows of a known length and vocabulary, so that no file need be there."""
    return Recipe.from_dict(
        {
            "model": {**SMALL, **FORMS["siso"]},
            "data": {"kind": "tokens", "path": "missing/corpus", "length": 24, "batch_size": 4},
            "optim": {"lr": 1e-3},
            "train": {"steps": 1},
        }
    )


def real_peak(config, optim, how, rows, length):
    """The most that the storages of a real step take, made where the tests run."""
    account = Account(DEVICE)
    with account, mock.patch.object(train_step, "record_function", account.range):
        step = make_step(Mamba3LM(config, device=DEVICE), optim, how)
        step.optimizer.skip_nonfinite = False
        ids = torch.zeros(rows, length, dtype=torch.int64, device=DEVICE)
        parts = [Part(ids, ids.clone(), torch.ones((), device=DEVICE), None)]
        step.model.train()
        step.optimizer.advance()
        account.start_peak()
        step.run(parts)
    return account.peak


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("form", "precision", "recompute", "vocab_size"),
    [
        ("siso", "float32", "none", 64),
        ("mimo", "bf16", "none", 64),
        ("siso", "bf16", "selective", 64),
        ("mimo", "bf16", "full", 64),
        ("siso", "fp16", "full", 4096),  # so many logits that their chunk is the peak
        ("siso", "bf16-weights", "none", 64),
        ("hybrid", "bf16", "none", 64),
        ("hybrid", "float32", "full", 64),
    ],
)
def test_a_rehearsal_has_the_peak_of_a_real_step(form, precision, recompute, vocab_size, backend):
    config = dataclasses.replace(small(form), vocab_size=vocab_size)
    how, optim = StepRecipe(precision=precision, recompute=recompute), OptimRecipe(lr=1e-3)
    rows = (2, 480 if vocab_size == 4096 else 48)
    with use_backend(backend):
        real = real_peak(config, optim, how, *rows)
        rehearsed = rehearse(lambda: make_step(Mamba3LM(config, device="meta"), optim, how), [rows])
    assert rehearsed.peak_phase == ("forward" if vocab_size == 4096 else "backward")
    # The host's own count of skipped steps, on a CPU; tables of the kernels' launches, on a GPU.
    few = GRANULE if DEVICE == "cpu" else 0.05 * real
    assert abs(real - rehearsed.peak) <= few


def rounded(tensors):
    return sum(-(-t.nbytes // GRANULE) * GRANULE for t in tensors)


@pytest.mark.parametrize(
    ("optimizer", "precision", "state_bytes"),
    [
        ("adamw", "float32", 8),  # both averages
        ("adamw", "bf16-weights", 10),  # and the 16 bits that weights lack
        ("hybrid", "float32", 4),  # momentum
        ("anvil", "float32", 8),  # two rails
    ],
)
def test_weights_and_state_are_counted(optimizer, precision, state_bytes):
    # One matrix makes nearly all of the state: what is rounded up, and tables, are little of it.
    config = Mamba3Config(vocab_size=16, d_model=64, n_layer=1, headdim=16, d_state=16,
                          d_intermediate=4096)  # fmt: skip
    how = StepRecipe(precision=precision)
    model = Mamba3LM(config)
    model = model.to(torch.bfloat16) if precision == "bf16-weights" else model
    account = rehearse(
        lambda: make_step(
            Mamba3LM(config, device="meta"), OptimRecipe(lr=1e-3, name=optimizer), how
        ),
        [(2, 8)],
    )
    sizes = {phase: sum(s.nbytes for s in account.at_peak if s.phase == phase)
             for phase in ("model", "optimizer state")}  # fmt: skip
    assert sizes["model"] == rounded(model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    assert sizes["optimizer state"] == pytest.approx(state_bytes * numel, rel=0.02)


def test_the_parts_sum_up_to_the_total():
    found = small_step({"precision": "bf16"})
    parts = found[:6]
    assert found.total == sum(parts)
    assert min(parts) >= 0
    assert found.weights == rounded(Mamba3LM(small()).parameters())
    assert found.workspace > CUBLAS_BYTES
    assert found.recorded == found.total - found.weights - found.optimizer
    assert small_step({"cache_steps": False}).recorded == 0


def test_recomputation_and_parts_keep_less():
    whole = small_step()
    again = small_step({"recompute": "full"})
    assert again.kept < 0.3 * whole.kept
    assert small_step({"recompute": "selective"}).kept < whole.kept
    halves = small_step({"accumulate": 2})
    assert halves.kept == pytest.approx(whole.kept / 2, rel=0.1)
    assert small_step({"accumulate": 9}).kept == small_step({"accumulate": 4}).kept


def test_ranks_share_the_rows_and_keep_gradients_in_buckets():
    alone, shared = small_step(rows=3), small_step(rows=5, world=2)
    assert shared.rows == 3
    assert shared.gradients == alone.weights
    assert shared.kept == alone.kept


def test_what_cannot_be_told_is_said():
    with pytest.raises(ValueError, match="3 rows cannot be shared by 4 ranks"):
        small_step(rows=3, world=4)
    with pytest.raises(ValueError, match=r"no estimate for step\.parallel=fsdp on 2 ranks"):
        small_step({"parallel": "fsdp"}, world=2)
    assert small_step({"parallel": "fsdp"}) == small_step()


def test_the_rows_that_fit_are_the_most_that_do():
    recipe = token_recipe()
    memory = small_step(rows=5).total
    assert rows_that_fit(recipe, memory) == 5
    assert rows_that_fit(recipe, memory - GRANULE) == 4
    assert rows_that_fit(recipe, CUBLAS_BYTES) == 0


def test_a_rehearsal_leaves_nothing_replaced():
    config, optim, how = small(), OptimRecipe(lr=1e-3), StepRecipe(precision="bf16")
    watched = (torch.autocast, torch.is_autocast_enabled, torch.amp.autocast, torch.cuda.device,
               torch.nn.functional.linear, train_step.record_function)  # fmt: skip

    def loss():
        torch.manual_seed(0)
        model = Mamba3LM(config, device=DEVICE)
        ids = torch.arange(48, device=DEVICE).view(2, 24)
        return model(ids, labels=ids, return_logits=False).loss.item()

    before = loss()
    estimate_step(config, 2, 24, optim, how)
    assert watched == (torch.autocast, torch.is_autocast_enabled, torch.amp.autocast,
                       torch.cuda.device, torch.nn.functional.linear,
                       train_step.record_function)  # fmt: skip
    assert not torch.empty(1, device="meta").is_cuda
    assert loss() == before


def test_the_longest_batch_of_a_recipe_is_taken(make_recipe):
    recipe = make_recipe()
    task = task_of(recipe)
    longest = max(task.stream()(i).input_ids.shape[1] for i in range(BATCHES))
    found = estimate(recipe)
    assert (found.rows, found.length) == (8, longest)
    config = recipe.architecture(task.vocab_size)
    assert found == estimate_step(config, 8, longest, recipe.optim, recipe.step)


@pytest.mark.parametrize(("steps", "grow_batches"), [(100, 64), (100, 1000), (3, 1000)])
def test_the_longest_batch_is_taken_where_problems_grow(make_recipe, steps, grow_batches):
    grows = {"symbols": 8, "grow_to": 200, "grow_batches": grow_batches}
    changes = {f"data.{name}": value for name, value in ({"stages": [6]} | grows).items()}
    recipe = make_recipe(changes | {"train.steps": steps})
    stream = task_of(recipe).stream()
    lengths = [stream(i).input_ids.shape[1] for i in range(steps)]
    assert (max(lengths[:BATCHES]) < max(lengths)) == (steps > BATCHES)
    assert estimate(recipe).length == max(lengths)


def test_no_file_is_read_for_rows_of_a_known_length_and_vocabulary():
    assert estimate(token_recipe()) == small_step()


def test_a_model_to_start_from_gives_the_architecture():
    recipe = Recipe.from_dict(
        {"optim": {"lr": 1e-3}, "train": {"steps": 1, "init_from": "arithmetic-tiny"}}
    )
    assert estimate(recipe).weights == rounded(zoo.load_model("arithmetic-tiny").parameters())


def test_info_shows_the_memory_of_a_recipe(capsys):
    changes = ["data.batch_size=4", "data.eval_problems=8"]
    found = estimate(load_recipe("configs/debug.yaml", changes))
    options = ["--config", "configs/debug.yaml", "--fit", str(found.total / 1e9), "--set", *changes]
    assert cli.main(["info", "--memory", *options]) == 0
    shown = capsys.readouterr().out
    assert str(found) in shown
    assert f"total, 4 x {found.length} tokens" in shown
    assert "data.batch_size of 4 is the largest" in shown
    assert cli.main(["info", "--memory"]) == 2
    assert "--config" in capsys.readouterr().err
    assert cli.main(["info"]) == 2
    assert "NAME_OR_PATH" in capsys.readouterr().err


def test_a_gpu_is_measured_and_nothing_else(make_recipe):
    config = Mamba3Config(vocab_size=4096, d_model=256, n_layer=4, headdim=64, d_state=64)
    optim, how = OptimRecipe(lr=1e-3), StepRecipe(precision="bf16")
    if DEVICE == "cuda":
        peak = measure_step(config, 16, 1024, optim, how)
        assert peak == pytest.approx(estimate_step(config, 16, 1024, optim, how).total, rel=0.15)
    else:
        with pytest.raises(RuntimeError, match="there is none"):
            measure_step(config, 16, 1024, optim, how)
        with pytest.raises(RuntimeError, match="there is none"):
            measured(make_recipe())
