from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The GPU; with `FLATOUT_GPU_TESTS_ON=cpu`, to try a test itself, the CPU."""
    name = os.environ.get("FLATOUT_GPU_TESTS_ON", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
