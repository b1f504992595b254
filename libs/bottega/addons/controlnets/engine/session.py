"""A request's session with one ControlNet: the tensors that are the same at every step, computed once."""

from __future__ import annotations

from dataclasses import replace

import PIL.Image
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from bottega.addons.controlnets.engine.network import LoadedControlNet
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.device.pick import open_device
from bottega.model.rows import Embeds


class ControlSession:
    """A request's use of one ControlNet.

    `scales` has the factor for each residual. `halves` are the halves of guidance that it controls. `share` is the
    tenant of the request, and its share of a server.
    """

    def __init__(self, net: LoadedControlNet, control: ControlInput) -> None:
        self.net = net
        self.share = control.share
        self.halves = {half: _on(net, embeds) for half, embeds in control.halves.items()}
        self.scales = _scales(net, control)
        self._image = process_image(control.image, control.height, control.width, net.layout.latent_scale)
        self._embedded: dict[bool, Tensor] = {}

    def embedded(self, rows: int) -> Tensor:
        """Return the embedded control image for a batch of `rows` rows: [channels, latent height, latent width]."""
        alone = rows == 1
        if alone not in self._embedded:
            self._embedded[alone] = self.net.embed(self._image, rows=rows)
        return self._embedded[alone]


def process_image(pixels: Tensor, height: int, width: int, latent_scale: int) -> Tensor:
    """Return a control image as Diffusers' ControlNet pipelines process it: float32, [3, height, width], 0 to 1.

    Args:
        pixels: uint8, [height, width, 3] in the image's own size.
    """
    processor = VaeImageProcessor(vae_scale_factor=latent_scale, do_convert_rgb=True, do_normalize=False)
    image = PIL.Image.fromarray(pixels.cpu().numpy())
    processed: Tensor = processor.preprocess(image, height=height, width=width)[0]
    return processed.to(torch.float32)


def _scales(net: LoadedControlNet, control: ControlInput) -> list[float | Tensor]:
    points = len(net.layout.points)
    if not control.guess_mode:
        return [control.scale] * points
    # As in Diffusers: .1 at the first point to 1 at the middle, as tensors, so that half precision rounds alike.
    return list(torch.logspace(-1, 0, points, device=net.device) * control.scale)


def _on(net: LoadedControlNet, embeds: Embeds) -> Embeds:
    """Return the conditions on the network's device. Only the prompt is converted: the network converts the others."""
    here = embeds.map(open_device(net.device).to_device)
    return replace(here, prompt=here.prompt.to(net.dtype))
