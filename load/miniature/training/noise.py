"""The noise in latents, which the UNet, the ControlNets and the LoRAs learn.

It chooses the latents and the networks' inputs, and weighs the errors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler

from load.miniature.training.corpus import Corpus, Latents, foreground
from load.miniature.training.descent import half_precision
from load.miniature.training.parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorWeights:
    """Weights of steps and elements; found by short runs, see the README beside the weights."""

    snr_cap: float = 5.0
    """Signal-to-noise ratio from which on steps with little noise count less (min-SNR, Hang et al. 2023)."""
    loud_cap: float = 6.0
    """How much more than others the noisiest steps may count, where places and bindings are decided."""
    foreground_weight: float = 1.0
    """Added where things are."""


_WEIGHTS = ErrorWeights()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyLatents:
    """A batch, on the networks' device."""

    rows: torch.Tensor
    """Rows of the corpus, on the processor."""
    noisy: torch.Tensor
    """(rows, 4, side, side)."""
    noise: torch.Tensor
    """(rows, 4, side, side)."""
    times: torch.Tensor
    """Of the scheduler."""
    signal: torch.Tensor
    """Share of signal at those times, (rows, 1, 1, 1)."""


class NoiseLessons:
    """Batches of a corpus, and their losses.

    Args:
        parts: The networks.
        corpus: The pictures.
        latents: Of the pictures.
        signal: The share of signal at each of the scheduler's times (alphas_cumprod, 0 to 1).
    """

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, signal: torch.Tensor) -> None:
        self._parts, self._corpus, self._latents, self._signal = parts, corpus, latents, signal
        self._foreground = foreground(corpus, corpus.images.shape[-1] // latents.mean.shape[-1])
        side = float(corpus.images.shape[-1])
        # Original size, crop, target size: what the pipeline says of an uncropped picture.
        self._time_ids = torch.tensor([side, side, 0.0, 0.0, side, side])

    def draw(self, count: int, generator: torch.Generator) -> NoisyLatents:
        """Return so many random pictures of the corpus at random times."""
        device = self._parts.device
        rows = torch.randint(len(self._corpus), (count,), generator=generator)
        clean = self._latents.sample(rows, generator) * self._parts["vae"].config.scaling_factor
        noise = torch.randn(clean.shape, generator=generator).to(device)
        times = torch.randint(len(self._signal), (count,), generator=generator)
        signal = self._signal[times][:, None, None, None].to(device)
        noisy = signal.sqrt() * clean.to(device) + (1 - signal).sqrt() * noise
        return NoisyLatents(rows=rows, noisy=noisy, noise=noise, times=times.to(device), signal=signal)

    def captioned_loss(
        self, unet: Any, rows: int, generator: torch.Generator, rng: random.Random, *, empty_share: float
    ) -> torch.Tensor:
        """Return the loss of a UNet on a batch of captions, of which a share is empty."""
        device = self._parts.device
        batch = self.draw(rows, generator)
        kept = (torch.rand(rows, generator=generator) >= empty_share).float().to(device)
        with half_precision(device):
            told = self.told(self._corpus.captions(batch.rows, rng), kept)
            (guess,) = unet(batch.noisy, batch.times, **told, return_dict=False)
            return self.loss(batch, guess)

    def told(self, captions: list[str], kept: torch.Tensor) -> dict[str, Any]:
        """Return a UNet's inputs of each row.

        Args:
            captions: Of each row.
            kept: 1, or 0 for an empty prompt, which is zeros as in the pipeline.
        """
        context, pooled = _encode_text(self._parts, captions)
        time_ids = self._time_ids.to(self._parts.device).expand(len(captions), -1)
        added = {"text_embeds": pooled * kept[:, None], "time_ids": time_ids}
        return {"encoder_hidden_states": context * kept[:, None, None], "added_cond_kwargs": added}

    def loss(self, batch: NoisyLatents, guess: torch.Tensor) -> torch.Tensor:
        """Return the weighted squared error of a guess of the noise."""
        where = 1.0 + _WEIGHTS.foreground_weight * self._foreground[batch.rows].to(self._parts.device)
        weight = error_weight(batch.signal, _WEIGHTS) * where / where.mean()
        loss: torch.Tensor = (weight * (guess.float() - batch.noise).square()).mean()
        return loss


def error_weight(signal: torch.Tensor, weights: ErrorWeights) -> torch.Tensor:
    """Return the weight of the noise's squared error, by the share of signal in the latents, 0 to 1."""
    ratio = signal / (1 - signal)
    return (torch.clamp(ratio + 1, max=weights.snr_cap) / ratio).clamp(max=weights.loud_cap)


def scheduler_signal(parts: Parts) -> torch.Tensor:
    """Return alphas_cumprod of the model's scheduler."""
    signal: torch.Tensor = EulerDiscreteScheduler.from_pretrained(parts.folder / "scheduler").alphas_cumprod
    return signal


def _encode_text(parts: Parts, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, 24, channels of both encoders) and the second's pooled output, as SDXL's pipeline does."""
    ids = parts.tokens(captions)
    first = parts["text_encoder"](ids, output_hidden_states=True)
    second = parts["text_encoder_2"](ids, output_hidden_states=True)
    return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second.text_embeds
