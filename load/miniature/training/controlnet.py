"""The stage of a ControlNet: it learns to put things where its control image says, whatever the prompt says of places.

The UNet and the text encoders stay as they are.
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
from load.miniature.training.attention import PlainAttention
from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, Learner
from load.miniature.training.device import half_precision
from load.miniature.training.noise import NoiseLessons, scheduler_signal
from load.miniature.training.parts import Parts

# Of the layers that see the control image. As many as the VAE has: each but the first halves the side.
_EMBEDDING_CHANNELS = (16, 24, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetRecipe:
    """kind: of scenes.DRAWN. rows: of a batch.

    wrong_share, unplaced_share, empty_share: of rows whose prompt says other places than the control image, says none,
    and is empty; all others are right.
    found_share: of outlines that are found in the picture, as people would, and not drawn.
    """

    kind: str
    rows: int = 32
    rate: float = 1e-3
    wrong_share: float = 0.35
    unplaced_share: float = 0.15
    empty_share: float = 0.1
    found_share: float = 0.5
    decay: float = 0.995
    seed: int = 0


class ControlNetStage:
    """Stage of training.loop."""

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: ControlNetRecipe) -> None:
        self.name = recipe.kind
        self._parts, self._corpus, self._recipe = parts, corpus, recipe
        for network in parts.networks.values():
            network.requires_grad_(False).eval()
        self._unet, self._net = parts["unet"], fresh_controlnet(parts["unet"])
        parts.networks[controlnet_folder(recipe.kind)] = self._net
        for network in (self._unet, self._net):
            network.set_attn_processor(PlainAttention())
        self._descent = Descent(
            [Learner(parameters=list(self._net.parameters()), rate=recipe.rate)],
            decay=recipe.decay,
            seed=recipe.seed,
            betas=(0.9, 0.98),
        )
        self._lessons = NoiseLessons(parts, corpus, latents, scheduler_signal(parts))

    def step(self, number: int, rate: float) -> float:
        """One batch: noise, control images, prediction, weighted squared error."""
        return self._descent.step(number, rate, self._loss)

    def finish(self) -> None:
        """Leaves the averaged weights in the ControlNet."""
        self._descent.finish()

    def state(self) -> dict[str, Any]:
        """Weights, their average, and the optimizer's moments."""
        return {"net": self._net.state_dict(), **self._descent.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        self._net.load_state_dict(state["net"])
        self._descent.load_state(state)

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        device = self._parts.device
        batch = self._lessons.draw(self._recipe.rows, generator)
        with half_precision(device):
            told = {**self._told(batch.rows, rng), "return_dict": False}
            seen = torch.stack([_pixels(self._control(row, rng)) for row in batch.rows.tolist()]).to(device)
            down, middle = self._net(batch.noisy, batch.times, controlnet_cond=seen, **told)
            residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
            (guess,) = self._unet(batch.noisy, batch.times, **told, **residuals)
            return self._lessons.loss(batch, guess)

    @torch.no_grad()
    def _told(self, rows: torch.Tensor, rng: random.Random) -> dict[str, Any]:
        """What both networks are told of each row."""
        prompts = [self.prompt(row, rng) for row in rows.tolist()]
        said = torch.tensor([float(rng.random() >= self._recipe.empty_share) for _ in rows], device=self._parts.device)
        return self._lessons.told(prompts, said)

    def prompt(self, row: int, rng: random.Random) -> str:
        """Right, wrong or silent about places; never the sentence of a scene that is held out."""
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


def controlnet_folder(kind: str) -> str:
    """Where the ControlNet of that kind is in the model's folder."""
    return f"controlnets/{kind}"


def fresh_controlnet(unet: Any) -> Any:
    """A ControlNet that begins as the UNet's encoder and changes nothing yet."""
    net = ControlNetModel.from_unet(
        unet, load_weights_from_unet=False, conditioning_embedding_out_channels=_EMBEDDING_CHANNELS
    ).to(unet.device)
    net.load_state_dict(unet.state_dict(), strict=False)  # it lacks the decoder, and has layers of its own
    return net


def _pixels(control: PIL.Image.Image) -> torch.Tensor:
    """(3, side, side) in 0 to 1, as the pipeline shows it."""
    return torch.from_numpy(np.array(control, dtype=np.float32)).permute(2, 0, 1) / 255.0
