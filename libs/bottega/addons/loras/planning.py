"""Decides how late a LoRA may be applied."""

from __future__ import annotations

from collections.abc import Sequence

# Below this cosine between the latents with and without a LoRA, the picture without it has become another one.
LEAST_LATENT_SIMILARITY = 0.99


def latest_step(similarities: Sequence[float]) -> int:
    """Return the first step at which missing the LoRA leads too far away, or the number of steps if none does.

    Source: Katz, bounded asynchronous loading: the bound is where the latents begin to differ.

    Args:
        similarities: After each step, the cosine of the latents with and without the LoRA.
    """
    return next(
        (step for step, cosine in enumerate(similarities) if not cosine >= LEAST_LATENT_SIMILARITY), len(similarities)
    )
