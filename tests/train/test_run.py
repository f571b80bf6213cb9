import dataclasses
import functools
import itertools
import logging
import math
import random
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from mamba3 import Mamba3LM
from mamba3.data import arithmetic
from mamba3.eval import skill
from mamba3.eval.exact_match import exact_match
from mamba3.train import loop, train
from mamba3.train.checkpoint import Checkpoints, check_same_recipe
from mamba3.train.config import load_recipe
from mamba3.train.signals import StopSignals
from mamba3.train.tensor_files import read_tensors


@pytest.fixture
def whole_run(make_recipe, tmp_path):
    """20 steps in one go."""
    out = tmp_path / "whole"
    train(make_recipe(), out, progress=False)
    return out


def assert_same_run(out, whole, read_metrics):
    """Same losses, weights, optimizer and random state, to the last bit."""
    assert read_metrics(out, training=True) == read_metrics(whole, training=True)
    weights, expected = (load_file(o / "model.safetensors") for o in (out, whole))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    state, expected = (read_tensors(last_state(o).folder) for o in (out, whole))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def last_state(out):
    return Checkpoints(out).load()


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Stop(Exception):
    """Stands for whatever ends a process."""


def stop_at(monkeypatch, step):
    """Make `train` break off in the middle of a step."""

    def learning_rate(index, optim, original=loop.learning_rate):
        if index == step - 1:
            raise Stop
        return original(index, optim)

    monkeypatch.setattr(loop, "learning_rate", learning_rate)


def test_the_first_losses_are_those_of_the_seed(make_recipe, tmp_path, read_metrics):
    recipe = make_recipe({"train.steps": 1, "train.seed": 3})
    result = train(recipe, tmp_path / "run", progress=False)
    torch.manual_seed(3)
    model = Mamba3LM(recipe.architecture(32))
    batches = arithmetic.CurriculumStream([1, 2], arithmetic.tokenizer(), batch_size=8, seed=3)
    batch = batches(0)
    loss = model(batch.input_ids, labels=batch.labels, return_logits=False).loss
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    line = read_metrics(tmp_path / "run")[0]
    assert line["step"] == 1
    assert line["loss"] == result.loss == loss.item()  # every digit
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert line["lr"] == pytest.approx(0.01 / 3)


def test_what_a_run_leaves(make_recipe, tmp_path, read_metrics):
    recipe = make_recipe({"train.eval_every": 8})
    out = tmp_path / "new" / "run"
    result = train(recipe, out, progress=False)
    lines = read_metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21))
    evaluations = [line for line in lines if "exact_match" in line]
    assert [line["step"] for line in evaluations] == [5, 8, 10, 15, 16, 20]

    model = Mamba3LM.from_pretrained(out)
    problems = arithmetic.eval_problems(1, 8) + arithmetic.eval_problems(2, 1)
    measured = exact_match(
        model, arithmetic.tokenizer(), problems, chance={}, well_formed=arithmetic.well_formed
    )
    assert result.after.exact_match == measured
    assert evaluations[-1]["exact_match"] == measured.overall
    assert (result.steps, measured.n, result.before) == (20, 208, None)
    assert result.loss == lines[-2]["loss"]

    effective = load_recipe(out / "recipe.yaml")
    assert effective.architecture(32) == model.config
    assert dataclasses.replace(effective, model=recipe.model) == recipe
    assert not list(out.glob(".*"))


def test_the_card_holds_the_measured_numbers(make_recipe, tmp_path):
    result = train(make_recipe({"data.stages": [2]}), tmp_path / "run", progress=False)
    card = ModelCard.load(tmp_path / "run" / "README.md")
    told = {entry.dataset_config: entry.metric_value for entry in card.data.eval_results}
    exact = result.after.exact_match
    assert told == exact.per_task
    assert f"| all | 200 | {math.floor(exact.overall * 1e4) / 100:.2f} % |" in card.text
    assert "20 steps of 8 problems, seed 0" in card.text


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("adamw", "float32"), ("hybrid", "fp16"), ("anvil", "bf16-weights")],
)
def test_10_and_10_steps_are_20(make_recipe, tmp_path, read_metrics, optimizer, precision):
    out, whole = tmp_path / "halves", tmp_path / "whole"
    name = {"optim.name": optimizer, "step.precision": precision, "step.accumulate": 3}
    workers = {"data.workers": 2 if optimizer == "adamw" else 0}
    train(make_recipe(name), whole, progress=False)
    train(make_recipe(name | {"train.steps": 10}), out, progress=False)
    torch.rand(3)
    result = train(make_recipe(name | workers), out, resume=True, progress=False)
    assert result.steps == 20
    assert_same_run(out, whole, read_metrics)
    plain = last_state(out).plain
    assert any(name.startswith("scaler.") for name in plain) == (precision == "fp16")


