"""The channels-last memory layout, which cuDNN and oneDNN prefer for convolutions.

A convolution with channels-last weights outputs a channels-last map, whatever its input. Behind Diffusers'
transformers, and in the rectangles of an edit, maps are contiguous, so that the last bits of a row may depend on the
other rows of its group. With `fixed_rows`, a group is always computed alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from bottega.diffusion.model.model import Model

_PROBES = {"unet": "forward", "vae": "decode"}


class ChannelsLast:
    """Lays out the denoising network or the VAE with channels last."""

    tolerance = 0.01
    """Convolutions sum in another order. The VAE is compared by pixels, which have 8 bits."""
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
