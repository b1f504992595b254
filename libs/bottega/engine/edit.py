"""An edit of one image: the masked region is redrawn, and the rest is restored after every evaluation.

This follows Diffusers' StableDiffusionXLInpaintPipeline with a UNet of four input channels. The module handles the
latents of one request; it does not know the other requests of the batch or what blocks compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from bottega.model.model import Model
from bottega.model.samplers import Sampler

Trajectory = Mapping[int, Tensor]
"""Latents [1, channels, height, width] of an earlier generation, divided by its sampler's signal.

The key is the evaluation of the edit before which the latent replaces the part outside the mask.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edit:
    """An edit of one image: the masked region is generated anew, and everything else stays as it was."""

    image_latent: Tensor
    """The latent of the whole image, [1, channels, height, width], in the backbone's scale."""
    noise: Tensor
    """Standard normal noise, in the shape of `image_latent`."""
    mask: Tensor
    """[1, 1, height, width], 1 where the image is redrawn and 0 elsewhere, in the latents' dtype."""
    trajectory: Trajectory | None = None
    """Latents that restore the part outside the mask, for every evaluation; None to use the noised image."""

    def start(self, sampler: Sampler, evaluation: int, strength: float) -> Tensor:
        """Return the latent before the first evaluation. At strength 1 it starts from noise alone."""
        if strength == 1.0:
            latent = self.noise * sampler.init_noise_sigma
        else:
            latent = sampler.add_noise(self.image_latent, self.noise, evaluation)
        # Always contiguous: batches and checkpoints are, and the last bits of a sum depend on the memory layout.
        return (latent if self.trajectory is None else self.put_back(latent, sampler, evaluation)).contiguous()

    def put_back(self, latent: Tensor, sampler: Sampler, evaluation: int) -> Tensor:
        """Return the latent before `evaluation`, with the image's own latent outside the mask.

        After the last one, the image is restored without noise. `latent` is the result of the evaluation before, which
        `sampler` computed.
        """
        if evaluation == sampler.evaluations:
            return self.paste(latent)
        if self.trajectory is not None:
            return self._outside(self.trajectory[evaluation] * sampler.signal(evaluation), latent)
        return self._outside(sampler.add_noise(self.image_latent, self.noise, evaluation), latent)

    def paste(self, latent: Tensor) -> Tensor:
        """Return the image's latent with its masked region taken from `latent`. Both are free of noise."""
        return self._outside(self.image_latent, latent)

    def _outside(self, image: Tensor, drawn: Tensor) -> Tensor:
        return ((1 - self.mask) * image + self.mask * drawn).contiguous()


def latent_mask(model: Model, mask: Tensor) -> Tensor:
    """Resize a mask of pixels, uint8 [height, width] of 0 and 1, to the size of a latent: [1, 1, height, width]."""
    size = mask.shape[0] // model.latent_scale, mask.shape[1] // model.latent_scale
    # Nearest, as in prepare_mask_latents: the first pixel of each latent element decides.
    return model.runtime.to_device(functional.interpolate(mask[None, None].float(), size=size), model.dtype)
