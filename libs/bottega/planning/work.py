"""How much a request asks for: the one place that counts what guidance, image-to-image and ControlNets run."""

from __future__ import annotations

from typing import NamedTuple


class RemainingWork(NamedTuple):
    """What a request asks of the turns to come. A tuple, of which the scheduler makes hundreds in a look at its queue.

    steps: turns to go. rows: rows that it puts into each turn (two when guided, times its images), each as what it
    costs of a plain one.
    """

    steps: int
    rows: float


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


def control_steps(start: float, end: float, steps: int) -> tuple[int, int]:
    """The steps [first, last) of `steps` in which a ControlNet is active; (0, 0) where it is in none.

    start, end: control_guidance_start and control_guidance_end, fractions of the steps that run.
    Source: controlnet_keep of Diffusers' StableDiffusionXLControlNetPipeline, with its very divisions.
    """
    active = [step for step in range(steps) if step / steps >= start and (step + 1) / steps <= end]
    return (active[0], active[-1] + 1) if active else (0, 0)
