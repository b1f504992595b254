"""Accelerations by the memory layout (channels last), and by copies through normal instead of pinned host memory.

cuDNN and oneDNN prefer channels last. A convolution whose weights have that layout also outputs it, whatever its input
has. Behind Diffusers' transformers, and in the rectangles of an edit, maps are contiguous, so that the last bits of a
row may depend on the other rows of its batch. With `fixed_rows`, all batches are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from bottega.device.cuda import CudaDevice
from bottega.model.model import Model

_PROBES = {"unet": "forward", "vae": "decode"}


class ChannelsLast:
    """Stores the weights of the denoising network or the VAE with channels last."""

    tolerance = 0.01
    """Convolutions sum in another order. The VAE is compared by its pixels, which have 8 bits."""
    excludes: Sequence[str] = ()

    def __init__(self, part: Literal["unet", "vae"]) -> None:
        self.name = f"channels_last.{part}"
        self.probe = _PROBES[part]
        self._of_network = part == "unet"
        self._model: Model | None = None

    def unsupported(self, model: Model) -> str:
        return ""

    def enable(self, model: Model) -> None:
        self._model = model
        _lay_out(self._part(model), torch.channels_last)

    def disable(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            _lay_out(self._part(model), torch.contiguous_format)

    def _part(self, model: Model) -> nn.Module:
        network: nn.Module = model.backbone.unet if self._of_network else model.vae
        return network


def _lay_out(network: Any, layout: torch.memory_format) -> None:
    # `network` is Any, because the type stubs of Module.to lack memory_format. The check runs in inference mode;
    # weights created in it could not be written outside of it.
    with torch.inference_mode(False), torch.no_grad():
        network.to(memory_format=layout)


class PageableCopies:
    """Copies to and from the device through normal memory, which can be swapped out ("pageable").

    The plain path uses pinned memory, so that the engine's thread continues during copies. On some devices pinning
    costs more than it gains.
    """

    name = "copies.pageable"
    probe = "copies"
    tolerance = 0.001
    """Copies are exact; the steps around them may sum in another order."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._device: CudaDevice | None = None

    def unsupported(self, model: Model) -> str:
        if not isinstance(model.runtime, CudaDevice):
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        return ""

    def enable(self, model: Model) -> None:
        assert isinstance(model.runtime, CudaDevice), "checked by `unsupported`"
        self._device = model.runtime
        self._device.pageable = True

    def disable(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.pageable = False
