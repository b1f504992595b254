"""What the UNet, the ControlNets and the LoRAs learn: the noise in latents.

Which latents, what the networks are told of them, how much an error counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler

from load.miniature.training.corpus import Corpus, Latents, foreground
from load.miniature.training.parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorWeights:
    """How single steps and elements count; found by short runs, see the README beside the weights.

    snr_cap: signal-to-noise ratio from which on steps with little noise count less (min-SNR, Hang et al. 2023).
    loud_cap: how much more than others the noisiest steps may count, where places and bindings are decided.
    foreground_weight: added where things are.
    """

    snr_cap: float = 5.0
    loud_cap: float = 6.0
    foreground_weight: float = 1.0


_WEIGHTS = ErrorWeights()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyLatents:
    """A batch. rows: of the corpus, on the processor; all else is on the networks' device.

    noisy, noise: (rows, 4, side, side). times: of the scheduler. signal: its share at those times, (rows, 1, 1, 1).
    """

    rows: torch.Tensor
    noisy: torch.Tensor
    noise: torch.Tensor
    times: torch.Tensor
    signal: torch.Tensor


class NoiseLessons:
    """signal: the share of signal at each of the scheduler's times (alphas_cumprod, 0 to 1)."""

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, signal: torch.Tensor) -> None:
        self._parts, self._latents, self._signal, self._pictures = parts, latents, signal, len(corpus)
        self._foreground = foreground(corpus, corpus.images.shape[-1] // latents.mean.shape[-1])
        side = float(corpus.images.shape[-1])
        # Original size, crop, target size: what the pipeline says of an uncropped picture.
        self._time_ids = torch.tensor([side, side, 0.0, 0.0, side, side])

    def draw(self, count: int, generator: torch.Generator) -> NoisyLatents:
        """So many random pictures of the corpus at random times."""
        device = self._parts.device
        rows = torch.randint(self._pictures, (count,), generator=generator)
        clean = self._latents.sample(rows, generator) * self._parts["vae"].config.scaling_factor
        noise = torch.randn(clean.shape, generator=generator).to(device)
        times = torch.randint(len(self._signal), (count,), generator=generator)
        signal = self._signal[times][:, None, None, None].to(device)
        noisy = signal.sqrt() * clean.to(device) + (1 - signal).sqrt() * noise
        return NoisyLatents(rows=rows, noisy=noisy, noise=noise, times=times.to(device), signal=signal)

    def told(self, captions: list[str], said: torch.Tensor) -> dict[str, Any]:
        """What a UNet is told of each row. said: 1, or 0 for an empty prompt, which is zeros as in the pipeline."""
        context, pooled = _encode_text(self._parts, captions)
        time_ids = self._time_ids.to(self._parts.device).expand(len(captions), -1)
        added = {"text_embeds": pooled * said[:, None], "time_ids": time_ids}
        return {"encoder_hidden_states": context * said[:, None, None], "added_cond_kwargs": added}

    def loss(self, batch: NoisyLatents, guess: torch.Tensor) -> torch.Tensor:
        """The weighted squared error of a guess of the noise."""
        where = 1.0 + _WEIGHTS.foreground_weight * self._foreground[batch.rows].to(self._parts.device)
        weight = error_weight(batch.signal, _WEIGHTS) * where / where.mean()
        loss: torch.Tensor = (weight * (guess.float() - batch.noise).square()).mean()
        return loss


def error_weight(signal: torch.Tensor, weights: ErrorWeights) -> torch.Tensor:
    """Weight of the squared error of the noise, by the share of signal in the latents (alphas_cumprod, 0 to 1)."""
    ratio = signal / (1 - signal)
    return (torch.clamp(ratio + 1, max=weights.snr_cap) / ratio).clamp(max=weights.loud_cap)


def scheduler_signal(parts: Parts) -> torch.Tensor:
    """alphas_cumprod as the model's scheduler has it."""
    signal: torch.Tensor = EulerDiscreteScheduler.from_pretrained(parts.folder / "scheduler").alphas_cumprod
    return signal


def _encode_text(parts: Parts, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """What SDXL's pipeline makes of prompts: (rows, 24, channels of both encoders), and the second's pooled output."""
    ids = parts.tokens(captions)
    first = parts["text_encoder"](ids, output_hidden_states=True)
    second = parts["text_encoder_2"](ids, output_hidden_states=True)
    return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second.text_embeds
