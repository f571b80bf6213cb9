"""What importing the package costs and gives."""

import json
import subprocess
import sys

import pytest

import mamba3

PUBLIC = [
    "Mamba3Config",
    "Mamba3LM",
    "Mamba3State",
    "TMamba3Layer",
    "__version__",
    "list_models",
    "load_model",
    "load_tokenizer",
    "ops",
]
# Nothing that a model needs to run on a CPU.
NOT_NEEDED = [
    "triton",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "yaml",
    "tqdm",
]


def run_fresh(code):
    """Run code in a new interpreter; the JSON value that it prints last."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_public_names():
    assert sorted(mamba3.__all__) == PUBLIC
    assert dir(mamba3) == PUBLIC
    for name in PUBLIC:
        assert getattr(mamba3, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        mamba3.nothing  # noqa: B018


def test_import_loads_nothing_beyond_torch():
    code = """
import json, sys, torch
before = set(sys.modules)
import mamba3
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new - sys.stdlib_module_names)))
"""
    assert run_fresh(code) == ["mamba3"]


def test_import_touches_no_network_environment_or_process():
    code = """
import json, os, sys
events = []
def hook(event, args):
    if event.startswith(("socket.", "subprocess.", "os.putenv", "os.unsetenv", "os.system")):
        events.append(event)
before = dict(os.environ)
sys.addaudithook(hook)
import mamba3
mamba3.__all__
print(json.dumps([events, os.environ == before]))
"""
    assert run_fresh(code) == [[], True]


def test_import_takes_little_time_beside_torch():
    code = """
import json, time
began = time.perf_counter()
import torch
between = time.perf_counter()
import mamba3
print(json.dumps([between - began, time.perf_counter() - between]))
"""
    torch_seconds, seconds = run_fresh(code)
    assert seconds < 0.1 * torch_seconds


def test_a_model_needs_torch_alone():
    """Trains and generates with everything else made unimportable, once torch is there."""
    code = f"""
import json, sys
import torch
for name in {NOT_NEEDED!r}:
    sys.modules[name] = None
from mamba3 import Mamba3Config, Mamba3LM
model = Mamba3LM(Mamba3Config(vocab_size=9, d_model=8, n_layer=1, d_state=4, headdim=8))
ids = torch.arange(6)[None]
model(ids, labels=ids).loss.backward()
out = model.generate(ids, 3)
print(json.dumps(out.shape[1]))
"""
    assert run_fresh(code) == 9


def test_command_line_starts_without_torch():
    code = """
import json, sys
from mamba3.cli import build_parser
build_parser()
print(json.dumps("torch" in sys.modules))
"""
    assert run_fresh(code) is False
