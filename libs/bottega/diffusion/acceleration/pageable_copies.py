"""Copies to and from the device through memory of the host that is not pinned.

The plain path's are pinned, so that its thread goes on while they run. This one shows at a worker's start what that is
worth on its device, and takes the other way where pinning costs more than it gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from bottega.diffusion.device.cuda import CudaDevice
from bottega.diffusion.model.model import Model


class PageableCopies:
    """tolerance: a copy is a copy; the steps around it may sum in another order."""

    name = "copies.pageable"
    probe = "copies"
    tolerance = 0.001
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._device: CudaDevice | None = None

    def unsupported(self, model: Model) -> str:
        if not isinstance(model.runtime, CudaDevice):
            return f"it is for CUDA devices, and the model is on {model.device.type}"
        return ""

    def enable(self, model: Model) -> None:
        assert isinstance(model.runtime, CudaDevice), "asked before"
        self._device = model.runtime
        self._device.pageable = True

    def disable(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.pageable = False
