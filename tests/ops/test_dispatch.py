"""Which backend runs, and how it is chosen."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compare import scan_inputs

from mamba3 import ops
from mamba3.ops import dispatch, reference, scan


def test_default_and_its_reason(monkeypatch):
    monkeypatch.delenv("MAMBA3_BACKEND", raising=False)
    assert ops.backend("cpu") == "torch"
    assert ops.explain("cpu") == "torch: the chunked torch path is the fastest one on cpu"
    assert ops.backend("cuda") == "triton"
    expected = "triton: the tensors are on a GPU (cuda) and Triton is installed"
    assert ops.explain("cuda") == expected
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    assert ops.explain("cuda").startswith("torch: Triton, which has kernels for this GPU")


def test_environment_and_override(monkeypatch):
    monkeypatch.setenv("MAMBA3_BACKEND", "reference")
    assert ops.backend() == "reference"
    assert "MAMBA3_BACKEND" in ops.explain()
    with ops.use_backend("torch"):
        assert ops.backend("cpu") == "torch"
        assert "use_backend" in ops.explain()
        with ops.use_backend("reference"):
            assert ops.backend() == "reference"
        assert ops.backend("cpu") == "torch"
    assert ops.backend() == "reference"


def test_an_override_holds_on_all_threads():
    """Autograd recomputes blocks on threads of its own."""
    with ops.use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ops.backend).result() == "reference"
    assert dispatch.requested() != "reference"


def test_requested(monkeypatch):
    """What is asked for, not what a device would get."""
    monkeypatch.delenv("MAMBA3_BACKEND", raising=False)
    assert dispatch.requested() is None
    with ops.use_backend("torch"):
        assert dispatch.requested() == "torch"
    for empty in ("", "reference"):
        monkeypatch.setenv("MAMBA3_BACKEND", empty)
        assert dispatch.requested() == (empty or None)
        with ops.use_backend("triton"):
            assert dispatch.requested() == "triton"
    monkeypatch.setenv("MAMBA3_BACKEND", "quick")
    with pytest.raises(ValueError, match="MAMBA3_BACKEND is 'quick'"):
        dispatch.requested()


def test_the_chosen_one_runs(monkeypatch):
    ran = []

    def spy(*args):
        ran.append("reference")
        return reference.mamba3_scan_reference(*args)

    monkeypatch.setattr(scan, "mamba3_scan_reference", spy)
    _, call = scan_inputs(length=2)
    with torch.no_grad():
        with ops.use_backend("torch"):
            ops.mamba3_scan(**call)
        assert not ran
        with ops.use_backend("reference"):
            ops.mamba3_scan(**call)
    assert ran == ["reference"]


def test_bad_names(monkeypatch):
    with pytest.raises(ValueError, match="use_backend is 'cuda', expected one of reference"):
        ops.use_backend("cuda").__enter__()
    monkeypatch.setenv("MAMBA3_BACKEND", "quick")
    with pytest.raises(ValueError, match="MAMBA3_BACKEND is 'quick'"):
        ops.backend()


def test_triton_where_it_cannot_run(monkeypatch):
    _, call = scan_inputs(length=2)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ops.use_backend("triton"):
        assert ops.backend("cuda") == "triton"
        with pytest.raises(RuntimeError, match="tensors are on cpu: move them to a GPU"):
            ops.mamba3_scan(**call)
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    with pytest.raises(RuntimeError, match="Triton is not installed: python -m pip install"):
        ops.use_backend("triton").__enter__()