def test_optimizers_are_those_of_the_recipe(make_recipe):
    for name, rules in (("adamw", {"adamw"}), ("hybrid", {"adamw", "muon"})):
        recipe = make_recipe({"optim.name": name, "optim.eps": 1e-5, "optim.weight_decay": 0.3})
        model = Mamba3LM(recipe.architecture(32))
        optimizer = loop.make_optimizer(model, recipe.optim)
        assert {piece.rule for piece in optimizer.engine.pieces} == rules
        assert optimizer.param_groups[0]["eps"] == 1e-5
        assert optimizer.param_groups[0]["weight_decay"] == 0.3
    recipe = make_recipe({"optim.name": "anvil", "optim.momentum": 0.9})
    anvil = loop.make_optimizer(model, recipe.optim)
    assert anvil.param_groups[0]["momentum"] == 0.9
    assert "slow" in anvil.state[model.backbone.layers[0].mixer.out_proj.weight]


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(
    make_recipe, tmp_path, whole_run, read_metrics, monkeypatch
):
    out = tmp_path / "broken"
    for step in (3, 14):  # before the first checkpoint of save_every=5, and after the second
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(Stop):
                train(make_recipe(), out, resume=step > 3, progress=False)
        assert read_metrics(out)[-1]["step"] == step - 1
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 14, "lo')  # a line that the end of the process cut off
    train(make_recipe(), out, resume=True, progress=False)
    assert_same_run(out, whole_run, read_metrics)


def test_a_killed_process_goes_on_from_its_last_checkpoint(
    make_recipe, tmp_path, whole_run, read_metrics
):
    out = tmp_path / "killed"
    (tmp_path / "recipe.yaml").write_text(make_recipe().to_yaml())
    code = """
import os, signal, sys
import torch
from mamba3.train import load_recipe, loop, train

def learning_rate(index, optim, original=loop.learning_rate):
    if index == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(index, optim)

torch.set_num_threads(1)
loop.learning_rate = learning_rate
train(load_recipe(sys.argv[1]), sys.argv[2], progress=False)
"""
    process = subprocess.run([sys.executable, "-c", code, tmp_path / "recipe.yaml", out])
    assert process.returncode == -signal.SIGKILL
    assert read_metrics(out)[-1]["step"] == 12
    train(make_recipe(), out, resume=True, progress=False)
    assert_same_run(out, whole_run, read_metrics)


def test_kills_at_any_time_lose_nothing(make_recipe, tmp_path, whole_run, read_metrics):
    """Killed after random times, in whatever it does then, and resumed until it is done."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(make_recipe({"train.save_every": 2}).to_yaml())
    code = """
import os, pathlib, signal, sys, threading, time
import torch
from mamba3.train import load_recipe, train

def kill():
    time.sleep(float(sys.argv[3]))
    os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
out = pathlib.Path(sys.argv[2])
resume = any(out.glob("checkpoints/step-*"))
threading.Thread(target=kill, daemon=True).start()
train(load_recipe(sys.argv[1]), out, resume=resume, overwrite=True, progress=False)
"""
    random.seed(0)
    kills = 0
    for number in range(10):
        out = tmp_path / f"killed-{number}"
        for longest in itertools.count(1):  # so that on a slow machine, too, it comes to an end
            delay = str(random.uniform(0.0, 0.3 * longest))
            command = [sys.executable, "-c", code, recipe, out, delay]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
            kills += 1
        assert [line["step"] for line in read_metrics(out, training=True)] == list(range(1, 21))
        assert_same_run(out, whole_run, read_metrics)
        if kills >= 5:
            return
    raise AssertionError(f"only {kills} kills came before the end of a run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_its_state_saved(
    make_recipe, tmp_path, whole_run, read_metrics, number
):
    out, recipe = tmp_path / "stopped", tmp_path / "recipe.yaml"
    recipe.write_text(make_recipe().to_yaml())
    code = f"""
