"""The whole way of a user: an official folder, adapters, their merge, the Hub, and back."""

import json
import shutil
import string
from pathlib import Path

import pytest
import torch
from hub_stub import TOKEN, in_place_of_the_hub

from mamba3 import Mamba3LM, load_tokenizer
from mamba3.convert import convert
from mamba3.data.tokenizer import CharTokenizer
from mamba3.push import push_to_hub
from mamba3.train import finetune

GOLDENS = Path(__file__).parent / "assets" / "goldens"
IDS = torch.tensor([[1, 5, 3, 9, 2, 14], [1, 4, 4, 7, 12, 3]])

pytestmark = [
    # huggingface_hub's own, of the HTTP library.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    # Official files leave it open.
    pytest.mark.filterwarnings("ignore:this config does not say how the decay A is activated"),
]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    pairs = [(a, b) for a in range(9) for b in range(5)]
    rows = [{"prompt": f"{a}+{b}", "completion": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", ["siso_groups_rope1", "mimo_plain_bf16"])
def test_official_to_adapters_to_hub_to_transformers(form, rows, tmp_path, monkeypatch):
    official, tuned = tmp_path / "official", tmp_path / "tuned"
    shutil.copytree(GOLDENS / form, official)
    tokenizer = CharTokenizer("0123456789+=" + string.ascii_letters[:33], prompt_suffix="=")
    tokenizer.save(official)

    finetune(official, rows, tuned, lora_rank=2, steps=3, device="cpu", progress=False)
    model, before = (Mamba3LM.from_pretrained(folder) for folder in (tuned, official))
    assert (model(IDS).logits - before(IDS).logits).norm() > 1e-3

    with in_place_of_the_hub(tmp_path, monkeypatch) as hub:
        model.push_to_hub("me/model", token=TOKEN, tokenizer=tokenizer)
        push_to_hub(tuned, "me/folder", token=TOKEN)
        card = hub.repositories["me/folder"].text("README.md")
        assert "library_name: mamba3" in card
        for repo_id in ("me/model", "me/folder"):
            back = Mamba3LM.from_pretrained(repo_id)
            assert torch.equal(back(IDS).logits, model(IDS).logits)
            assert load_tokenizer(repo_id).encode_prompt("1+2") == tokenizer.encode_prompt("1+2")

        from transformers import AutoModelForCausalLM

        import mamba3.hf  # noqa: F401

        theirs = AutoModelForCausalLM.from_pretrained("me/folder").eval()
        assert torch.equal(theirs(IDS).logits, model(IDS).logits)
        theirs.save_pretrained(tmp_path / "theirs")
    again = Mamba3LM.from_pretrained(tmp_path / "theirs")
    assert torch.equal(again(IDS).logits, model(IDS).logits)

    convert(tuned, tmp_path / "official-again", to="mamba_ssm")
    again = Mamba3LM.from_pretrained(tmp_path / "official-again")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
