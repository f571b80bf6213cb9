"""FLOPs of a token against torch's own count of them, and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.ops import use_backend
from mamba3.train.flops import mfu, peak_flops, token_flops

CASES = {
    "siso": {"d_intermediate": 20},
    "mimo": {"is_mimo": True, "mimo_rank": 3, "ngroups": 3, "tie_embeddings": False},
    "mamba": {"layers": "mamba", "mamba": {"d_state": 5, "dt_rank": 3}, "d_intermediate": 20},
    "hybrid": {"layers": ["mamba", "mamba3"], "mamba": {"expand": 1}},
    "narrow": {"rope_fraction": 0.0, "expand": 1, "is_outproj_norm": True, "n_layer": 1},
}
PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj", "fc1", "fc2")
ROWS, LENGTH = 2, 7


def config_of(case):
    sizes = {"vocab_size": 19, "d_model": 18, "n_layer": 2}
    if CASES[case].get("layers") != "mamba":
        sizes |= {"d_state": 6, "headdim": 6}
    return Mamba3Config(**sizes | {"mlp_multiple": 1, "pad_vocab_size_multiple": 4} | CASES[case])


def counted(model, backward):
    """What torch counts in a pass, by the last part of the module's name."""
    ids = torch.randint(19, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter, use_backend("torch"):
        loss = model(ids, labels=ids).loss
        if backward:
            loss.backward()
    found = {}
    for module, ops in counter.get_flop_counts().items():
        name = module.rpartition(".")[2]
        found[name] = found.get(name, 0) + sum(ops.values())
    return found


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_that_torch_counts(case):
    config = config_of(case)
    flops, model = token_flops(config, LENGTH), Mamba3LM(config)
    for backward, share in ((True, 1), (False, 3)):
        found = counted(model, backward)
        products = sum(found.get(name, 0) for name in PROJECTIONS)
        assert products * share == ROWS * LENGTH * flops.projections
        # With its logits, the head computes those of the last position, too.
        used = found["lm_head"] * share * (LENGTH - 1) // LENGTH
        assert used == pytest.approx(ROWS * LENGTH * flops.head, rel=1e-12)
    assert flops.projections > 0 < flops.head


@pytest.mark.parametrize(("case", "streams"), [("siso", 1), ("mimo", 3)])
def test_the_scan_by_hand(case, streams):
    """Counted one by one: a state of 6 x 6 in each of 6 heads, 2 layers, forward and twice back."""
    heads = width = state = 6
    count = 0
    for _ in range(heads * width * state):
        count += 1  # it decays
        count += 2 * streams  # outer products are added
        count += 2 * streams  # and it is read out
    assert token_flops(config_of(case), 5).scan == 3 * 2 * count


def test_the_scan_of_mamba_1_by_hand():
    """36 channels with a state of 5 each, 2 layers; decayed, added to and read out."""
    assert token_flops(config_of("mamba"), 5).scan == 3 * 2 * 36 * 5 * (1 + 2 + 2)


def test_only_the_head_knows_the_length():
    config = config_of("siso")
    short, long = token_flops(config, 1), token_flops(config, 1000)
    assert short.head == 0
    assert short[:2] == long[:2]
    assert long.head == pytest.approx(3 * 2 * 18 * 20 * 0.999)
    assert long.total == long.projections + long.scan + long.head
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        token_flops(config, 0)


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA GH200 480GB", 989e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA A10G", None, None),
        ("Some GPU 3000", None, None),
    ],
)
def test_peaks(monkeypatch, name, half, single):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for precision in ("bf16", "fp16", "bf16-weights"):
        assert peak_flops("cuda", precision) == half
    assert peak_flops(torch.device("cuda:0"), "float32") == single
    assert peak_flops("cpu", "bf16") is None


def test_mfu_by_hand(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    config = Mamba3Config(
        vocab_size=1000, d_model=100, n_layer=1, d_state=10, headdim=50, d_intermediate=256,
        rope_fraction=0.4, pad_vocab_size_multiple=1,
    )  # fmt: skip
    # in_proj has 2 x 200 + 2 x 10 + 3 x 4 + 2 rows.
    forward = 2 * 100 * 434 + 2 * 200 * 100 + 6 * 100 * 256 + 200 * 10 * 5 + 2 * 100 * 1000 * 3 / 4
    how = {"device": "cuda", "precision": "bf16"}
    assert mfu(1e9, config, 4, **how) == pytest.approx(3 * forward * 1e9 / 989e12)
    assert mfu(1e9, config, 4, ranks=4, **how) == pytest.approx(3 * forward * 1e9 / 989e12 / 4)
    assert mfu(1e9, config, 4, device="cpu", precision="bf16") is None
