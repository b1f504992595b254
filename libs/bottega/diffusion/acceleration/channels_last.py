"""A network with channels last in memory: its convolutions are what cuDNN and oneDNN like best so.

A convolution with such weights puts out such a map, whatever comes in. Behind Diffusers' transformers, and where an
edit convolves around its mask alone, maps are laid out as ever, so that a group's last bits may depend on who is in it;
with `fixed_rows` a group is always computed alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from bottega.diffusion.model.model import Model

_PROBES = {"unet": "forward", "vae": "decode"}


class ChannelsLast:
    """Of the denoising network, or of the VAE.

    tolerance: convolutions sum in another order; what is compared of the VAE are pixels, which have 8 bits.
    """

    tolerance = 0.01
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
    # Any: of Module.to, its types know no memory_format.
    # A check runs in inference mode; weights that were made in it could not be written outside of it any more.
    with torch.inference_mode(False), torch.no_grad():
        network.to(memory_format=layout)
