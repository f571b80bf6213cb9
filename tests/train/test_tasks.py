"""Runs on token files and on packed rows; what they train on, and what they are measured on."""

import json
import math

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from mamba3 import Mamba3LM, load_model, load_tokenizer
from mamba3.data import arithmetic
from mamba3.data.sources import Text
from mamba3.data.text import TokenFile, TokenStream, write_tokens
from mamba3.data.text_tokenizer import load_text_tokenizer
from mamba3.train import train
from mamba3.train.config import DataRecipe
from mamba3.train.step import TrainStep
from mamba3.train.tasks import task_of

LENGTH = 9


@pytest.fixture
def corpus(tmp_path):
    """A token file of sums, by the tokenizer of the shipped model."""
    texts = [Text(f"{a}+{b}={a + b}", f"text {a}", 8) for a in range(30) for b in range(5)]
    tokenizer = load_text_tokenizer("arithmetic-tiny")
    write_tokens(texts, tokenizer, tmp_path / "corpus" / "sums", progress=False)
    return tmp_path / "corpus" / "sums"


@pytest.fixture
def make_tokens(make_recipe, corpus):
    def make(changes=None):
        recipe = make_recipe(changes)
        data = {"kind": "tokens", "path": str(corpus), "length": LENGTH, "eval_rows": 5}
        values = recipe.to_dict()
        values["data"] = data | {"batch_size": 4}
        return type(recipe).from_dict(values)

    return make


@pytest.fixture
def seen(monkeypatch):
    """The rows that are trained on."""
    rows = []

    def run(self, parts, original=TrainStep.run):
        rows.extend(tuple(ids) for part in parts for ids in part.input_ids.tolist())
        return original(self, parts)

    monkeypatch.setattr(TrainStep, "run", run)
    return rows


