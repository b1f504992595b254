"""How much a job's LoRAs change its latents, step by step: its images run once more beside themselves without them.

Such a shadow has the same prompt, read with the same text encoders, the same seed and sampler; only the UNet's LoRAs
are not there: what a late LoRA leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bottega.diffusion.engine.request import Request


class LatentMeter:
    """shadows: one for each image, of its index; without any, nothing is measured.

    What one of the two is ahead of the other is kept, at most a latent for each step.
    """

    def __init__(self, shadows: Iterable[Request] = ()) -> None:
        self.shadows = tuple(shadows)
        self._ahead: dict[tuple[int, int], Tensor] = {}
        self._cosines: dict[int, list[Tensor]] = {}

    @property
    def done(self) -> bool:
        """Whether all there is to measure was; so it is where nothing is."""
        return all(shadow.done for shadow in self.shadows)

    @property
    def similarities(self) -> tuple[float, ...]:
        """After each step, the cosine of the latents with and without LoRAs; of several images, the least.

        Waits for the device: to be asked for when the job has ended.
        """
        return tuple(min(float(each) for each in self._cosines[step]) for step in sorted(self._cosines))

    def observe(self, request: Request) -> None:
        """An image, or its shadow, has made a step."""
        if not self.shadows:
            return
        key = (request.index, request.step)
        other = self._ahead.pop(key, None)
        if other is None:
            self._ahead[key] = request.latent  # a step makes a new one
            return
        self._cosines.setdefault(request.step, []).append(_cosine(request.latent, other))


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """A scalar on the device; 0 where one of them is nothing at all."""
    one, other = one.flatten().double(), other.flatten().double()
    lengths = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return torch.where(lengths > 0, (one @ other) / lengths, 0.0).clamp(-1.0, 1.0)
