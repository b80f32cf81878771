"""What tests of a GPU share. `scripts/gpu_check.sh --dry-run` lets them run on a CPU instead."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU; on a CPU these tests show only that they run."""
    wanted = torch.device(os.environ.get("GPU_TESTS_ON", "cuda"))
    if wanted.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0) if wanted.type == "cuda" else wanted


@pytest.fixture(scope="session", autouse=True)
def _scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
        yield
