"""The keys of recordings and of their steps, and rules for steps that can be neither recorded nor reused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.model.rows import Half, SetKey

# Significant digits of a noise level in keys. The last bits of its float32 value differ between processors, whose
# workers may share a store. No two steps of a schedule are that close.
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedControl:
    """A ControlNet whose residuals went into the recorded outputs."""

    digest: str
    """SHA-256 of the weights, hex."""
    image_digest: str
    """SHA-256 of the control image, hex."""
    scale: float
    guess_mode: bool
    control_mode: int | None = None
    """What the control image shows, if the ControlNet is a union; None otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingKey:
    """The properties that two edits must share to use the same recording: all but prompt, seed, mask and sampler.

    The sampler does not matter: for every sampler that is served, a step's model input is the same function of latent,
    noise, timestep and noise level. See `StepKey`.
    """

    model_hash: str
    dtype: str
    template: str
    """Identifies the edited image: digest of its pixels after cropping, in hex, or the name of kept latents."""
    weights: SetKey = ()
    """Digest and scale of each LoRA."""
    controls: tuple[RecordedControl, ...] = ()
    tenant: str = ""
    """Tenant that owns the recording; empty if the gateway has no tenants."""

    @property
    def digest(self) -> str:
        """SHA-256 of the key, hex."""
        parts = [
            self.model_hash,
            self.dtype,
            self.template,
            [[digest, scale] for digest, scale in self.weights],
            [
                [control.digest, control.image_digest, control.scale, control.guess_mode, control.control_mode]
                for control in self.controls
            ],
            self.tenant,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """Identifies one forward pass of a template."""

    timestep: float
    noise_level: float
    """Noise level, see `Sampler`. One timestep may have several, even within one schedule."""
    half: Half
    controls: tuple[int, ...] = ()
    """Indices, in the request, of the ControlNets that are active in this step."""


def prompt_of(spec: ResolvedSpec, half: Half) -> str:
    """Return a digest, in hex, of the prompts of one half of guidance."""
    prompts, negative_prompts = (spec.prompt, spec.prompt_2), (spec.negative_prompt, spec.negative_prompt_2)
    facts: list[object] = list(prompts if half is Half.CONDITIONAL else negative_prompts)
    if half is Half.CONDITIONAL or spec.weighted:
        facts.append(spec.clip_skip)
    if spec.weighted:
        # Both halves are as long as the longer one.
        facts += [*prompts, *negative_prompts]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def step_key(request: Request, half: Half, turn: int = 0) -> StepKey:
    """Return the key of the evaluation that is `turn` evaluations ahead; 0 is the next one."""
    evaluation = request.evaluation + turn
    active = []
    for place, control in enumerate(request.spec.controlnets):
        first, last = request.control_window(control)
        if first <= evaluation < last:
            active.append(place)
    noise_level = rounded(request.noise_level_of(evaluation))
    timestep = request.timestep_of(evaluation)
    return StepKey(timestep=timestep, noise_level=noise_level, half=half, controls=tuple(active))


def rounded(noise_level: float) -> float:
    """Round a noise level to the precision that keys have."""
    return float(f"{noise_level:.{_DIGITS}g}")


def lacks_loras(request: Request) -> bool:
    """Return whether the next step runs without the request's LoRAs, because they have not arrived."""
    return bool(request.spec.loras) and request.loras_now is None


def begins_with_noise(request: Request, turn: int = 0) -> bool:
    """Return whether an evaluation starts from pure noise; see `Edit.start`.

    Such an evaluation is neither recorded nor read from a recording: an edit at a lower strength has one with the same
    key whose latent contains the template.

    Args:
        turn: Number of evaluations ahead; 0 is the next one.
    """
    edit = request.edit
    full = edit is not None and edit.trajectory is None and request.spec.strength == 1.0
    return full and request.evaluation + turn == request.first_evaluation