import os, sys
import torch
from mamba3.cli import main
from mamba3.train import loop

def learning_rate(index, optim, original=loop.learning_rate):
    if index == 12:
        os.kill(os.getpid(), {int(number)})
    return original(index, optim)

torch.set_num_threads(1)
loop.learning_rate = learning_rate
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "train", str(recipe), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 128 + number
    last = done.stderr.splitlines()[-1]
    assert f"stopped by {number.name} after step 13; the state is saved in {out}" in last
    assert last_state(out).step == 13
    assert read_metrics(out)[-1]["step"] == 13
    before = signal.getsignal(number)
    train(make_recipe(), out, resume=True, progress=False)
    assert signal.getsignal(number) == before
    assert_same_run(out, whole_run, read_metrics)


def test_a_second_signal_does_not_wait():
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        signal.raise_signal(signal.SIGINT)


def test_resuming_a_finished_run_changes_nothing(make_recipe, whole_run):
    files = files_of(whole_run)
    result = train(make_recipe(), whole_run, resume=True, progress=False)
    assert result.steps == 20
    assert files_of(whole_run) == files


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lr", 0.02, r"optim\.lr \(the run: 0\.01, the recipe: 0\.02\)"),
        ("data.batch_size", 4, r"data\.batch_size \(the run: 8, the recipe: 4\)"),
        ("model.d_state", 16, r"model\.d_state \(the run: 8, the recipe: 16\)"),
        ("train.seed", 1, r"train\.seed \(the run: 0, the recipe: 1\)"),
        ("train.steps", 19, r"has made 20 steps already, and train\.steps is 19"),
    ],
)
def test_resuming_with_another_recipe_names_the_difference(
    make_recipe, whole_run, key, value, message
):
    files = files_of(whole_run)
    with pytest.raises(ValueError, match=message):
        train(make_recipe({key: value}), whole_run, resume=True, progress=False)
    assert files_of(whole_run) == files


def test_keys_that_a_run_did_not_have_yet_are_at_their_defaults(make_recipe):
    recipe = make_recipe().to_dict()
    old = recipe | {"optim": {k: v for k, v in recipe["optim"].items() if k != "split"}}
    check_same_recipe(old, recipe)
    changed = make_recipe({"optim.name": "hybrid", "optim.split": False}).to_dict()
    with pytest.raises(ValueError, match=r"optim\.split \(the run: True, the recipe: False\)"):
        check_same_recipe(old, changed)


def test_a_folder_in_use_is_refused(make_recipe, whole_run, tmp_path):
    with pytest.raises(FileExistsError, match=r"already holds .*resume the run in it"):
        train(make_recipe(), whole_run, progress=False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        train(make_recipe(), tmp_path / "file", progress=False)
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        train(make_recipe(), tmp_path / "nowhere", resume=True, progress=False)


def cut_off(state):
    """Cut the largest file of a state off."""
    largest = max(state.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])


def test_a_damaged_state_falls_back_to_the_one_before(
    make_recipe, whole_run, read_metrics, tmp_path, caplog
):
    out = tmp_path / "damaged"
    shutil.copytree(whole_run, out)
    newest, before = sorted((out / "checkpoints").iterdir(), reverse=True)
    cut_off(newest)
    with caplog.at_level(logging.WARNING):
        train(make_recipe(), out, resume=True, progress=False)
    assert "step-00000020 is damaged" in caplog.text
    assert "taking step-00000015" in caplog.text
    assert_same_run(out, whole_run, read_metrics)
    for folder in (newest, before):
        cut_off(folder)
    with pytest.raises(ValueError, match="step-00000015 is damaged"):
        train(make_recipe(), out, resume=True, progress=False)


