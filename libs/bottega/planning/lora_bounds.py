"""How late a LoRA may come into a picture, by what it changes from step to step. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

# Below this cosine between the latents with and without a LoRA, the one without is on its way to another picture.
LEAST_LATENT_SIMILARITY = 0.99


def latest_step(similarities: Sequence[float]) -> int:
    """The step at which a LoRA must be in: the first one that leads too far away without it.

    similarities: after each step, the cosine of the latents with and without. All steps may be made without a LoRA
    that never leads away; then it is the number of steps.
    Source: Katz, bounded asynchronous loading: the bound is where the latents begin to differ.
    """
    return next(
        (step for step, cosine in enumerate(similarities) if not cosine >= LEAST_LATENT_SIMILARITY), len(similarities)
    )
