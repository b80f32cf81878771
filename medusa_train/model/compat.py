"""The differences between the supported transformers versions, all in one place.

Tested on the version in constraints.txt; written after the sources of 5.17, where the range begins.
"""

import inspect
from functools import cache
from typing import Any

from torch import nn


@cache
def cache_argument(model_class: type[nn.Module]) -> str:
    """Name of the forward argument that takes the key-value cache.

    It was `past_key_values` and is being renamed to `cache`.
    """
    parameters = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def checkpoint_activations(model: Any) -> None:
    """Keep only each layer's input for backward and compute the rest again.

    Not the re-entrant kind, which gives what follows a frozen layer no gradient. The method was
    `gradient_checkpointing_enable` and is being renamed.
    """
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
