"""How much a request asks for: the one place that says what guidance and image-to-image cost. Knows no wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks of the turns to come.

    rows: rows that it puts into each turn (two when guided, times its images).
    steps: turns to go.
    """

    rows: int
    steps: int


def rows_per_image(guidance_scale: float) -> int:
    """Rows of a turn: classifier-free guidance takes a second one."""
    return 2 if guidance_scale > 1.0 else 1


def steps_to_run(num_inference_steps: int, strength: float | None) -> int:
    """Denoising steps of one image; with a strength it is image-to-image, which starts later.

    Source: get_timesteps of Diffusers' StableDiffusionXLImg2ImgPipeline.
    """
    if strength is None:
        return num_inference_steps
    return min(int(num_inference_steps * strength), num_inference_steps)
