"""The self-check: it passes on a sound machine, and sees a fault planted in any op."""

import pytest
import torch
from compare import DEVICE

from mamba3 import cli, doctor, doctor_cases
from mamba3.ops import chunk_scan, scan, step
from mamba3.ops.triton import conv as conv_kernels
from mamba3.ops.triton import gate as gate_kernels
from mamba3.ops.triton import loss as loss_kernels
from mamba3.ops.triton import norm as norm_kernels
from mamba3.ops.triton import scan as scan_kernels
from mamba3.ops.triton import selective_launch
from mamba3.ops.triton import step as step_kernels
from mamba3.ops.triton import streams as streams_kernels

SCANS = {"scan", "scan, packed, with states"}
STEPS = {"step", "step in place"}
FORMS = {*SCANS, *STEPS, "gate_and_mix"}
OTHERS = {
    "rms_norm", "add_rms_norm", "complex_mul", "complex_add", "broadcast_streams", "mix_streams",
    "complex_state_update", "linear_cross_entropy",
}  # fmt: skip
MAMBA = {
    "selective_scan, packed", "selective_step in place", "causal_conv, packed",
    "causal_conv_step in place",
}  # fmt: skip


def test_a_sound_machine_passes_every_check():
    findings = list(doctor.check(DEVICE))
    assert [str(f) for f in findings if not f.ok] == []
    ops = {(form, op) for form in ("SISO", "MIMO") for op in FORMS}
    ops |= {("", op) for op in OTHERS | MAMBA}
    half = "bfloat16" if DEVICE == "cuda" else "float16"
    runs = [("torch", "float32"), ("torch", "bfloat16")]
    runs += [("triton", "float32"), ("triton", half)]
    expected = {
        (backend, dtype, *op)
        for backend, dtype in runs
        for op in ops
        if op[1] != "gate_and_mix" or backend == "triton"
    }
    assert {(f.backend, f.dtype, f.form, f.what) for f in findings} == expected
    assert len(findings) == len(expected)
    # Rounding is seen, so what was compared is not one computation twice.
    rounded = [f for f in findings if f.what in FORMS]
    assert all(f.error > 0 for f in rounded)
    assert all(f.gradients is None if f.what in STEPS else f.gradients > 0 for f in rounded)


@pytest.fixture
def failing(monkeypatch):
    """The findings that are not ok, of some ops on one backend in float32."""

    def run(backend, ops, form=None):
        cases = doctor_cases.cases

        def some(device):
            return (c for c in cases(device) if c.op in ops and form in (None, c.form))

        monkeypatch.setattr(doctor_cases, "cases", some)
        monkeypatch.setattr(doctor, "_dtypes", lambda device, backend: [torch.float32])
        monkeypatch.setattr(doctor, "_backends", lambda device: [backend])
        return [f for f in doctor.check(DEVICE) if not f.ok]

    return run


def spoil(monkeypatch, owner, name, index=0, factor=1.01):
    """Multiply what a function returns, or one of the tensors that it returns."""
    sound = getattr(owner, name)

    def broken(*args, **options):
        result = sound(*args, **options)
        if isinstance(result, torch.Tensor):
            return result * factor
        made = (t * factor if i == index else t for i, t in enumerate(result))
        return getattr(type(result), "_make", type(result))(made)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("module", "name", "factor", "expected"),
    [
        (step, "_step", 1.01, STEPS),
        (scan, "mamba3_scan_chunked", 1.01, SCANS),
        (scan, "mamba3_scan_chunked", torch.nan, SCANS),
    ],
)
def test_a_fault_of_the_torch_path_is_found(monkeypatch, failing, module, name, factor, expected):
    spoil(monkeypatch, module, name, factor=factor)
    assert {(f.what, f.worst) for f in failing("torch", SCANS | STEPS)} == {
        (op, "y") for op in expected
    }


def test_a_wrong_gradient_of_the_torch_path_is_found(monkeypatch, failing):
    sound = chunk_scan._Maps.backward

    def broken(self, q, k, grad_q, grad_k, grad_v, grads):
        sound(self, q, k, grad_q, grad_k.mul_(1.01), grad_v, grads)

    monkeypatch.setattr(chunk_scan._Maps, "backward", broken)
    found = failing("torch", SCANS)
    assert {f.what for f in found} == SCANS
    assert all(f.error <= f.tolerance < f.gradients for f in found)


@pytest.mark.parametrize(
    ("name", "index", "worst"),
    [("outputs", 0, "y"), ("gradients", 0, "gradient of x"), ("gradients", 6, "gradient of rate")],
)
def test_a_fault_of_the_scan_kernels_is_found(monkeypatch, failing, name, index, worst):
    spoil(monkeypatch, scan_kernels.Scan, name, index)
    found = failing("triton", SCANS, form="SISO")
    assert {(f.what, f.worst) for f in found} == {(op, worst) for op in SCANS}


