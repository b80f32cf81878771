"""Numbers from Python to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Sequence[Any], device: torch.device) -> Tensor:
    """Whole numbers on the device, int64, in the shape of the lists.

    Nobody waits: the copy lines up behind what the device is doing already.
    """
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)
