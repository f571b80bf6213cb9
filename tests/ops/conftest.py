"""Op tests run with every fresh output filled with NaN, so that an unwritten element shows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
