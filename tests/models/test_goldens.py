"""Official-form checkpoints with logits, loss and gradients computed in float64."""

import warnings
from pathlib import Path

import pytest
import torch
from compare import DEVICE, assert_close
from safetensors.torch import load_file

from mamba3 import Mamba3LM, ops

GOLDENS = Path(__file__).parents[1] / "assets" / "goldens"
CASES = sorted(folder.name for folder in GOLDENS.iterdir())


def load(case):
    with warnings.catch_warnings():
        # These configs, like all official ones, do not name the decay's activation.
        warnings.simplefilter("ignore", UserWarning)
        return Mamba3LM.from_pretrained(GOLDENS / case, dtype=torch.float32)


def test_all_six_are_here():
    assert len(CASES) == 6


@pytest.mark.parametrize(
    ("backend", "chunk_size"),
    [(name, None) for name in ops.BACKENDS] + [("torch", size) for size in (1, 8, 64, 256)],
)
@pytest.mark.parametrize("case", CASES)
def test_golden(case, backend, chunk_size):
    device = DEVICE if backend == "triton" else "cpu"
    model = load(case).to(device)
    for block in model.backbone.layers:
        block.mixer.chunk_size = chunk_size
    golden = load_file(GOLDENS / case / "golden.safetensors")
    with ops.use_backend(backend):
        ids = golden["input_ids"].to(device)
        out = model(ids, labels=ids)
        out.loss.backward()
    assert_close(out.logits.cpu(), golden["logits"], 1e-5, "logits")
    assert out.loss.item() == pytest.approx(golden["loss"].item(), rel=1e-5)
    gradients = {f"grad.{name}": p.grad.cpu() for name, p in model.named_parameters()}
    expected = {name: t for name, t in golden.items() if name.startswith("grad.")}
    assert_close(gradients, expected, 1e-4, "gradient")


@pytest.mark.parametrize("case", CASES)
def test_golden_token_by_token(case):
    model = load(case)
    golden = load_file(GOLDENS / case / "golden.safetensors")
    ids = golden["input_ids"]
    with torch.inference_mode():
        prefix = model(ids[:, :23], return_state=True)
        logits, state = [prefix.logits], prefix.state
        for i in range(23, ids.shape[1]):
            out, state = model.step(ids[:, i], state)
            logits.append(out.unsqueeze(1))
    assert_close(torch.cat(logits, 1), golden["logits"], 1e-5, "logits")
