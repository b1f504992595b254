"""Which steps of a request a template is in, and by what key they are recorded and read."""

from __future__ import annotations

from bottega.diffusion.editing.recordings.recording import StepKey
from bottega.diffusion.engine.request import Request
from bottega.diffusion.rows import Half


def step_key(request: Request, half: Half, turn: int = 0) -> StepKey:
    """Of the step that comes in so many turns; 0 is the next one."""
    spec, step = request.spec, request.step + turn
    active = []
    for place, control in enumerate(spec.controlnets):
        first, last = spec.control_steps(control)
        if first <= step < last:
            active.append(place)
    timestep, noise_level = request.timestep_of(step), request.noise_level_of(step)
    return StepKey(timestep=timestep, noise_level=noise_level, half=half, controls=tuple(active))


def lacks_loras(request: Request) -> bool:
    """Whether the next step is made without LoRAs that the request has."""
    return bool(request.spec.loras) and request.loras_now is None


def begins_with_noise(request: Request, turn: int = 0) -> bool:
    """Whether nothing of the template is in the latent before the step that comes in so many turns, see Edit.start.

    Other edits make steps of that key with the template outside their masks.
    """
    edit = request.edit
    full = edit is not None and edit.trajectory is None and request.spec.strength == 1.0
    return full and request.step + turn == request.begin
