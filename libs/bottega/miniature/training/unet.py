"""The UNet's stage: predicts the noise in latents from captions, together with both text encoders.

The text encoders learn from the UNet's loss too, at a lower rate: place and binding live in them. It knows no files.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from bottega.miniature.training.attention import PlainAttention
from bottega.miniature.training.average import Average
from bottega.miniature.training.corpus import Corpus, Latents, foreground
from bottega.miniature.training.device import half_precision
from bottega.miniature.training.parts import Parts

TRAINED = ("unet", "text_encoder", "text_encoder_2")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnetRecipe:
    """How the UNet is trained; found by short runs, see the README beside the weights.

    empty_share: of rows without a prompt, for guidance. snr_cap: signal-to-noise ratio from which on steps with
    little noise count less (min-SNR, Hang et al. 2023). loud_cap: how much more than others the noisiest
    steps may count, where places and bindings are decided. foreground_weight: added where things are. compiled: lets
    PyTorch compile the UNet, which takes minutes and then saves a third of each step.
    """

    rows: int = 64
    rate: float = 1e-3
    text_rate: float = 4e-4
    empty_share: float = 0.1
    snr_cap: float = 5.0
    loud_cap: float = 6.0
    foreground_weight: float = 1.0
    decay: float = 0.999
    seed: int = 0
    compiled: bool = False


class UnetStage:
    """Stage of training.loop."""

    name = "unet"

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: UnetRecipe) -> None:
        self._parts, self._corpus, self._latents, self._recipe = parts, corpus, latents, recipe
        self._unet = parts["unet"].train()
        self._unet.set_attn_processor(PlainAttention())
        text = [parameter for name in TRAINED[1:] for parameter in parts[name].requires_grad_(True).parameters()]
        groups = [
            {"params": list(self._unet.parameters()), "lr": recipe.rate, "rate": recipe.rate},
            {"params": text, "lr": recipe.text_rate, "rate": recipe.text_rate},
        ]
        self._forward = torch.compile(self._unet) if recipe.compiled else self._unet
        self._optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
        self._average = Average([parts[name] for name in TRAINED], recipe.decay)
        scale = corpus.images.shape[-1] // latents.mean.shape[-1]
        self._foreground = foreground(corpus, scale)
        side = float(corpus.images.shape[-1])
        # Original size, crop, target size: what the pipeline says of an uncropped picture.
        self._time_ids = torch.tensor([side, side, 0.0, 0.0, side, side])
        self._signal = _signals()

    def step(self, number: int, rate: float) -> float:
        """One batch: noise, prediction, weighted squared error, optimizer, average."""
        generator = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + number)
        for group in self._optimizer.param_groups:
            group["lr"] = group["rate"] * rate
        with half_precision(self._parts.device):
            loss = self._loss(generator, random.Random(number))
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_([p for g in self._optimizer.param_groups for p in g["params"]], 1.0)
        self._optimizer.step()
        self._average.follow(number)
        return float(loss.detach())

    def finish(self) -> None:
        """Leaves the averaged weights in the networks."""
        self._average.apply()

    def state(self) -> dict[str, Any]:
        """Weights, their average, and the optimizer's moments."""
        networks = {name: self._parts[name].state_dict() for name in TRAINED}
        return {"networks": networks, "average": self._average.state(), "optimizer": self._optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        for name in TRAINED:
            self._parts[name].load_state_dict(state["networks"][name])
        self._average.load_state(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        recipe, device = self._recipe, self._parts.device
        rows = torch.randint(len(self._corpus), (recipe.rows,), generator=generator)
        clean = self._latents.sample(rows, generator) * self._parts["vae"].config.scaling_factor
        noise = torch.randn(clean.shape, generator=generator).to(device)
        times = torch.randint(len(self._signal), (recipe.rows,), generator=generator)
        signal = self._signal[times][:, None, None, None].to(device)
        noisy = signal.sqrt() * clean.to(device) + (1 - signal).sqrt() * noise
        context, pooled = encode_text(self._parts, self._corpus.captions(rows, rng))
        told = (torch.rand(recipe.rows, generator=generator) >= recipe.empty_share).float().to(device)
        added = {"text_embeds": pooled * told[:, None], "time_ids": self._time_ids.to(device).expand(recipe.rows, -1)}
        context = context * told[:, None, None]
        (guess,) = self._forward(
            noisy, times.to(device), encoder_hidden_states=context, added_cond_kwargs=added, return_dict=False
        )
        where = 1.0 + recipe.foreground_weight * self._foreground[rows].to(device)
        weight = loss_weight(signal, recipe) * where / where.mean()
        loss: torch.Tensor = (weight * (guess.float() - noise).square()).mean()
        return loss


def encode_text(parts: Parts, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """What SDXL's pipeline makes of prompts: (rows, 24, channels of both encoders), and the second's pooled output."""
    ids = parts.tokens(captions)
    first = parts["text_encoder"](ids, output_hidden_states=True)
    second = parts["text_encoder_2"](ids, output_hidden_states=True)
    return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second.text_embeds


def loss_weight(signal: torch.Tensor, recipe: UnetRecipe) -> torch.Tensor:
    """Weight of the squared error of the noise, by the share of signal in the latents (alphas_cumprod, 0 to 1)."""
    ratio = signal / (1 - signal)
    return (torch.clamp(ratio + 1, max=recipe.snr_cap) / ratio).clamp(max=recipe.loud_cap)


def _signals() -> torch.Tensor:
    """alphas_cumprod of the miniature's scheduler: "scaled_linear" from .00085 to .012 over 1,000 steps."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    return torch.cumprod(1 - betas, dim=0).float()