def test_the_last_states_and_the_best_model_are_kept(make_recipe, tmp_path, monkeypatch):
    scores = iter([0.1, 0.5, 0.3, 0.5, 0.4])

    def measured(*args, original=skill.exact_match, **options):
        return original(*args, **options)._replace(overall=next(scores))

    monkeypatch.setattr(skill, "exact_match", measured)
    out = tmp_path / "run"
    recipe = make_recipe({"train.keep": 3, "train.save_every": 4, "data.stages": [2]})
    train(recipe, out, progress=False)
    kept = [path.name for path in sorted((out / "checkpoints").iterdir())]
    assert kept == [f"step-{step:08}" for step in (12, 16, 20)]
    assert last_state(out).best == {"step": 8, "score": 0.5}
    assert "8 steps of 8 problems" in (out / "best" / "README.md").read_text()
    best, last = (load_file(folder / "model.safetensors") for folder in (out / "best", out))
    assert not torch.equal(*(f["backbone.embedding.weight"] for f in (best, last)))
    assert "20 steps of 8 problems" in (out / "README.md").read_text()


def test_a_full_disk_leaves_the_checkpoint_before(
    make_recipe, tmp_path, whole_run, read_metrics, monkeypatch
):
    out = tmp_path / "full"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:

        def save(self, *args, original=Checkpoints.save, **values):
            if values["step"] == 10:  # from now on no file is written whole
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
            original(self, *args, **values)

        patch.setattr(Checkpoints, "save", save)
        try:
            with pytest.raises(OSError, match="could not"):
                train(make_recipe(), out, progress=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert last_state(out).step == 5
    assert not list((out / "checkpoints").glob(".*"))
    train(make_recipe(), out, resume=True, progress=False)
    assert_same_run(out, whole_run, read_metrics)


def test_a_loss_that_is_not_finite_stops_the_run(make_recipe, tmp_path, monkeypatch):
    def forward(self, input_ids, original=Mamba3LM.forward, **options):
        output = original(self, input_ids, **options)
        if self.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 8:
                return output._replace(loss=output.loss * math.nan)
        return output

    monkeypatch.setattr(Mamba3LM, "forward", forward)
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match=r"the loss is nan at step 8 \(batch 7\)"):
        train(make_recipe(), out, progress=False)
    assert last_state(out).step == 5
    assert all(torch.isfinite(p).all() for p in Mamba3LM.from_pretrained(out).parameters())


def test_a_step_that_is_not_finite_can_be_skipped(make_recipe, tmp_path, read_metrics, monkeypatch):
    """The run goes on as if that step's batch had not been there."""
    seen = []

    def forward(self, input_ids, original=Mamba3LM.forward, **options):
        output = original(self, input_ids, **options)
        if not self.training:
            return output
        seen.append({name: p.detach().clone() for name, p in self.named_parameters()})
        return output._replace(loss=output.loss * (math.nan if len(seen) == 8 else 1))

    monkeypatch.setattr(Mamba3LM, "forward", forward)
    out = tmp_path / "run"
    assert train(make_recipe({"step.nonfinite": "skip"}), out, progress=False).steps == 20
    losses = [line["loss"] for line in read_metrics(out, training=True)]
    assert [i for i, loss in enumerate(losses) if math.isnan(loss)] == [7]
    for name, p in seen[7].items():
        assert torch.equal(p, seen[8][name])
    assert any(not torch.equal(p, seen[9][name]) for name, p in seen[8].items())


def test_a_gradient_that_is_not_finite_changes_no_weight(make_recipe, tmp_path, monkeypatch):
    seen = {}

    def forward(self, input_ids, original=Mamba3LM.forward, **options):
        output = original(self, input_ids, **options)
        if options.get("labels") is not None:
            seen["model"], seen["before"] = (
                self,
                {k: v.clone() for k, v in self.state_dict().items()},
            )
            output.loss.register_hook(lambda grad: grad * math.inf)
        return output

    monkeypatch.setattr(Mamba3LM, "forward", forward)
    with pytest.raises(RuntimeError, match=r"gradient norm is (nan|inf) at step 1 \(batch 0\)"):
        train(make_recipe(), tmp_path / "run", progress=False)
    after = seen["model"].state_dict()
    assert all(torch.equal(after[name], old) for name, old in seen["before"].items())


