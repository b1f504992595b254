"""The VAE's stages: it learns sharper edges.

It learns as a whole, after which the UNet must be trained on; or its decoder alone, so that latents and all that was
trained on them stay.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, DescentStage, Learner, half_precision
from load.miniature.training.parts import Parts

_DECODER = ("decoder", "post_quant_conv")
# The VAE's modules that learn, in each of the two stages.
_LEARN = {"decoder": _DECODER, "vae": (*_DECODER, "encoder", "quant_conv")}
_MEASURED_PICTURES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeRecipe:
    """Settings of the training."""

    rows: int = 16
    rate: float = 1e-3
    edge_weight: float = 4.0
    """Weight of an error where the picture changes at once, beside 1 elsewhere."""
    blur: float = 0.05
    """Standard deviation of noise added to the latents, in units after scaling: the UNet's are never quite clean."""
    decay: float = 0.995
    kl_weight: float = 1e-4
    """Weight of the latents' divergence from a normal distribution, of each element, beside 1 of a pixel's error."""
    seed: int = 0


class VaeStage(DescentStage):
    """The stage of the VAE.

    Args:
        parts: The networks.
        corpus: The pictures.
        latents: Of the corpus, for a decoder that learns alone; None lets the encoder learn too.
        recipe: The settings.
    """

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents | None, recipe: VaeRecipe) -> None:
        name = "vae" if latents is None else "decoder"
        self._device = parts.device
        self._vae, self._corpus, self._latents, self._recipe = parts["vae"], corpus, latents, recipe
        self._vae.requires_grad_(False).to(memory_format=torch.channels_last)
        modules = [getattr(self._vae, part).requires_grad_(True).train() for part in _LEARN[name]]
        learner = Learner(parameters=[p for module in modules for p in module.parameters()], rate=recipe.rate)
        super().__init__(name, Descent([learner], decay=recipe.decay, seed=recipe.seed, weight_decay=0.0))

    def finish(self) -> None:
        """Leave the averaged weights in the network, and the factor by which its latents' deviation is 1."""
        super().finish()
        if self._latents is None:
            self._vae.register_to_config(scaling_factor=1.0 / self._deviation())

    def _weights(self) -> dict[str, Any]:
        # The steps' noise is given in units of the scaling factor.
        return {"vae": self._vae.state_dict(), "scaling_factor": self._vae.config.scaling_factor}

    def _load_weights(self, state: dict[str, Any]) -> None:
        self._vae.load_state_dict(state["vae"])
        # A run that ended before the last step has left the folder's model another one.
        self._vae.register_to_config(scaling_factor=state["scaling_factor"])

    def _loss(self, generator: torch.Generator, _: random.Random) -> torch.Tensor:
        rows = torch.randint(len(self._corpus), (self._recipe.rows,), generator=generator)
        pictures = self._corpus.pictures(rows).to(self._device)
        with half_precision(self._device):
            latents, divergence = self._see(rows, pictures, generator)
            blur = self._recipe.blur / self._vae.config.scaling_factor
            latents = latents + blur * torch.randn(latents.shape, generator=generator).to(self._device)
            drawn = self._vae.decode(latents.contiguous(memory_format=torch.channels_last)).sample
        weight = 1.0 + self._recipe.edge_weight * edges(pictures)
        loss: torch.Tensor = (weight * (drawn.float() - pictures).abs()).mean() + self._recipe.kl_weight * divergence
        return loss

    @torch.no_grad()
    def _deviation(self) -> float:
        """Return the deviation of the latents of the first pictures."""
        rows = torch.arange(min(len(self._corpus), _MEASURED_PICTURES))
        pictures = self._corpus.pictures(rows).to(self._device, memory_format=torch.channels_last)
        generator = torch.Generator().manual_seed(self._recipe.seed)
        return float(self._vae.encode(pictures).latent_dist.sample(generator).std())

    def _see(
        self, rows: torch.Tensor, pictures: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pictures' latents and their divergence; for a decoder that learns alone, those that are kept."""
        if self._latents is not None:
            return self._latents.sample(rows, generator).to(self._device), torch.zeros((), device=self._device)
        seen = self._vae.encode(pictures.contiguous(memory_format=torch.channels_last)).latent_dist
        mean, std = seen.mean.float(), seen.std.float()
        divergence = 0.5 * (mean.square() + std.square() - 1.0 - seen.logvar.float()).mean()
        return mean + std * torch.randn(mean.shape, generator=generator).to(self._device), divergence


def edges(pictures: torch.Tensor) -> torch.Tensor:
    """Return 1 where a neighbour differs much, 0 on flat ground: (rows, 1, side, side)."""
    across = torch.nn.functional.pad((pictures[..., 1:] - pictures[..., :-1]).abs(), (0, 1))
    down = torch.nn.functional.pad((pictures[..., 1:, :] - pictures[..., :-1, :]).abs(), (0, 0, 0, 1))
    steep = (across + down).amax(dim=1, keepdim=True).clamp(max=1.0)
    return torch.nn.functional.max_pool2d(steep, 3, stride=1, padding=1)
