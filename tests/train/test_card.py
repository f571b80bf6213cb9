"""Model cards, read back by huggingface_hub; what they say is what is in the folder."""

import io
import re
from contextlib import redirect_stdout

import pytest
import torch
from compare import randomise
from huggingface_hub import EvalResult, ModelCard

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data.tokenizer import CharTokenizer
from mamba3.eval.exact_match import ExactMatch
from mamba3.eval.perplexity import Document, Perplexity, text_perplexity
from mamba3.solve import solve
from mamba3.train import train
from mamba3.train.card import write_card
from mamba3.train.tasks import Measured, Told

TOKENIZER = CharTokenizer("0123456789+=\"'")


@pytest.fixture
def model():
    config = Mamba3Config(
        vocab_size=TOKENIZER.vocab_size,
        d_model=16,
        n_layer=2,
        d_state=8,
        headdim=8,
        is_mimo=True,
        mimo_rank=2,
        d_intermediate=100,
    )
    return randomise(Mamba3LM(config), scale=0.3).eval()


def exact(add, subtract):
    shares = {"add": add, "subtract": subtract}
    return Measured(
        ExactMatch((add + 3 * subtract) / 4, shares, 80, {"add": 20, "subtract": 60}, 0, [])
    )


def told(example=None):
    return Told("sums", "rows", "Measured on 80 other rows.", example, ("arithmetic",))


def section(card, title):
    return re.search(rf"^## {title}\n\n(.*?)\s*(?=^## |\Z)", card.text, re.M | re.S)[1]


def table(text):
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def run_example(card, folder, monkeypatch):
    """What the code under "Use" prints, run beside the folder."""
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.S)
    monkeypatch.chdir(folder.parent)
    with redirect_stdout(io.StringIO()) as output:
        exec(code, {})
    return output.getvalue()


def test_a_trained_model(model, tmp_path, monkeypatch):
    folder = tmp_path / "adder"
    model.save_pretrained(folder, tokenizer=TOKENIZER)
    write_card(
        folder,
        model=model,
        summary="Trained with mamba3 on sums: 30 steps, seed 5.",
        told=told('1+"2'),
        results={"before": exact(0.05, 0.0), "after": exact(0.9, 2 / 3)},
        base_model="org/base",
        licence="Apache-2.0",
        datasets=["org/sums"],
        limits="Sums of three digits were never shown.",
    )
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.license, data.library_name) == ("apache-2.0", "mamba3")
    assert (data.pipeline_tag, data.base_model) == ("text-generation", "org/base")
    assert (data.tags, data.datasets, data.model_name) == (
        ["mamba3", "arithmetic"],
        ["org/sums"],
        "adder",
    )
    common = {
        "task_type": "text-generation",
        "dataset_type": "problems",
        "metric_type": "exact_match",
    }
    assert data.eval_results == [
        EvalResult(
            **common,
            dataset_name=f"problems of the task {task}",
            dataset_config=task,
            dataset_args={"n": n},
            metric_value=share,
        )
        for task, n, share in (("add", 20, 0.9), ("subtract", 60, 2 / 3))
    ]

    assert section(card, "Training") == "Trained with mamba3 on sums: 30 steps, seed 5."
    evaluation = section(card, "Evaluation")
    assert "Measured on 80 other rows." in evaluation
    assert "one run" in evaluation
    rows = table(evaluation)
    assert rows["task"] == ["n", "before", "after"]
    assert rows["add"] == ["20", "5.00 %", "90.00 %"]
    assert rows["subtract"] == ["60", "0.00 %", "66.66 %"]
    assert rows["all"] == ["80", "1.25 %", "72.50 %"]
    architecture = table(section(card, "Architecture"))
    assert architecture["form"] == ["MIMO of rank 2"]
    assert architecture["MLP"] == ["width 128"]
    assert architecture["state (d_state)"] == ["8 a channel, 4 of them rotate"]
    assert architecture["decay (a_activation)"] == ["heavy_tail"]
    assert architecture["vocabulary"] == ["17, padded to 32"]
    assert architecture["weights"] == ["float32"]
    assert section(card, "Limits").startswith("Sums of three digits were never shown. What the")
    assert section(card, "Licence") == (
        "Apache-2.0. They are trained from org/base: its licence holds."
    )
    n = sum(parameter.numel() for parameter in model.parameters())
    assert f"{n:,} parameters" in card.text
    printed = run_example(card, folder, monkeypatch)
    assert printed.startswith('1+"2')


