"""The VAE with channels last in memory: its convolutions are what cuDNN and oneDNN like best so.

The denoising network keeps its layout: LoRAs are written into its weights as matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bottega.diffusion.model.model import Model


class ChannelsLastVae:
    """tolerance: of pixels, which have 8 bits; convolutions sum in another order."""

    name = "channels_last.vae"
    probe = "decode"
    tolerance = 0.01
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._model: Model | None = None

    def unsupported(self, model: Model) -> str:
        return ""

    def enable(self, model: Model) -> None:
        self._model = model
        model.vae.to(memory_format=torch.channels_last)

    def disable(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.vae.to(memory_format=torch.contiguous_format)
