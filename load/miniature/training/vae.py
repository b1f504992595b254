"""The VAE's stages: it learns sharper edges. As a whole, after which the UNet must be trained on; or its decoder
alone, so that latents and all that was trained on them stay.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, Learner
from load.miniature.training.device import half_precision
from load.miniature.training.parts import Parts

_DECODER = ("decoder", "post_quant_conv")
# The VAE's modules that learn, in each of the two stages.
_LEARN = {"decoder": _DECODER, "vae": (*_DECODER, "encoder", "quant_conv")}
_MEASURED_PICTURES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeRecipe:
    """edge_weight: of an error where the picture changes at once, beside 1 elsewhere.

    blur: standard deviation of noise added to the latents, in their own units after scaling: what the UNet
    leaves is never as clean as what the encoder gives. kl_weight: of the divergence of the encoder's latents from a
    normal distribution, each element's, beside 1 of a pixel's error.
    """

    rows: int = 16
    rate: float = 1e-3
    edge_weight: float = 4.0
    blur: float = 0.05
    decay: float = 0.995
    kl_weight: float = 1e-4
    seed: int = 0


class VaeStage:
    """Stage of training.loop.

    latents: of the corpus, for a decoder that learns alone; None lets the encoder learn too.
    """

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents | None, recipe: VaeRecipe) -> None:
        self.name = "vae" if latents is None else "decoder"
        self._device = parts.device
        self._vae, self._corpus, self._latents, self._recipe = parts["vae"], corpus, latents, recipe
        self._vae.requires_grad_(False).to(memory_format=torch.channels_last)
        modules = [getattr(self._vae, name).requires_grad_(True).train() for name in _LEARN[self.name]]
        learner = Learner(parameters=[p for module in modules for p in module.parameters()], rate=recipe.rate)
        self._descent = Descent([learner], decay=recipe.decay, seed=recipe.seed, weight_decay=0.0)

    def step(self, number: int, rate: float) -> float:
        """One batch: latents with a little noise, decoded; the absolute error, heavier at edges."""
        return self._descent.step(number, rate, self._loss)

    def finish(self) -> None:
        """Leaves the averaged weights in the network, and the factor by which its latents' deviation is 1."""
        self._descent.finish()
        if self._latents is None:
            self._vae.register_to_config(scaling_factor=1.0 / self._deviation())

    def state(self) -> dict[str, Any]:
        """Weights, their average, the optimizer's moments, and the scaling factor that the steps' noise is given in."""
        return {
            "vae": self._vae.state_dict(),
            "scaling_factor": self._vae.config.scaling_factor,
            **self._descent.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        self._vae.load_state_dict(state["vae"])
        # A run that ended before the last step has left the folder's model another one.
        self._vae.register_to_config(scaling_factor=state["scaling_factor"])
        self._descent.load_state(state)

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
        """Of the latents of the first pictures."""
        rows = torch.arange(min(len(self._corpus), _MEASURED_PICTURES))
        pictures = self._corpus.pictures(rows).to(self._device, memory_format=torch.channels_last)
        generator = torch.Generator().manual_seed(self._recipe.seed)
        return float(self._vae.encode(pictures).latent_dist.sample(generator).std())

    def _see(
        self, rows: torch.Tensor, pictures: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of the pictures, and how far they diverge; for a decoder that learns alone, as they are kept."""
        if self._latents is not None:
            return self._latents.sample(rows, generator).to(self._device), torch.zeros((), device=self._device)
        seen = self._vae.encode(pictures.contiguous(memory_format=torch.channels_last)).latent_dist
        mean, std = seen.mean.float(), seen.std.float()
        divergence = 0.5 * (mean.square() + std.square() - 1.0 - seen.logvar.float()).mean()
        return mean + std * torch.randn(mean.shape, generator=generator).to(self._device), divergence


def edges(pictures: torch.Tensor) -> torch.Tensor:
    """1 where a neighbour differs much, 0 on flat ground: (rows, 1, side, side)."""
    across = torch.nn.functional.pad((pictures[..., 1:] - pictures[..., :-1]).abs(), (0, 1))
    down = torch.nn.functional.pad((pictures[..., 1:, :] - pictures[..., :-1, :]).abs(), (0, 0, 0, 1))
    steep = (across + down).amax(dim=1, keepdim=True).clamp(max=1.0)
    return torch.nn.functional.max_pool2d(steep, 3, stride=1, padding=1)
