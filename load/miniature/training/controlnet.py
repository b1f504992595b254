"""The stage of a ControlNet: it learns to put things where its control image has them, whatever the prompt has.

The network that draws and the text encoders stay as they are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import ControlNetModel

from bottega.miniature.scenes import DRAWN, any_caption, elsewhere, find_edges, unplaced_caption
from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, DescentStage, Learner, PlainAttention, half_precision
from load.miniature.training.noise import Lessons, NoiseLessons, NoisyLatents, scheduler_signal
from load.miniature.training.parts import Parts

# Of the layers that see the control image. As many as the VAE has: each but the first halves the side.
_EMBEDDING_CHANNELS = (16, 24, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetRecipe:
    """Settings of the training."""

    name: str
    """Name of the stage and of the ControlNet."""
    kind: str
    """A key of scenes.DRAWN."""
    rows: int = 32
    """Rows of a batch."""
    rate: float = 1e-3
    wrong_share: float = 0.35
    """Share of rows whose prompt has other places than the control image."""
    unplaced_share: float = 0.15
    """Share of rows whose prompt has no places."""
    empty_share: float = 0.1
    """Share of rows with an empty prompt; all others are right."""
    found_share: float = 0.5
    """Share of outlines that are found in the picture, as in practice, and not drawn."""
    decay: float = 0.995
    seed: int = 0


class ControlNetStage(DescentStage):
    """The stage of one kind of ControlNet."""

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: ControlNetRecipe) -> None:
        self._parts, self._corpus, self._recipe = parts, corpus, recipe
        for network in parts.networks.values():
            network.requires_grad_(False).eval()
        self._denoiser = parts[parts.denoiser]
        self._net = self._fresh()
        parts.networks[controlnet_folder(recipe.name)] = self._net
        for network in (self._denoiser, self._net):
            network.set_attn_processor(self._attention())
        learner = Learner(parameters=list(self._net.parameters()), rate=recipe.rate)
        super().__init__(recipe.name, Descent([learner], decay=recipe.decay, seed=recipe.seed, betas=(0.9, 0.98)))
        self._lessons = self._make_lessons(corpus, latents)

    def _fresh(self) -> Any:
        return fresh_controlnet(self._denoiser)

    def _attention(self) -> Any:
        return PlainAttention()

    def _make_lessons(self, corpus: Corpus, latents: Latents) -> Lessons:
        return NoiseLessons(self._parts, corpus, latents, scheduler_signal(self._parts))

    def _weights(self) -> dict[str, Any]:
        return {"net": self._net.state_dict()}

    def _load_weights(self, state: dict[str, Any]) -> None:
        self._net.load_state_dict(state["net"])

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        device = self._parts.device
        batch = self._lessons.draw(self._recipe.rows, generator)
        with half_precision(device):
            told = self._told(batch.rows, rng)
            controls = torch.stack([_pixels(self._control(row, rng)) for row in batch.rows.tolist()]).to(device)
            return self._lessons.loss(batch, self._guess(batch, told, controls))

    def _guess(self, batch: NoisyLatents, told: dict[str, Any], controls: torch.Tensor) -> torch.Tensor:
        """Return what the network that draws predicts with the ControlNet's residuals.

        Args:
            batch: The latents.
            told: Both networks' inputs of each row.
            controls: Control images, (rows, 3, side, side) in 0 to 1.
        """
        told = {**told, "return_dict": False}
        down, middle = self._net(batch.noisy, batch.times, controlnet_cond=controls, **told)
        residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
        guess: torch.Tensor = self._denoiser(batch.noisy, batch.times, **told, **residuals)[0]
        return guess

    @torch.no_grad()
    def _told(self, rows: torch.Tensor, rng: random.Random) -> dict[str, Any]:
        """Return both networks' inputs of each row."""
        prompts = [self.prompt(row, rng) for row in rows.tolist()]
        kept = torch.tensor([float(rng.random() >= self._recipe.empty_share) for _ in rows], device=self._parts.device)
        return self._lessons.told(prompts, kept)

    def prompt(self, row: int, rng: random.Random) -> str:
        """Return a prompt that is right, wrong or silent about places, but never of a scene that is held out."""
        scene, chance = self._corpus.scenes[row], rng.random()
        if chance < self._recipe.wrong_share:
            others = [other for other in elsewhere(scene) if not other.held_out]
            return any_caption(rng.choice(others), rng) if others else unplaced_caption(scene)
        if chance < self._recipe.wrong_share + self._recipe.unplaced_share:
            return unplaced_caption(scene)
        return any_caption(scene, rng)

    def _control(self, row: int, rng: random.Random) -> PIL.Image.Image:
        if self._recipe.kind == "edges" and rng.random() < self._recipe.found_share:
            picture = self._corpus.images[row].permute(1, 2, 0).numpy()
            return find_edges(PIL.Image.fromarray(picture), picture.shape[0])
        return DRAWN[self._recipe.kind](self._corpus.layouts[row])


def controlnet_folder(name: str) -> str:
    """Return the place of a ControlNet in the model's folder."""
    return f"controlnets/{name}"


def fresh_controlnet(unet: Any) -> Any:
    """Return a ControlNet that begins as the UNet's encoder and changes nothing yet."""
    net = ControlNetModel.from_unet(
        unet, load_weights_from_unet=False, conditioning_embedding_out_channels=_EMBEDDING_CHANNELS
    ).to(unet.device)
    net.load_state_dict(unet.state_dict(), strict=False)  # it lacks the decoder, and has layers of its own
    return net


def _pixels(control: PIL.Image.Image) -> torch.Tensor:
    """Return (3, side, side) in 0 to 1, as the pipeline has it."""
    return torch.from_numpy(np.array(control, dtype=np.float32)).permute(2, 0, 1) / 255.0
