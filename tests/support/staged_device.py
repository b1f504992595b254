"""The class of CUDA devices over the host's memory: a CPU on which it is seen what goes through pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor

from bottega.device.devices import CudaDevice


class StagedDevice(CudaDevice):
    """Counts pinned memory, of which a machine without a GPU has none."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.staged = 0

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.staged += 1
        return torch.empty(shape, dtype=dtype)
