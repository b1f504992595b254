"""The noise in latents, which the UNet or the transformer learns, and their ControlNets and LoRAs with them.

It chooses the latents and the networks' inputs, and weighs the errors.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

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


_WEIGHTS = ErrorWeights()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyLatents:
    """A batch, on the networks' device."""

    rows: torch.Tensor
    """Rows of the corpus, on the processor."""
    noisy: torch.Tensor
    """(rows, 4, side, side)."""
    target: torch.Tensor
    """What the networks predict, (rows, 4, side, side)."""
    times: torch.Tensor
    """Of the scheduler."""
    weight: torch.Tensor | float = 1.0
    """Weight of the error at those times, (rows, 1, 1, 1)."""


class Lessons(ABC):
    """Batches of a corpus, and their losses.

    Args:
        parts: The networks.
        corpus: The pictures.
        latents: Of the pictures.
    """

    foreground_weight: ClassVar[float] = 1.0
    """Added to the weight of an error where things are."""

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents) -> None:
        self._parts, self._corpus, self._latents = parts, corpus, latents
        self._foreground = foreground(corpus, corpus.images.shape[-1] // latents.mean.shape[-1])

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> NoisyLatents:
        """Return so many random pictures of the corpus at random times."""

    @abstractmethod
    def told(self, captions: list[str], kept: torch.Tensor) -> dict[str, Any]:
        """Return a network's inputs of each row.

        Args:
            captions: Of each row.
            kept: 1, or 0 for an empty prompt.
        """

    def captioned_loss(
        self, network: Any, rows: int, generator: torch.Generator, rng: random.Random, *, empty_share: float
    ) -> torch.Tensor:
        """Return the loss of a network on a batch of captions, of which a share is empty."""
        device = self._parts.device
        batch = self.draw(rows, generator)
        kept = (torch.rand(rows, generator=generator) >= empty_share).float().to(device)
        with half_precision(device):
            told = self.told(self._corpus.captions(batch.rows, rng), kept)
            (guess,) = network(batch.noisy, timestep=batch.times, **told, return_dict=False)
            return self.loss(batch, guess)

    def loss(self, batch: NoisyLatents, guess: torch.Tensor) -> torch.Tensor:
        """Return the weighted squared error of a guess of the target."""
        where = 1.0 + self.foreground_weight * self._foreground[batch.rows].to(self._parts.device)
        weight = batch.weight * where / where.mean()
        loss: torch.Tensor = (weight * (guess.float() - batch.target).square()).mean()
        return loss


class NoiseLessons(Lessons):
    """Lessons for a UNet, which predicts the noise.

    Args:
        parts: The networks.
        corpus: The pictures.
        latents: Of the pictures.
        signal: The share of signal at each of the scheduler's times (alphas_cumprod, 0 to 1).
    """

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, signal: torch.Tensor) -> None:
        super().__init__(parts, corpus, latents)
        self._signal = signal
        side = float(corpus.images.shape[-1])
        # Original size, crop, target size: what the pipeline says of an uncropped picture.
        self._time_ids = torch.tensor([side, side, 0.0, 0.0, side, side])

    def draw(self, count: int, generator: torch.Generator) -> NoisyLatents:
        device = self._parts.device
        rows = torch.randint(len(self._corpus), (count,), generator=generator)
        clean = self._latents.sample(rows, generator) * self._parts["vae"].config.scaling_factor
        noise = torch.randn(clean.shape, generator=generator).to(device)
        times = torch.randint(len(self._signal), (count,), generator=generator)
        signal = self._signal[times][:, None, None, None].to(device)
        noisy = signal.sqrt() * clean.to(device) + (1 - signal).sqrt() * noise
        weight = error_weight(signal, _WEIGHTS)
        return NoisyLatents(rows=rows, noisy=noisy, target=noise, times=times.to(device), weight=weight)

    def told(self, captions: list[str], kept: torch.Tensor) -> dict[str, Any]:
        """Return a UNet's inputs of each row; those of an empty prompt are zeros, as in the pipeline."""
        context, pooled = _encode_text(self._parts, captions)
        time_ids = self._time_ids.to(self._parts.device).expand(len(captions), -1)
        added = {"text_embeds": pooled * kept[:, None], "time_ids": time_ids}
        return {"encoder_hidden_states": context * kept[:, None, None], "added_cond_kwargs": added}


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
