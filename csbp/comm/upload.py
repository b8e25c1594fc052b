"""Arrays of the host on their way to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """The array on a device, without waiting for what the device is doing. On the CPU it is not copied."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
