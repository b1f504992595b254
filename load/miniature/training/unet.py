"""The UNet's stage: predicts the noise in latents from captions, together with both text encoders.

The text encoders learn from the UNet's loss too, at a lower rate: place and binding live in them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, DescentStage, Learner, PlainAttention
from load.miniature.training.noise import NoiseLessons
from load.miniature.training.parts import Parts

TRAINED = ("unet", "text_encoder", "text_encoder_2")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnetRecipe:
    """Settings of the training; found by short runs, see the README beside the weights."""

    rows: int = 64
    rate: float = 1e-3
    text_rate: float = 4e-4
    empty_share: float = 0.1
    """Share of rows without a prompt, for guidance."""
    decay: float = 0.999
    seed: int = 0
    compiled: bool = False
    """Whether PyTorch compiles the UNet, which takes minutes and then saves a third of each step."""


class UnetStage(DescentStage):
    """The stage of the UNet and both text encoders."""

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: UnetRecipe) -> None:
        self._parts, self._recipe = parts, recipe
        self._unet = parts["unet"].train()
        self._unet.set_attn_processor(PlainAttention())
        text = [parameter for name in TRAINED[1:] for parameter in parts[name].requires_grad_(True).parameters()]
        self._forward = torch.compile(self._unet) if recipe.compiled else self._unet
        learners = [
            Learner(parameters=list(self._unet.parameters()), rate=recipe.rate),
            Learner(parameters=text, rate=recipe.text_rate),
        ]
        super().__init__("unet", Descent(learners, decay=recipe.decay, seed=recipe.seed, betas=(0.9, 0.98)))
        self._lessons = NoiseLessons(parts, corpus, latents, _signal())

    def _weights(self) -> dict[str, Any]:
        return {"networks": {name: self._parts[name].state_dict() for name in TRAINED}}

    def _load_weights(self, state: dict[str, Any]) -> None:
        for name in TRAINED:
            self._parts[name].load_state_dict(state["networks"][name])

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        recipe = self._recipe
        return self._lessons.captioned_loss(self._forward, recipe.rows, generator, rng, empty_share=recipe.empty_share)


def _signal() -> torch.Tensor:
    """Return alphas_cumprod of the miniature's scheduler: "scaled_linear" from .00085 to .012 over 1,000 steps."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    return torch.cumprod(1 - betas, dim=0).float()
