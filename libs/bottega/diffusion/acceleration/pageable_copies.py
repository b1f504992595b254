"""Copies to and from the device through pageable host memory.

The plain path uses pinned memory, so that its thread continues during copies. This acceleration is kept on devices
where pinning costs more than it gains.
"""

from __future__ import annotations

from collections.abc import Sequence

from bottega.diffusion.device.cuda import CudaDevice
from bottega.diffusion.model.model import Model


class PageableCopies:
    """Copies through pageable memory."""

    name = "copies.pageable"
    probe = "copies"
    tolerance = 0.001
    """Copies are exact; the steps around them may sum in another order."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._device: CudaDevice | None = None

    def unsupported(self, model: Model) -> str:
        if not isinstance(model.runtime, CudaDevice):
            return f"it is for CUDA devices, and the model is on {model.device.type}"
        return ""

    def enable(self, model: Model) -> None:
        assert isinstance(model.runtime, CudaDevice), "checked by `unsupported`"
        self._device = model.runtime
        self._device.pageable = True

    def disable(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.pageable = False
