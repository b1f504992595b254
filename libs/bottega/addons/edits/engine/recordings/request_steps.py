"""The step keys of a request, and which of its steps cannot be reused."""

from __future__ import annotations

from bottega.addons.edits.engine.recordings.keys import StepKey
from bottega.diffusion.engine.request import Request
from bottega.diffusion.rows import Half

# Significant digits of a noise level in keys. The last bits of its float32 value differ between processors, whose
# workers may share a store. No two steps of a schedule are that close.
_DIGITS = 5


def step_key(request: Request, half: Half, turn: int = 0) -> StepKey:
    """Return the key of the step in `turn` turns; 0 is the next one."""
    spec, step = request.spec, request.step + turn
    active = []
    for place, control in enumerate(spec.controlnets):
        first, last = spec.control_steps(control)
        if first <= step < last:
            active.append(place)
    noise_level = rounded(request.noise_level_of(step))
    return StepKey(timestep=request.timestep_of(step), noise_level=noise_level, half=half, controls=tuple(active))


def rounded(noise_level: float) -> float:
    """Round a noise level as keys do."""
    return float(f"{noise_level:.{_DIGITS}g}")


def lacks_loras(request: Request) -> bool:
    """Return whether the next step runs without the request's LoRAs."""
    return bool(request.spec.loras) and request.loras_now is None


def begins_with_noise(request: Request, turn: int = 0) -> bool:
    """Return whether the latent before the step in `turn` turns is pure noise; see `Edit.start`.

    Other edits make steps with the same key from the template.
    """
    edit = request.edit
    full = edit is not None and edit.trajectory is None and request.spec.strength == 1.0
    return full and request.step + turn == request.begin
