"""The self-check: it passes on a sound machine, and sees a fault planted in any path."""

import pytest
import torch

from mamba3 import cli, doctor
from mamba3.ops import chunk_scan, scan, step


@pytest.fixture(scope="module")
def findings():
    return list(doctor.check("cpu"))


def test_everything_that_runs_here_is_checked(findings):
    seen = {(f.backend, f.dtype, f.form, f.what) for f in findings}
    backends = ("torch", "triton")  # the kernels run in the interpreter here
    dtypes = ("float32", "bfloat16", "float16")
    whats = ("forward", "gradients", "steps")
    assert seen == {
        (b, d, f, w) for b in backends for d in dtypes for f in doctor.FORMS for w in whats
    }
    assert len(findings) == len(seen)


def test_a_sound_machine_passes(findings):
    assert [f for f in findings if not f.ok] == []
    assert all(f.error > 0 for f in findings)


@pytest.mark.parametrize(
    ("module", "name", "fault", "expected"),
    [
        (step, "_step", lambda y: y * 1.01, {"steps"}),
        (scan, "mamba3_scan_chunked", lambda y: y * 1.01, {"forward", "gradients"}),
        (scan, "mamba3_scan_chunked", lambda y: y * torch.nan, {"forward", "gradients"}),
    ],
)
def test_a_fault_is_found(monkeypatch, module, name, fault, expected):
    sound = getattr(module, name)

    def broken(*args):
        y, state = sound(*args)
        return fault(y), state

    monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(doctor, "_dtypes", lambda device: [torch.float32])
    monkeypatch.setattr(doctor, "_backends", lambda device: ["torch"])
    assert {f.what for f in doctor.check("cpu") if not f.ok} == expected


def test_a_wrong_gradient_is_found(monkeypatch):
    sound = chunk_scan._Maps.backward

    def broken(self, q, k, grad_q, grad_k, grad_v, grads):
        sound(self, q, k, grad_q, grad_k.mul_(1.01), grad_v, grads)

    monkeypatch.setattr(chunk_scan._Maps, "backward", broken)
    monkeypatch.setattr(doctor, "_dtypes", lambda device: [torch.float32])
    monkeypatch.setattr(doctor, "_backends", lambda device: ["torch"])
    assert {f.what for f in doctor.check("cpu") if not f.ok} == {"gradients"}


def finding(**changes):
    values = {
        "device": "cpu", "backend": "torch", "dtype": "float32", "form": "SISO",
        "what": "forward", "error": 1e-7, "tolerance": 1e-4,
    }  # fmt: skip
    return doctor.Finding(**(values | changes))


def test_command(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check", lambda device: iter([finding()]))
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    assert "all 1 comparisons are within rounding" in capsys.readouterr().out
    bad = finding(backend="triton", error=float("nan"))
    monkeypatch.setattr(doctor, "check", lambda device: iter([finding(), bad]))
    assert cli.main(["doctor", "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "WRONG" in printed.out
    assert "1 of 2 comparisons" in printed.err
    assert "MAMBA3_BACKEND=torch" in printed.err