def test_a_model_that_writes_into_its_prompts(make_recipe, tmp_path, monkeypatch):
    form = {"data.operands": "columns", "data.answer_order": "lsd_first", "train.steps": 1}
    train(make_recipe(form), tmp_path / "adder", progress=False)
    card = ModelCard.load(tmp_path / "adder" / "README.md")
    assert 'solve(["7+8"], "adder")' in card.text
    [printed] = run_example(card, tmp_path / "adder", monkeypatch).splitlines()
    [answer] = solve(["7+8"], tmp_path / "adder")
    assert printed == answer.answer


def test_what_is_said_of_mamba_1_layers(tmp_path):
    sizes = {"vocab_size": 9, "d_model": 16, "n_layer": 2, "mamba": {"d_state": 5, "d_conv": 3}}
    told = "32 channels, a state of 5 each, convolution over 3"
    for layers, name, form in (
        ("mamba", "Mamba", "Mamba-1"),
        (["mamba", "mamba3"], "Mamba-3", "hybrid of 1 Mamba-1 and 1 SISO"),
    ):
        others = {} if layers == "mamba" else {"headdim": 8}
        model = Mamba3LM(Mamba3Config(**sizes, layers=layers, **others))
        write_card(tmp_path, model=model, summary="")
        card = ModelCard.load(tmp_path / "README.md")
        assert f"A {name} language model ({form}, 2 layers" in card.text
        architecture = table(section(card, "Architecture"))
        assert architecture["Mamba-1 layers"] == [told]
        assert ("heads" in architecture) == (layers != "mamba")


def test_perplexity_by_token_and_by_byte(model, tmp_path):
    by_byte = text_perplexity(model, [Document([3, 4, 5, 6, 7, 8], 1, 9)])
    for measured in (by_byte, Perplexity(1.5, 4.481689, 1234)):
        results = {"this": Measured(perplexity=measured)}
        write_card(tmp_path, model=model, summary="", told=told(), results=results)
        card = ModelCard.load(tmp_path / "README.md")
        found = {result.metric_type: result for result in card.data.eval_results}
        assert found["perplexity"].metric_value == measured.perplexity
        assert found["perplexity"].dataset_args == {"n_tokens": measured.n_tokens}
        row = table(section(card, "Evaluation"))["this"]
        assert row[:2] == [f"{measured.loss:.4f}", f"{measured.perplexity:.2f}"]
        assert row[2] == f"{measured.n_tokens:,}"
        if measured is by_byte:
            assert found["bits_per_byte"].metric_value == by_byte.bits_per_byte
            assert row[3:] == [f"{by_byte.bits_per_byte:.4f}"]
        else:
            assert row[3:] == []
            assert found.keys() == {"perplexity"}


def test_a_model_that_was_not_trained(model, tmp_path, monkeypatch):
    """It claims no data, no numbers and no licence."""
    folder = tmp_path / "random"
    model.to(torch.bfloat16).save_pretrained(folder)
    write_card(folder, model=model, summary="Random weights.")
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "library_name": "mamba3",
        "pipeline_tag": "text-generation",
        "tags": ["mamba3"],
    }
    assert "## Training" not in card.text
    assert section(card, "Origin") == "Random weights."
    assert section(card, "Evaluation").startswith("Not measured.")
    assert section(card, "Limits").startswith("Nothing was measured")
    assert section(card, "Licence") == "None is stated for these weights."
    assert table(section(card, "Architecture"))["weights"] == ["bfloat16, float32"]
    assert run_example(card, folder, monkeypatch).startswith("[0, ")
