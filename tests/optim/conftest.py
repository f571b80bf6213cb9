import pytest

from mamba3.ops import use_backend
from mamba3.optim.triton import adamw, launch, updates


@pytest.fixture
def kernels(monkeypatch):
    """Triton's backend for a test; the launches, which the torch path would make none of."""
    counted = []

    def counting(kernel, *args):
        counted.append(kernel)
        return launch.launch(kernel, *args)

    for module in (updates, adamw):
        monkeypatch.setattr(module, "launch", counting)
    with use_backend("triton"):
        yield counted
