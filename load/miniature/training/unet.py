"""The UNet's stage: predicts the noise in latents from captions, together with both text encoders.

The text encoders learn from the UNet's loss too, at a lower rate: place and binding live in them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from load.miniature.training.attention import PlainAttention
from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, Learner
from load.miniature.training.device import half_precision
from load.miniature.training.noise import NoiseLessons
from load.miniature.training.parts import Parts

TRAINED = ("unet", "text_encoder", "text_encoder_2")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnetRecipe:
    """How the UNet is trained; found by short runs, see the README beside the weights.

    empty_share: of rows without a prompt, for guidance. compiled: lets PyTorch compile the UNet, which takes minutes
    and then saves a third of each step.
    """

    rows: int = 64
    rate: float = 1e-3
    text_rate: float = 4e-4
    empty_share: float = 0.1
    decay: float = 0.999
    seed: int = 0
    compiled: bool = False


class UnetStage:
    """Stage of training.loop."""

    name = "unet"

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: UnetRecipe) -> None:
        self._parts, self._corpus, self._recipe = parts, corpus, recipe
        self._unet = parts["unet"].train()
        self._unet.set_attn_processor(PlainAttention())
        text = [parameter for name in TRAINED[1:] for parameter in parts[name].requires_grad_(True).parameters()]
        self._forward = torch.compile(self._unet) if recipe.compiled else self._unet
        self._descent = Descent(
            [
                Learner(parameters=list(self._unet.parameters()), rate=recipe.rate),
                Learner(parameters=text, rate=recipe.text_rate),
            ],
            decay=recipe.decay,
            seed=recipe.seed,
            betas=(0.9, 0.98),
        )
        self._lessons = NoiseLessons(parts, corpus, latents, _signal())

    def step(self, number: int, rate: float) -> float:
        """One batch: noise, prediction, weighted squared error."""
        return self._descent.step(number, rate, self._loss)

    def finish(self) -> None:
        """Leaves the averaged weights in the networks."""
        self._descent.finish()

    def state(self) -> dict[str, Any]:
        """Weights, their average, and the optimizer's moments."""
        networks = {name: self._parts[name].state_dict() for name in TRAINED}
        return {"networks": networks, **self._descent.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        for name in TRAINED:
            self._parts[name].load_state_dict(state["networks"][name])
        self._descent.load_state(state)

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        recipe, device = self._recipe, self._parts.device
        batch = self._lessons.draw(recipe.rows, generator)
        said = (torch.rand(recipe.rows, generator=generator) >= recipe.empty_share).float().to(device)
        with half_precision(device):
            told = self._lessons.told(self._corpus.captions(batch.rows, rng), said)
            (guess,) = self._forward(batch.noisy, batch.times, **told, return_dict=False)
            return self._lessons.loss(batch, guess)


def _signal() -> torch.Tensor:
    """alphas_cumprod of the miniature's scheduler: "scaled_linear" from .00085 to .012 over 1,000 steps."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    return torch.cumprod(1 - betas, dim=0).float()