def test_a_token_file_is_trained_on_but_for_its_end(
    make_tokens, corpus, tmp_path, read_metrics, seen
):
    tokens = TokenFile(corpus).tokens.astype(np.int64)
    windows = [tuple(row) for row in tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)]
    steps = -(-len(windows) // 4)
    recipe = make_tokens({"train.steps": steps, "optim.decay_steps": None})
    result = train(recipe, tmp_path / "run", progress=False)
    # In an epoch and a little more, all rows but the last five, which no other row equals.
    assert set(seen) == set(windows[:-5])
    assert not set(windows[-5:]) & set(windows[:-5])
    torch.manual_seed(0)
    model = Mamba3LM(recipe.architecture(TokenFile(corpus).vocab_size))
    ids = TokenStream(corpus, length=LENGTH, batch_size=4, seed=0, hold_out=5)(0).input_ids
    lines = read_metrics(tmp_path / "run")
    assert lines[0]["loss"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-6)
    assert lines[0]["tokens_per_s"] > 0

    trained = Mamba3LM.from_pretrained(tmp_path / "run")
    held_out = torch.tensor(windows[-5:])
    loss = trained(held_out, labels=held_out).loss.item()
    told = result.after.perplexity
    assert told.n_tokens == 5 * (LENGTH - 1)
    assert told.loss == pytest.approx(loss, rel=1e-5)
    assert told.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert lines[-1]["eval_loss"] == told.loss
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert [entry.metric_value for entry in card.data.eval_results] == [told.perplexity]
    assert f"| {told.loss:.4f} | {told.perplexity:.2f} | {told.n_tokens} |" in card.text
    # The tokenizer of the corpus comes along.
    assert load_tokenizer(tmp_path / "run").encode("1+2") == [
        *load_tokenizer("arithmetic-tiny").encode("1+2")
    ]


def test_10_and_10_steps_on_a_token_file_are_20(make_tokens, tmp_path, read_metrics):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(make_tokens(), whole, progress=False)
    train(make_tokens({"train.steps": 10}), halves, progress=False)
    train(make_tokens(), halves, resume=True, progress=False)
    lines, expected = (read_metrics(out, training=True) for out in (halves, whole))
    assert lines == expected
    weights, expected = (load_file(out / "model.safetensors") for out in (halves, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_another_file_to_measure_on(make_tokens, corpus, tmp_path):
    recipe = make_tokens()
    values = recipe.to_dict()
    values["data"] |= {"eval_path": f"{corpus}.bin", "eval_rows": 2}
    task = task_of(type(recipe).from_dict(values))
    [batch] = task.eval_batches
    tokens = TokenFile(corpus).tokens.astype(np.int64)
    count = len(tokens) // LENGTH
    assert batch.input_ids.flatten().tolist() == list(tokens[(count - 2) * LENGTH : count * LENGTH])
    stream = task.stream()
    epoch = torch.cat([stream(i).input_ids for i in range(count // 4)]).tolist()
    assert len({tuple(row) for row in epoch}) > count - 4  # none is held out
    assert "rows of 9 tokens of sums" in task.told.measured_on


def test_rows_are_packed_without_leaks(tmp_path, seen, make_recipe, read_metrics):
    """The first loss is the mean over the documents of a batch, each by itself."""
    path = tmp_path / "rows.jsonl"
    pairs = [(a, b) for a in range(9) for b in range(5)]
    rows = [{"prompt": f"{a}+{b}", "completion": str(a + b + 1)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = make_recipe({"train.steps": 1, "train.init_from": "arithmetic-tiny"}).to_dict()
    values |= {"model": None, "data": {"kind": "rows", "path": str(path), "length": 24}}
    values["data"]["batch_size"] = 3
    recipe = type(make_recipe()).from_dict(values)
    result = train(recipe, tmp_path / "run", progress=False)
    assert all(len(row) == 3 * 24 for row in seen)  # all rows of a part as one
    batch = task_of(recipe).stream()(0)
    model, tokenizer = load_model("arithmetic-tiny"), arithmetic.tokenizer()
    total = count = 0
    for ids, labels, numbers in zip(
        *(t.tolist() for t in (batch.input_ids, batch.labels, batch.seq_idx)), strict=True
    ):
        for number in set(numbers):
            own = [i for i, n in enumerate(numbers) if n == number]
            document = torch.tensor([[ids[i] for i in own]])
            target = torch.tensor([[labels[i] for i in own]])
            scored = int((target[:, 1:] != -100).sum())
            if scored:
                assert tokenizer.decode(document[0].tolist()).count("=") == 1
                total += model(document, labels=target).loss.item() * scored
                count += scored
    assert read_metrics(tmp_path / "run", training=True)[0]["loss"] == pytest.approx(
        total / count, rel=1e-5
    )
    assert result.before.exact_match.n == result.after.exact_match.n > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "text"}, "kind must be one of arithmetic, rows, tokens, got 'text'"),
        ({"kind": "tokens", "path": "x"}, "data of kind tokens needs length"),
        ({"kind": "rows"}, "data of kind rows needs path"),
        ({"path": "x"}, "path is for data of kind rows or tokens, and the kind is arithmetic"),
        (
            {"kind": "tokens", "path": "x", "length": 2, "stages": [1]},
            "stages is for data of kind arithmetic or rows",
        ),
        (
            {"kind": "rows", "path": "x", "loss_on": "prompts"},
            "loss_on must be one of answers, all",
        ),
        ({"kind": "rows", "path": "x", "too_long": "split"}, "too_long must be one of cut, drop"),
        ({"kind": "rows", "path": "x", "mix": 0.1}, "mix=0.1 of what"),
        ({"kind": "rows", "path": "x", "mix": 1.0, "mix_path": "y"}, "at least 0 and less than 1"),
        (
            {"kind": "rows", "path": "x", "mix": 0.1, "mix_path": "y", "batch_size": 4},
            "mix=0.1 of 4 rows is 0",
        ),
        ({"kind": "rows", "path": "x", "valid_fraction": 1}, "between 0 and 1"),
    ],
)
def test_keys_are_those_of_the_kind(values, message):
    with pytest.raises(ValueError, match=message):
        DataRecipe(**values)


def test_rows_need_a_model_and_tokens_enough_of_a_vocabulary(make_tokens, make_recipe, tmp_path):
    values = make_recipe().to_dict() | {"data": {"kind": "rows", "path": "x"}}
    with pytest.raises(ValueError, match=r"needs train\.init_from"):
        train(type(make_recipe()).from_dict(values), tmp_path / "a", progress=False)
    with pytest.raises(ValueError, match="vocabulary of 20 tokens; the data has 32"):
        train(make_tokens({"model.vocab_size": 20}), tmp_path / "b", progress=False)
    # More of it than the data has does no harm.
    train(make_tokens({"model.vocab_size": 40, "train.steps": 1}), tmp_path / "c", progress=False)
