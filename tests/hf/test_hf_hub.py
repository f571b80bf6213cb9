"""Pushing by transformers, and loading what was pushed, against the stub of the Hub."""

import pytest
from compare import assert_same, randomise
from hub_stub import TOKEN, in_place_of_the_hub
from transformers import AutoModelForCausalLM

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.hf import export
from mamba3.hub import save_pretrained


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_model_is_pushed_with_its_code_and_loaded_over_http(tmp_path, monkeypatch):
    model = randomise(Mamba3LM(Mamba3Config(vocab_size=16, d_model=16, n_layer=2, headdim=8)))
    save_pretrained(model, tmp_path)
    export(tmp_path)
    with in_place_of_the_hub(tmp_path, monkeypatch) as hub:
        AutoModelForCausalLM.from_pretrained(tmp_path).push_to_hub("me/tiny", token=TOKEN)
        pushed = set(hub.repositories["me/tiny"].files())
        back = AutoModelForCausalLM.from_pretrained("me/tiny")
    code = {"configuration_mamba3.py", "modeling_mamba3.py"}
    assert pushed >= {"config.json", "model.safetensors", *code}
    assert_same(back.state_dict(), model.state_dict())
