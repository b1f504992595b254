"""Which steps of a request a template is in, and by what key they are recorded and read."""

from __future__ import annotations

from bottega.diffusion.editing.recordings.keys import StepKey
from bottega.diffusion.engine.request import Request
from bottega.diffusion.rows import Half

# Of a noise level, of those that count: it is computed in float32, whose last bits are others on other processors, and
# their workers may share a store. No two steps of a schedule are as near to each other.
_DIGITS = 5


def step_key(request: Request, half: Half, turn: int = 0) -> StepKey:
    """Of the step that comes in so many turns; 0 is the next one."""
    spec, step = request.spec, request.step + turn
    active = []
    for place, control in enumerate(spec.controlnets):
        first, last = spec.control_steps(control)
        if first <= step < last:
            active.append(place)
    noise_level = rounded(request.noise_level_of(step))
    return StepKey(timestep=request.timestep_of(step), noise_level=noise_level, half=half, controls=tuple(active))


def rounded(noise_level: float) -> float:
    """As keys have it."""
    return float(f"{noise_level:.{_DIGITS}g}")


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
