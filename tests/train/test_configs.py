import json
from pathlib import Path

import pytest

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data import arithmetic
from mamba3.data.sources import Text
from mamba3.data.text import write_tokens
from mamba3.data.text_tokenizer import load_text_tokenizer
from mamba3.train import load_recipe, train

CONFIGS = Path(__file__).parents[2] / "configs"
SHORTER = {
    "arithmetic": ["data.eval_problems=8", "data.batch_size=8"],
    "rows": ["data.batch_size=8", "data.path=rows.jsonl"],
    "tokens": ["data.batch_size=4", "step.accumulate=2", "data.length=8", "data.eval_rows=4"],
}
# Of an architecture that is too large for a test.
SMALLER = [
    "model.d_model=32",
    "model.n_layer=2",
    "model.headdim=16",
    "model.d_state=16",
    "model.d_intermediate=64",
]


@pytest.fixture
def where_data_is(tmp_path, monkeypatch):
    """A folder with what recipes for a user's own data name."""
    monkeypatch.chdir(tmp_path)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a}+{b}", "completion": str(a + b)} for a, b in pairs]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [Text(f"{a}+{b}={a + b}", f"text {a}", 8) for a, b in pairs]
    tokenizer = load_text_tokenizer("arithmetic-tiny")
    write_tokens(texts, tokenizer, Path("corpus") / "train", progress=False)
    model = Mamba3LM(Mamba3Config(vocab_size=32, d_model=32, n_layer=2, d_state=16, headdim=16))
    for stage in ("digits", "facts", "arithmetic", "carry"):
        model.save_pretrained(Path("curriculum") / stage, tokenizer=arithmetic.tokenizer())


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONFIGS))
)
def test_a_config_runs(path, tmp_path, read_metrics, where_data_is):
    recipe = load_recipe(path)
    changes = ["train.steps=2", *SHORTER[recipe.data.kind]]
    if recipe.model is not None and recipe.model["d_model"] > 100:
        changes += (
            SMALLER if recipe.data.kind == "arithmetic" else [*SMALLER, "model.vocab_size=40"]
        )
    result = train(load_recipe(path, changes), tmp_path / "run", progress=False)
    assert [line["step"] for line in read_metrics(tmp_path / "run", training=True)] == [1, 2]
    assert result.steps == 2


def test_debug_is_quick(tmp_path):
    recipe = load_recipe(CONFIGS / "debug.yaml")
    result = train(recipe, tmp_path / "run", progress=False)
    assert result.seconds < 30
    assert result.loss < 2.5  # that of guessing among 32 tokens is 3.5
