import json

import pytest
import torch
from huggingface_hub import ModelCard

from mamba3 import Mamba3LM, load_tokenizer
from mamba3.data.arithmetic import SKILL_FILE
from mamba3.data.jsonl import read_rows, split_rows
from mamba3.data.problems import collate
from mamba3.eval.exact_match import exact_match
from mamba3.train import finetune, train
from mamba3.train.step import TrainStep


@pytest.fixture
def base(make_recipe, tmp_path):
    """A model that has not learned anything yet."""
    train(make_recipe({"train.steps": 1}), tmp_path / "base", progress=False)
    return tmp_path / "base"


@pytest.fixture
def sums(tmp_path):
    """A file of 30 rows."""
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{a}+{b}", "completion": str(a + b)} for a in range(6) for b in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_shipped_model_learns_the_bundled_skill(tmp_path):
    """And keeps its old skills, a tenth of each step being what it learned before."""
    old = {"mix": 0.1, "mix_data": "arithmetic"}
    options = {"lr": 1e-3, "epochs": 30, "progress": False}
    result = finetune("arithmetic-tiny", SKILL_FILE, tmp_path / "out", **options, **old)
    assert result.exact_match_before < 0.3  # digits that are sorted already
    assert result.exact_match_after > 0.95
    assert result.old_before > 0.99
    assert result.old_after > 0.85
    assert result.n_train + result.n_valid == 500
    # The saved folder answers as the result says, for whoever loads it.
    tokenizer = load_tokenizer(tmp_path / "out")
    _, valid = split_rows(read_rows(SKILL_FILE, tokenizer), 0.2)
    measured = exact_match(Mamba3LM.from_pretrained(tmp_path / "out"), tokenizer, valid)
    assert (measured.overall, measured.n) == (result.exact_match_after, result.n_valid)


def test_the_loss_is_on_completions_of_the_training_rows(base, sums, tmp_path, read_metrics):
    result = finetune(
        base, sums, tmp_path / "out", steps=1, batch_size=500, lr=1e-3, progress=False
    )
    tokenizer = load_tokenizer(base)
    train_rows, valid_rows = split_rows(read_rows(sums, tokenizer), 0.2)
    assert (result.n_train, result.n_valid) == (len(train_rows), len(valid_rows))
    # 500 rows of an endless stream: whole epochs and part of one.
    batch = collate(train_rows, tokenizer)
    loss = Mamba3LM.from_pretrained(base)(batch.input_ids, labels=batch.labels).loss.item()
    [line] = read_metrics(tmp_path / "out", training=True)
    assert line["loss"] == result.loss == pytest.approx(loss, rel=0.02)


def test_before_and_after_are_measured_on_rows_never_trained_on(
    base, sums, tmp_path, read_metrics, monkeypatch
):
    trained = set()

    def run(self, parts, original=TrainStep.run):
        trained.update(tuple(ids) for part in parts for ids in part.input_ids.tolist())
        return original(self, parts)

    monkeypatch.setattr(TrainStep, "run", run)
    result = finetune(base, sums, tmp_path / "out", steps=8, batch_size=8, progress=False)
    tokenizer = load_tokenizer(base)
    train_rows, valid_rows = split_rows(read_rows(sums, tokenizer), 0.2)
    prompts = {tokenizer.decode(ids).partition("=")[0] for ids in trained}
    assert prompts == {row.prompt for row in train_rows}
    before = exact_match(Mamba3LM.from_pretrained(base), tokenizer, valid_rows)
    assert result.exact_match_before == before.overall
    lines = [line for line in read_metrics(tmp_path / "out") if "exact_match" in line]
    assert [(line["step"], line["exact_match"]) for line in lines] == [
        (0, result.exact_match_before),
        (8, result.exact_match_after),
    ]


def test_what_a_fine_tune_leaves(base, sums, tmp_path):
    out = tmp_path / "out"
    result = finetune(base, sums, out, epochs=2, batch_size=6, seed=4, progress=False)
    assert result.steps == round(2 * result.n_train / 6)
    assert result.out == str(out)
    card = ModelCard.load(out / "README.md")
    assert [entry.metric_value for entry in card.data.eval_results] == [result.exact_match_after]
    assert f"on {result.n_train} rows of sums.jsonl, from base" in card.text
    assert f"{result.steps} steps of 6 rows, seed 4" in card.text


def test_the_same_seed_gives_the_same_model(base, sums, tmp_path):
    options = {"steps": 5, "batch_size": 8, "progress": False}
    models = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(1)
        finetune(base, sums, tmp_path / name, seed=seed, **options)
        models.append(Mamba3LM.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert any(not torch.equal(models[0][name], models[2][name]) for name in models[0])


def test_a_model_is_replaced_only_when_asked(base, sums, tmp_path):
    out = tmp_path / "out"
    finetune(base, sums, out, steps=1, progress=False)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"already holds config\.json.*overwrite"):
        finetune(base, sums, out, steps=2, progress=False)
    assert (out / "model.safetensors").read_bytes() == before
    finetune(base, sums, out, steps=2, overwrite=True, progress=False)
    assert (out / "model.safetensors").read_bytes() != before


def test_a_run_that_diverges_replaces_nothing(base, sums, tmp_path):
    out = tmp_path / "out"
    finetune(base, sums, out, steps=1, progress=False)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match=r"is (nan|inf) at step \d+ \(batch \d+\)"):
        finetune(base, sums, out, steps=9, lr=1e30, overwrite=True, progress=False)
    assert (out / "model.safetensors").read_bytes() == before


def test_bad_rows_and_options_are_named(base, sums, tmp_path):
    out = tmp_path / "out"
    with open(sums, "a") as file:
        file.write('{"prompt": "two", "completion": "2"}\n')
    with pytest.raises(ValueError, match=r"sums\.jsonl, line 31: character 't' at position 0"):
        finetune(base, sums, out, progress=False)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        finetune(base, sums, out, batch_size=0, progress=False)
    with pytest.raises(ValueError, match="valid_fraction must lie between 0 and 1"):
        finetune(base, SKILL_FILE, out, valid_fraction=1.0, progress=False)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        finetune(base, SKILL_FILE, out, steps=0, progress=False)
    with pytest.raises(ValueError, match="at least 1 step, got 0; raise epochs"):
        finetune(base, SKILL_FILE, out, epochs=0.01, progress=False)
    with pytest.raises(FileNotFoundError, match="neither a local folder nor a"):
        finetune("arithmetic-tny", SKILL_FILE, out, progress=False)
    assert not out.exists()
