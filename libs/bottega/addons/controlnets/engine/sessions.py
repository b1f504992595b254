"""Sessions of ControlNets, and forward passes of their rows.

A session is the use of one ControlNet by one request. A forward pass computes rows of any of a ControlNet's sessions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import PIL.Image
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from bottega.adapter_rules import refused_mode
from bottega.addons.controlnets.engine.network import LoadedControlNet, UnionImages
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.device.devices import open_device
from bottega.errors import ControlNetUnusable
from bottega.model.backbone import Inputs
from bottega.model.rows import Embeds, Half


class ControlSession:
    """A request's use of one ControlNet.

    `scales` has the factor for each residual. `halves` are the halves of guidance that it controls. `share` is the
    tenant of the request, and its share of a server. `modes` has the control mode of each image of a union.

    Args:
        images: The images of the request's sessions by what they depend on, to which new ones are added.

    Raises:
        ControlNetUnusable: The ControlNet is a union and has no such mode, or is none; or it reads latents of images
            and got pixels, or the other way round.
    """

    def __init__(
        self, net: LoadedControlNet, control: ControlInput, images: dict[Hashable, ControlImages] | None = None
    ) -> None:
        for mode in control.modes or (None,):
            if why := refused_mode(control.name, mode, net.modes, net.layout.base):
                raise ControlNetUnusable(why)
        reads, got = ("pixels" if given else "latents" for given in (not net.layout.patch, not control.latent_scaling))
        if reads != got:
            raise ControlNetUnusable(f"ControlNet {control.name} reads {reads} of its image, and got {got}")
        self.net = net
        self.share = control.share
        self.modes = control.modes
        self.image_scales = control.image_scales or (1.0,) * len(control.modes)
        self.halves = {half: _on(net, embeds) for half, embeds in control.halves.items()}
        self.scales = _scales(net, control)
        known = {} if images is None else images
        key = net, control.height, control.width, *map(id, control.images)
        if key not in known:
            known[key] = ControlImages(net, control)
        self._images = known[key]
        size = [side // max(1, net.layout.latent_scale) for side in (control.height, control.width)]
        height, width = list(control.images[0].shape[1:]) if control.latent_scaling else size
        self.latent_size = height, width
        """Height and width of the latent."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of the samples of its rows: [channels, height, width], or [tokens, width] if the net reads tokens."""
        layout = self.net.layout
        if self.net.reads_tokens:
            return layout.shapes(*self.latent_size)[0]
        return layout.latent_channels, *self.latent_size

    @property
    def batch_key(self) -> Hashable:
        """Key that the sessions of one forward pass share: the network, and the scales of a union's images."""
        return self.net, self.image_scales

    def embedded(self, rows: int) -> list[Tensor]:
        """Return the embedded control images for a batch of `rows` rows; see `LoadedControlNet.embed`."""
        return self._images.embedded(rows)


class ControlImages:
    """The control images of one or several sessions of a request, processed and embedded for one ControlNet."""

    def __init__(self, net: LoadedControlNet, control: ControlInput) -> None:
        self._net = net
        if control.latent_scaling is None:
            size = control.height, control.width, net.layout.latent_scale
            self._processed = [process_image(image, *size) for image in control.images]
        else:
            shift, factor = control.latent_scaling
            # Source: StableDiffusion3ControlNetPipeline of Diffusers.
            shift = 0.0 if net.network.config.get("force_zeros_for_pooled_projection") else shift
            self._processed = [(image - shift) * factor for image in control.images]
        self._embedded: dict[bool, list[Tensor]] = {}

    def embedded(self, rows: int) -> list[Tensor]:
        """Return the embedded images for a batch of `rows` rows; see `LoadedControlNet.embed`."""
        alone = rows == 1
        if alone not in self._embedded:
            self._embedded[alone] = [self._net.embed(image, rows=rows) for image in self._processed]
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


def stretched(pixels: Tensor, height: int, width: int) -> Tensor:
    """Return a control image, uint8 [height, width, 3], in the picture's size, stretched as Diffusers does."""
    image = PIL.Image.fromarray(pixels.cpu().numpy())
    resized = VaeImageProcessor().resize(image, height, width)
    return torch.from_numpy(np.array(resized))


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlRow:
    """A batch row: the conditional or the unconditional half of a session at one step."""

    session: ControlSession
    half: Half
    sample: Tensor
    """The scaled latent, of the session's `sample_shape`."""
    timestep: Tensor
    """The timestep, a scalar."""


def run_group(rows: Sequence[ControlRow], *, fixed_rows: int = 0) -> list[Tensor]:
    """Return what `stream_group` yields, sorted by index."""
    by_point = dict(stream_group(rows, fixed_rows=fixed_rows))
    return [by_point[point] for point in range(len(by_point))]


@torch.inference_mode()
def stream_group(rows: Sequence[ControlRow], *, fixed_rows: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield the residuals of rows that share `batch_key`, shape and number of tokens, at scale 1.

    Args:
        fixed_rows: Pads the batch to this many rows, so that results are the same in every batch; 0 for no padding.

    Yields:
        Index of each residual, in the order in which the base model needs them, and the residual of all rows, including
        the padding. A transformer's is yielded as soon as its block has run.
    """
    net = rows[0].session.net
    group = [*rows, *[rows[-1]] * (fixed_rows - len(rows))]
    embeds = Embeds.stack([row.session.halves[row.half] for row in group])
    to_device = open_device(net.device).to_device
    inputs = Inputs(
        sample=to_device(torch.stack([row.sample for row in group]), net.dtype),
        timestep=to_device(torch.stack([row.timestep.float() for row in group])),
        prompt_embeds=embeds.prompt,
        added=embeds.added,
    )
    by_row = [row.session.embedded(len(group)) for row in group]
    embedded = [torch.stack(images) for images in zip(*by_row, strict=True)]
    yield from net.residuals(inputs, embedded, _union_images([row.session for row in group]))


def _union_images(sessions: Sequence[ControlSession]) -> UnionImages | None:
    """Return the modes and scales of the images in rows of these sessions; None if the network is not a union."""
    first = sessions[0]
    if not first.modes:
        return None
    modes = torch.tensor([session.modes for session in sessions])
    return UnionImages(modes=open_device(first.net.device).to_device(modes), scales=first.image_scales)


def computes_one_session(rows: Sequence[ControlRow]) -> bool:
    """Return whether the batch has exactly the rows of one session at one step, as in stock Diffusers.

    Otherwise sums are rounded differently in half precision.
    """
    session = rows[0].session
    return len(rows) == len(session.halves) and {(row.session, row.half) for row in rows} == {
        (session, half) for half in session.halves
    }
