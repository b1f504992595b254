"""Measures how much a job's LoRAs change its latents at each step, by denoising its images a second time without them.

The second request is called a shadow. It has the same prompt, encoded with the same text encoders, and the same seed
and sampler. It only lacks the LoRAs in the UNet, like an image whose LoRAs have not arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bottega.engine.request import Request


class LatentMeter:
    """The similarities of a job's latents with and without its LoRAs.

    The latents of whichever request is ahead are kept, at most one for each step.

    Args:
        shadows: One for each image, with the image's index. Without shadows, nothing is measured.
    """

    def __init__(self, shadows: Iterable[Request] = ()) -> None:
        self.shadows = tuple(shadows)
        self._ahead: dict[tuple[int, int], Tensor] = {}
        self._cosines: dict[int, list[Tensor]] = {}

    @property
    def done(self) -> bool:
        """Whether all shadows are done; True without shadows."""
        return all(shadow.done for shadow in self.shadows)

    @property
    def similarities(self) -> tuple[float, ...]:
        """Cosine between the latents with and without LoRAs after each step; for several images, the lowest.

        It waits for the device, so read it after the job has ended.
        """
        return tuple(min(float(cosine) for cosine in self._cosines[step]) for step in sorted(self._cosines))

    def observe(self, request: Request) -> None:
        """Record the latent of an image or a shadow after a step."""
        if not (self.shadows and request.between_steps):
            return
        key = (request.index, request.step)
        other = self._ahead.pop(key, None)
        if other is None:
            self._ahead[key] = request.latent  # the next step makes a new tensor
            return
        self._cosines.setdefault(request.step, []).append(_cosine(request.latent, other))


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine as a scalar on the device; 0 if one of the tensors is zero."""
    one, other = one.flatten().double(), other.flatten().double()
    lengths = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return torch.where(lengths > 0, (one @ other) / lengths, 0.0).clamp(-1.0, 1.0)
