"""One image's edit: a part of it is redrawn, and the rest is put back after every step.

As Diffusers' StableDiffusionXLInpaintPipeline does with a UNet of four input channels. Knows one request's latents;
does not know who else is in its batch, nor what blocks compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from bottega.diffusion.model.model import Model
from bottega.diffusion.model.samplers import Sampler

Trajectory = Mapping[int, Tensor]
"""The latents [1, channels, height, width] that a generation had, divided by its sampler's signal, by the step of the
edit that they stand before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edit:
    """image_latent: of the whole image, in the backbone's scale; noise: standard normal; [1, channels, height, width].

    mask: [1, 1, height, width] in their element type, 1 where the image is redrawn, else 0.
    trajectory: what is put back instead of the image with noise; has every step of the request.
    """

    image_latent: Tensor
    noise: Tensor
    mask: Tensor
    trajectory: Trajectory | None = None

    def start(self, sampler: Sampler, step: int, strength: float) -> Tensor:
        """The latent before the first step that runs; of strength 1 nothing of the image is left in it."""
        if strength == 1.0:
            latent = self.noise * sampler.init_noise_sigma
        else:
            latent = sampler.add_noise(self.image_latent, self.noise, step)
        # In one layout whatever it came from: groups and checkpoints have one, and a sum's last bits follow the layout.
        return (latent if self.trajectory is None else self.put_back(latent, sampler, step)).contiguous()

    def put_back(self, latent: Tensor, sampler: Sampler, step: int) -> Tensor:
        """The latent before `step`, all that is not redrawn as the image has it there.

        sampler: has just made the step before. After its last step there is no noise any more.
        """
        if step == sampler.steps:
            return self.paste(latent)
        if self.trajectory is not None:
            return self._outside(self.trajectory[step] * sampler.signal(step), latent)
        return self._outside(sampler.add_noise(self.image_latent, self.noise, step), latent)

    def paste(self, latent: Tensor) -> Tensor:
        """A latent without noise, within the image."""
        return self._outside(self.image_latent, latent)

    def _outside(self, image: Tensor, drawn: Tensor) -> Tensor:
        return ((1 - self.mask) * image + self.mask * drawn).contiguous()


def latent_mask(model: Model, mask: Tensor) -> Tensor:
    """A mask of pixels, uint8 [height, width] of 0 and 1, as a model's latents need it: [1, 1, height, width]."""
    size = mask.shape[0] // model.latent_scale, mask.shape[1] // model.latent_scale
    # Nearest: of each latent element the first pixel decides, as in prepare_mask_latents.
    return model.runtime.to_device(functional.interpolate(mask[None, None].float(), size=size), model.dtype)
