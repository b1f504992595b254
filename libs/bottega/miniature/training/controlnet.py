"""The stage of a ControlNet: it learns to put things where its control image says, whatever the prompt says of places.

The UNet and the text encoders stay as they are. It knows no files.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import ControlNetModel, EulerDiscreteScheduler

from bottega.miniature.scenes import DRAWN, any_caption, elsewhere, find_edges, unplaced_caption
from bottega.miniature.training.attention import PlainAttention
from bottega.miniature.training.average import Average
from bottega.miniature.training.corpus import Corpus, Latents, foreground
from bottega.miniature.training.device import half_precision
from bottega.miniature.training.parts import Parts
from bottega.miniature.training.unet import UnetRecipe, encode_text, loss_weight

# Of the layers that see the control image. As many as the VAE has: each but the first halves the side.
_EMBEDDING_CHANNELS = (16, 24, 32)
# How single steps and elements count is the UNet's matter.
_WEIGHTS = UnetRecipe()


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
        self._parts, self._corpus, self._latents, self._recipe = parts, corpus, latents, recipe
        for network in parts.networks.values():
            network.requires_grad_(False).eval()
        self._unet, self._net = parts["unet"], fresh_controlnet(parts["unet"])
        parts.networks[controlnet_folder(recipe.kind)] = self._net
        for network in (self._unet, self._net):
            network.set_attn_processor(PlainAttention())
        self._parameters = list(self._net.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.rate, weight_decay=0.01, betas=(0.9, 0.98), fused=True
        )
        self._average = Average([self._net], recipe.decay)
        self._foreground = foreground(corpus, corpus.images.shape[-1] // latents.mean.shape[-1])
        side = float(corpus.images.shape[-1])
        self._time_ids = torch.tensor([side, side, 0.0, 0.0, side, side])
        scheduler = EulerDiscreteScheduler.from_pretrained(parts.folder / "scheduler")
        self._signal: torch.Tensor = scheduler.alphas_cumprod

    def step(self, number: int, rate: float) -> float:
        """One batch: noise, control images, prediction, weighted squared error, optimizer, average."""
        generator = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + number)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate * rate
        with half_precision(self._parts.device):
            loss = self._loss(generator, random.Random(number))
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._average.follow(number)
        return float(loss.detach())

    def finish(self) -> None:
        """Leaves the averaged weights in the ControlNet."""
        self._average.apply()

    def state(self) -> dict[str, Any]:
        """Weights, their average, and the optimizer's moments."""
        return {
            "net": self._net.state_dict(),
            "average": self._average.state(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        self._net.load_state_dict(state["net"])
        self._average.load_state(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        count, device = self._recipe.rows, self._parts.device
        rows = torch.randint(len(self._corpus), (count,), generator=generator)
        clean = self._latents.sample(rows, generator) * self._parts["vae"].config.scaling_factor
        noise = torch.randn(clean.shape, generator=generator).to(device)
        times = torch.randint(len(self._signal), (count,), generator=generator)
        signal = self._signal[times][:, None, None, None].to(device)
        noisy = signal.sqrt() * clean.to(device) + (1 - signal).sqrt() * noise
        told = {**self._told(rows, rng), "return_dict": False}
        seen = torch.stack([_pixels(self._control(row, rng)) for row in rows.tolist()]).to(device)
        down, middle = self._net(noisy, times.to(device), controlnet_cond=seen, **told)
        residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
        (guess,) = self._unet(noisy, times.to(device), **told, **residuals)
        where = 1.0 + _WEIGHTS.foreground_weight * self._foreground[rows].to(device)
        weight = loss_weight(signal, _WEIGHTS) * where / where.mean()
        loss: torch.Tensor = (weight * (guess.float() - noise).square()).mean()
        return loss

    @torch.no_grad()
    def _told(self, rows: torch.Tensor, rng: random.Random) -> dict[str, Any]:
        """What both networks are told of each row; an empty prompt is zeros, as in the pipeline."""
        context, pooled = encode_text(self._parts, [self.prompt(row, rng) for row in rows.tolist()])
        device, share = self._parts.device, self._recipe.empty_share
        said = torch.tensor([float(rng.random() >= share) for _ in rows], device=device)
        added = {"text_embeds": pooled * said[:, None], "time_ids": self._time_ids.to(device).expand(len(rows), -1)}
        return {"encoder_hidden_states": context * said[:, None, None], "added_cond_kwargs": added}

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
