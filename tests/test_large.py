"""A checkpoint of 1.5B parameters, made on the spot: what loading and pushing it take."""

import json
import subprocess
import sys

import pytest
import torch
from hub_stub import TOKEN, in_place_of_the_hub
from safetensors import safe_open

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.push import push_to_hub

LOADS = """
import sys, torch, mamba3.hub
from mamba3 import Mamba3LM
from pathlib import Path

def status(key):
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key)]
    return 1024 * int(line.split()[1])

torch.zeros(1)
before = status("VmRSS")
model = Mamba3LM.from_pretrained(sys.argv[1])
held = sum(p.nbytes for p in model.parameters())
print(held, status("VmHWM") - before, sorted({str(p.dtype) for p in model.parameters()}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_large_checkpoint_loads_in_its_own_size_and_is_pushed_in_shards(tmp_path, monkeypatch):
    """The most that the process takes, file and all, is at most 1.1 times the checkpoint."""
    config = Mamba3Config(vocab_size=128256, d_model=2048, n_layer=24, d_intermediate=6144)
    model = Mamba3LM(config, dtype=torch.bfloat16)
    n_parameters = sum(p.numel() for p in model.parameters())
    assert n_parameters > 1.4e9
    folder = tmp_path / "large"
    model.save_pretrained(folder, max_shard_size="1GB")
    some = "backbone.layers.7.mixer.in_proj.weight"
    kept = model.state_dict()[some].clone()
    del model

    done = subprocess.run(
        [sys.executable, "-c", LOADS, folder], capture_output=True, text=True, check=True
    )
    held, peak = map(int, done.stdout.split()[:2])
    print(
        f"{n_parameters:,} parameters, {held / 1e9:.2f} GB, loading takes {peak / held:.3f} of it"
    )
    assert held < 2.1 * n_parameters
    assert peak <= 1.1 * held

    with in_place_of_the_hub(tmp_path, monkeypatch) as hub:
        push_to_hub(folder, "me/large", token=TOKEN)
        files = hub.repositories["me/large"].files()
        index = json.loads(files["model.safetensors.index.json"].data)
        shards = sorted(set(index["weight_map"].values()))
        assert len(shards) >= 3
        for shard in shards:
            assert files[shard].data == (folder / shard).read_bytes()
    with safe_open(folder / index["weight_map"][some], "pt") as shard:
        assert torch.equal(shard.get_tensor(some), kept)
