"""The work of a request: the only place that counts what guidance, image-to-image and ControlNets run."""

from __future__ import annotations

from typing import NamedTuple


class RemainingWork(NamedTuple):
    """The work that a request still needs. It is a tuple because the scheduler makes hundreds per decision."""

    steps: int
    """Remaining turns."""
    rows: float
    """Rows that it puts into each turn (two per image if guided), in row-equivalents of plain rows."""


def rows_per_image(guidance_scale: float) -> int:
    """Return the rows of an image in a turn: classifier-free guidance needs a second one."""
    return 2 if guidance_scale > 1.0 else 1


def steps_to_run(num_inference_steps: int, strength: float | None) -> int:
    """Return the denoising steps of one image. A strength means image-to-image, which starts later.

    Source: get_timesteps of Diffusers' StableDiffusionXLImg2ImgPipeline.
    """
    if strength is None:
        return num_inference_steps
    return min(int(num_inference_steps * strength), num_inference_steps)


def control_steps(start: float, end: float, steps: int) -> tuple[int, int]:
    """Return the steps [first, last) of `steps` in which a ControlNet is active, or (0, 0) if there are none.

    Source: controlnet_keep of Diffusers' StableDiffusionXLControlNetPipeline, with the same divisions.

    Args:
        start: control_guidance_start, a fraction of the steps that run.
        end: control_guidance_end, likewise.
    """
    active = [step for step in range(steps) if step / steps >= start and (step + 1) / steps <= end]
    return (active[0], active[-1] + 1) if active else (0, 0)
