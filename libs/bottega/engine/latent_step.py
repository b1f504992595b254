"""What a step does to a request's latent: guidance, the sampler's step and, in an edit, the rest of the image put back.

An edit redraws the masked region of one image, and restores the rest after every evaluation. This follows Diffusers'
StableDiffusionXLInpaintPipeline with a UNet of four input channels. The module handles the latents of one request; it
does not know the other requests of the batch or what blocks compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import rescale_noise_cfg
from torch import Tensor
from torch.nn import functional

from bottega.model.model import Model
from bottega.model.operations import Operations
from bottega.model.rows import Half
from bottega.model.samplers import Sampler, SamplerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Classifier-free guidance of a request, as in Diffusers' pipelines."""

    scale: float
    rescale: float = 0.0
    normalization: float = 0.0
    """See ResolvedSpec.cfg_normalization."""


def guided_step(
    sampler: Sampler,
    evaluation: int,
    latent: Tensor,
    noise: Mapping[Half, Tensor],
    *,
    guidance: Guidance,
    generator: torch.Generator | None,
    operations: Operations,
) -> tuple[Tensor, Tensor]:
    """Apply guidance and the sampler to an evaluation. Return the next latent, and an estimate of the finished one.

    Args:
        latent: [1, channels, height, width].
        noise: The prediction for each half of guidance, [channels, height, width].
        generator: Random generator on the CPU, for samplers that draw noise.
    """
    predicted = {half: prediction[None].to(latent.dtype) for half, prediction in noise.items()}
    conditional, unconditional = predicted[Half.CONDITIONAL], predicted.get(Half.UNCONDITIONAL)
    if operations.guided_euler is not None and guidance.rescale == guidance.normalization == 0.0:
        euler = sampler.euler_step(evaluation)
        if euler is not None:
            made = operations.guided_euler(conditional, unconditional, latent, scale=guidance.scale, step=euler)
            sampler.count_step()
            return made
    combined = conditional
    if unconditional is not None:
        combined = unconditional + guidance.scale * (conditional - unconditional)
        if guidance.rescale > 0.0:
            combined = rescale_noise_cfg(combined, conditional, guidance_rescale=guidance.rescale)
        if guidance.normalization > 0.0:
            longest = guidance.normalization * torch.linalg.vector_norm(conditional)
            combined = combined * (longest / torch.linalg.vector_norm(combined)).clamp(max=1.0)
    following, estimate = sampler.step(combined, evaluation, latent, generator)
    return following.to(latent.dtype), estimate


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
    puts_back: bool = True
    """Whether the part outside the mask is put back after every evaluation. Flux Fill draws that part instead: its
    network reads the image."""

    def start(self, sampler: Sampler, evaluation: int, strength: float) -> Tensor:
        """Return the latent before the first evaluation. At strength 1 it starts from noise alone."""
        if strength == 1.0 and self.puts_back:
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
        if not self.puts_back:
            return latent
        if evaluation == sampler.evaluations:
            return self.paste(latent)
        if self.trajectory is not None:
            return self._outside(self.trajectory[evaluation] * sampler.signal(evaluation), latent)
        return self._outside(sampler.add_noise(self.image_latent, self.noise, evaluation), latent)

    def paste(self, latent: Tensor) -> Tensor:
        """Return the image's latent with its masked region taken from `latent`. Both are free of noise."""
        return self._outside(self.image_latent, latent) if self.puts_back else latent

    def _outside(self, image: Tensor, drawn: Tensor) -> Tensor:
        return ((1 - self.mask) * image + self.mask * drawn).contiguous()


def make_edit(model: Model, image_latent: Tensor, noise: Tensor, mask: Tensor) -> Edit:
    """Return the edit of an image. `mask` is a result of `latent_mask`."""
    of_pixels = model.mask_channels > 1
    mask = mask.amax(dim=1, keepdim=True) if of_pixels else mask
    return Edit(image_latent=image_latent, noise=noise, mask=mask, puts_back=not of_pixels)


def latent_mask(model: Model, mask: Tensor) -> Tensor:
    """Convert a mask of pixels, uint8 [height, width] of 0 and 1, to [1, `Model.mask_channels`, height, width].

    Height and width of the result are those of a latent.
    """
    scale = model.latent_scale
    if model.mask_channels > 1:
        pixels = functional.pixel_unshuffle(mask[None, None].float(), scale)
        return model.runtime.to_device(pixels, model.dtype)
    size = mask.shape[0] // scale, mask.shape[1] // scale
    # Nearest, as in prepare_mask_latents: the first pixel of each latent element decides.
    return model.runtime.to_device(functional.interpolate(mask[None, None].float(), size=size), model.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestState:
    """The state of a request that another engine needs to continue it, besides its spec, mask and decisions."""

    evaluation: int
    """The next evaluation of the network."""
    latent: Tensor
    generator: Tensor
    sampler: SamplerState
    image_latent: Tensor | None = None
    """See `Edit.image_latent`; None if the request is no edit."""
    noise: Tensor | None = None
    """Standard normal noise, in the shape of `image_latent`."""
    image: Tensor | None = None
    """The masked image of `Row.image`, without the mask, which the request has."""
    step_caches: Mapping[str, Tensor] = field(default_factory=dict)
    """See `StepCaches.state`."""