@pytest.mark.parametrize(
    ("module", "name", "index", "expected"),
    [
        (step_kernels, "step", 0, STEPS),
        (gate_kernels, "gate_forward", 0, {"gate_and_mix", "mix_streams"}),
        (gate_kernels, "gate_backward", 0, {"gate_and_mix", "mix_streams"}),
        (loss_kernels, "cross_entropy", 0, {"linear_cross_entropy"}),
        (loss_kernels, "cross_entropy", 1, {"linear_cross_entropy"}),
        (norm_kernels, "norm_forward", 0, {"rms_norm", "add_rms_norm"}),
        (norm_kernels, "norm_backward", 1, {"rms_norm", "add_rms_norm"}),
        (
            streams_kernels, "complex_forward", 0,
            {"complex_mul", "complex_add", "complex_state_update"},
        ),
        (streams_kernels, "complex_mul_backward", 1, {"complex_mul", "complex_state_update"}),
        (streams_kernels, "broadcast_forward", 0, {"broadcast_streams"}),
        (streams_kernels, "broadcast_backward", 1, {"broadcast_streams"}),
        (streams_kernels, "state_update_forward", 0, {"complex_state_update"}),
        (streams_kernels, "state_update_backward", 2, {"complex_state_update"}),
    ],
)  # fmt: skip
def test_a_fault_of_another_kernel_is_found(monkeypatch, failing, module, name, index, expected):
    spoil(monkeypatch, module, name, index)
    assert {f.what for f in failing("triton", OTHERS | FORMS - SCANS)} == expected


@pytest.mark.parametrize(
    ("owner", "name", "index", "expected"),
    [
        (selective_launch.SelectiveScan, "forward", 0, {"selective_scan, packed"}),
        (selective_launch.SelectiveScan, "backward", 3, {"selective_scan, packed"}),
        (conv_kernels.Conv, "backward", 1, {"causal_conv, packed"}),
    ],
)
def test_a_fault_of_a_mamba_kernel_is_found(monkeypatch, failing, owner, name, index, expected):
    spoil(monkeypatch, owner, name, index)
    assert {f.what for f in failing("triton", MAMBA)} == expected


def test_a_kernel_that_does_not_launch_is_a_finding(monkeypatch, failing):
    def broken(*args):
        raise RuntimeError("out of resource: shared memory\nmore")

    monkeypatch.setattr(norm_kernels, "norm_forward", broken)
    found = failing("triton", OTHERS)
    assert {f.what for f in found} == {"rms_norm", "add_rms_norm"}
    assert str(found[0]).endswith("FAIL: RuntimeError: out of resource: shared memory")


def finding(**changes):
    values = {
        "device": "cuda", "backend": "triton", "dtype": "float32", "form": "SISO", "what": "scan",
        "error": 1e-7, "gradients": 2e-7, "tolerance": 1e-4, "worst": "y",
    }  # fmt: skip
    return doctor.Finding(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({"error": 0.9e-4, "gradients": 1.9e-4}, True),
        ({"error": 1.1e-4}, False),
        ({"gradients": 2.1e-4}, False),
        ({"gradients": None}, True),
        ({"gradients": float("inf")}, False),
    ],
)
def test_gradients_may_be_off_twice_as_much(changes, ok):
    found = finding(**changes)
    assert found.ok == ok
    assert str(found).endswith("ok" if ok else "FAIL: y")


def test_configurations_are_those_of_the_launchers(monkeypatch):
    monkeypatch.setattr(scan_kernels, "CONFIGS", {"states": (8, 3), "inputs": (4, 1)})
    printed = "\n".join(doctor.configurations(DEVICE))
    assert "states  8 warps, 3 stages\n" in printed
    assert "inputs  4 warps, 1 stages" in printed
    monkeypatch.setattr(scan_kernels, "can_pipeline", lambda device: False)
    assert "states  8 warps, 1 stages\n" in "\n".join(doctor.configurations(DEVICE))
    sizes = doctor_cases.Sizes.on(torch.device(DEVICE))
    widths = (4, sizes.headdim, sizes.d_state, sizes.angles, torch.float32, None)
    tiles = scan_kernels.Tiles.of(*widths)
    assert f"MIMO R=4 float32   tiles of {tiles.rows} rows, {tiles.chunk_size} tokens" in printed
    monkeypatch.setattr(doctor, "available", lambda device: ["reference", "torch"])
    assert doctor.configurations(DEVICE) == []


@pytest.mark.parametrize(
    ("version", "hopper", "faulty"),
    [
        ("3.3.1", True, False),
        ("3.4.0", True, True),
        ("3.6.0", True, True),
        ("3.7.0+git1234", True, True),
        ("3.7.1", True, False),
        ("3.10.0", True, False),
        ("3.6.0", False, False),
    ],
)
def test_remedy_names_faulty_compilers(monkeypatch, version, hopper, faulty):
    monkeypatch.setattr(doctor, "_triton_version", lambda: version)
    monkeypatch.setattr(doctor, "_is_hopper", lambda device: hopper)
    advice = doctor.remedy([finding()])
    assert "MAMBA3_BACKEND=torch" in advice
    assert ("triton>=3.7.1" in advice) == faulty
    # Where the torch path is off as well, neither helps.
    advice = doctor.remedy([finding(), finding(backend="torch")])
    assert advice == "please report it with the table above"


def test_command(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check", lambda device: iter([finding(device="cpu")]))
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    assert "all 1 comparisons are within rounding" in capsys.readouterr().out
    bad = finding(device="cpu", error=float("inf"))
    monkeypatch.setattr(doctor, "check", lambda device: iter([finding(device="cpu"), bad]))
    assert cli.main(["doctor", "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count(" inf ") == 1
    assert "1 of 2 comparisons" in printed.err
    assert "MAMBA3_BACKEND=torch" in printed.err