def bad_batches(monkeypatch, numbers):
    """Have the batches of these numbers give losses that are ten times as large."""

    def batch(self, index, original=arithmetic.CurriculumStream.__call__):
        found = original(self, index)
        if index in numbers:  # answers that no problem has
            wrong = torch.where(found.labels == -100, found.labels, 31 - found.labels)
            found = found._replace(labels=wrong)
        return found

    monkeypatch.setattr(arithmetic.CurriculumStream, "__call__", batch)


def test_a_spike_leads_back_and_its_batches_are_left_out(
    make_recipe, tmp_path, read_metrics, monkeypatch, caplog
):
    changes = {"step.spike_factor": 4.0, "train.steps": 100, "train.save_every": 10}
    changes |= {"optim.decay_steps": None, "optim.lr": 0.003}
    bad_batches(monkeypatch, {75, 76, 77, 78})
    with caplog.at_level(logging.WARNING):
        train(make_recipe(changes), tmp_path / "run", progress=False)
    [message] = [r.getMessage() for r in caplog.records if "going back" in r.getMessage()]
    assert "the loss jumped at step 76" in message
    assert "going back to step 70 and leaving out the 8 batches since" in message
    assert last_state(tmp_path / "run").facts["skipped"] == 8
    lines = read_metrics(tmp_path / "run", training=True)
    assert [line["step"] for line in lines] == list(range(1, 101))

    # As if the stream had never had them.
    def batch(self, index, original=arithmetic.CurriculumStream.__call__):
        return original(self, index if index < 70 else index + 8)

    monkeypatch.setattr(arithmetic.CurriculumStream, "__call__", batch)
    train(make_recipe(changes), tmp_path / "without", progress=False)
    assert read_metrics(tmp_path / "without", training=True) == lines
    weights, others = (load_file(tmp_path / o / "model.safetensors") for o in ("run", "without"))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_run_that_was_led_back_resumes_exactly(make_recipe, tmp_path, read_metrics, monkeypatch):
    changes = {"step.spike_factor": 4.0, "train.steps": 100, "train.save_every": 10}
    changes |= {"optim.decay_steps": None, "optim.lr": 0.003}
    bad_batches(monkeypatch, {75, 76, 77, 78})
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(make_recipe(changes), whole, progress=False)
    with monkeypatch.context() as patch:
        stop_at(patch, 94)
        with pytest.raises(Stop):
            train(make_recipe(changes), halves, progress=False)
    train(make_recipe(changes), halves, resume=True, progress=False)
    assert_same_run(halves, whole, read_metrics)


def test_a_spike_without_end_ends_the_run(make_recipe, tmp_path, monkeypatch):
    changes = {"step.spike_factor": 4.0, "train.steps": 200, "train.save_every": 10}
    changes |= {"optim.decay_steps": None, "optim.lr": 0.003}
    bad_batches(monkeypatch, range(75, 1000))
    with pytest.raises(RuntimeError, match="gone back to step 70 3 times, to no avail"):
        train(make_recipe(changes), tmp_path / "run", progress=False)
    assert last_state(tmp_path / "run").step == 70


WAYS = {
    "parts": {"step.accumulate": 3},
    "recomputed": {"step.recompute": "full"},
    "selective": {"step.recompute": "selective", "step.accumulate": 2},
    "workers": {"data.workers": 2},
    "compiled": {"step.compile": True},
    "not recorded": {"step.cache_steps": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_compute_a_run_agree(
    make_recipe, tmp_path, whole_run, read_metrics, monkeypatch, way
):
    """Recorded ones are compared in test_train_step, ranks in test_parallel."""
    torch._dynamo.reset()  # what other tests have compiled counts towards its limit
    compiler = functools.partial(torch.compile, backend="aot_eager")  # needs no C compiler
    monkeypatch.setattr(torch, "compile", compiler)
    train(make_recipe(WAYS[way]), tmp_path / "run", progress=False)
    lines, expected = (read_metrics(out, training=True) for out in (tmp_path / "run", whole_run))
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), line["step"]
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), line["step"]


def test_norms_go_into_the_log(make_recipe, tmp_path, read_metrics):
    changes = {"train.norms_every": 3, "optim.name": "hybrid", "train.steps": 6}
    train(make_recipe(changes), tmp_path / "run", progress=False)
    lines = read_metrics(tmp_path / "run", training=True)
    told = [line for line in lines if "grad_norm/matrices" in line]
    assert [line["step"] for line in told] == [3, 6]
    for line in told:
        parts = [line[f"grad_norm/{name}"] for name in ("matrices", "decayed", "undecayed")
                 if f"grad_norm/{name}" in line]  # fmt: skip
        whole = math.sqrt(sum(part**2 for part in parts))
        assert whole == pytest.approx(min(line["grad_norm"], 1.0), rel=1e-4)  # clipped
        assert line["update_norm/matrices"] > 0
    # It changes nothing.
    train(make_recipe(changes | {"train.norms_every": 0}), tmp_path / "plain", progress=False)
    losses = [line["loss"] for line in read_metrics(tmp_path / "plain", training=True)]
    assert losses == [line["loss"] for line in lines]


def test_init_from_starts_at_the_weights_of_a_model(make_recipe, tmp_path, whole_run, read_metrics):
    start = {"train.init_from": str(whole_run), "train.steps": 1}
    recipe = make_recipe(start)
    for name, model in (("same", recipe.model), ("none", None)):
        out = tmp_path / name
        train(dataclasses.replace(recipe, model=model), out, progress=False)
        batches = arithmetic.CurriculumStream([1, 2], arithmetic.tokenizer(), batch_size=8, seed=0)
        batch = batches(0)
        model = Mamba3LM.from_pretrained(whole_run)
        loss = model(batch.input_ids, labels=batch.labels, return_logits=False).loss
        assert read_metrics(out)[0]["loss"] == loss.item()
    with pytest.raises(ValueError, match=r"differs from .*whole in d_state"):
        train(make_recipe(start | {"model.d_state": 4}), tmp_path / "other", progress=False)


def test_another_vocabulary_is_refused(make_recipe, tmp_path):
    with pytest.raises(ValueError, match=r"model has a vocabulary of 20 tokens.* has 32"):
        train(make_recipe({"model.vocab_size": 20}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_from_a_model_resumes_without_it(make_recipe, tmp_path, whole_run, read_metrics):
    changes = {"train.init_from": str(whole_run), "optim.lr": 0.003}
    train(make_recipe(changes), tmp_path / "a", progress=False)
    recipe = dataclasses.replace(make_recipe(changes | {"train.steps": 10}), model=None)
    train(recipe, tmp_path / "b", progress=False)
    whole_run.rename(tmp_path / "gone")
    recipe = dataclasses.replace(make_recipe(changes), model=None)
    train(recipe, tmp_path / "b", resume=True, progress=False)
    assert_same_run(tmp_path / "b", tmp_path / "a", read_metrics)


def test_the_caller_keeps_random_state_and_threads(make_recipe, tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    train(make_recipe({"train.steps": 2, "train.threads": 2}), tmp_path / "run", progress=False)
    assert torch.equal(torch.rand(4), expected)
    assert torch.get_num_threads() == 1


def test_a_schedule_that_ends_elsewhere_is_said(make_recipe, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(make_recipe({"train.steps": 2}), tmp_path / "run", progress=False)
    assert "decays over optim.decay_steps=20 steps, train.steps is 2" in caplog.text


def test_progress_goes_to_standard_error(make_recipe, tmp_path, capsys):
    train(make_recipe({"train.steps": 2}), tmp_path / "run")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    assert "loss" in captured.err
    assert "tokens/s" in captured.err


def test_a_model_learns_the_facts(make_recipe, tmp_path):
    changes = {"model.d_model": 32, "model.headdim": 16, "data.stages": [2]}
    changes |= {"data.batch_size": 64, "optim.decay_steps": 250, "train.steps": 250}
    result = train(make_recipe(changes), tmp_path / "run", progress=False)
    assert result.after.exact_match.overall > 0.8  # guessing gives 0.1
