"""The keys by which recordings and their steps are found."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from bottega.diffusion.rows import Half, SetKey
from bottega.diffusion.spec import ResolvedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedControl:
    """A ControlNet whose residuals are part of the recorded outputs."""

    digest: str
    """SHA-256 of the weights, hex."""
    image_digest: str
    """SHA-256 of the control image, hex."""
    scale: float
    guess_mode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingKey:
    """The properties that two edits must share to use the same recording: all but prompt, seed, mask and sampler.

    The sampler does not matter: for every sampler that is served, a step's model input is the same function of latent,
    noise, timestep and noise level. See `StepKey`.
    """

    model_hash: str
    dtype: str
    template: str
    """Digest of the pixels as drawn, crop included, in hex; or the name that a generation gave its latents."""
    weights: SetKey = ()
    """Digests and scales of the LoRAs."""
    controls: tuple[RecordedControl, ...] = ()
    tenant: str = ""
    """The owner; empty if the gateway names none."""

    @property
    def digest(self) -> str:
        """SHA-256 of the key, hex."""
        parts = [
            self.model_hash,
            self.dtype,
            self.template,
            [[digest, scale] for digest, scale in self.weights],
            [[control.digest, control.image_digest, control.scale, control.guess_mode] for control in self.controls],
            self.tenant,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """Identifies one forward of a template."""

    timestep: float
    noise_level: float
    """See `Sampler`. One timestep may have several noise levels, even within one schedule."""
    half: Half
    controls: tuple[int, ...] = ()
    """Places of the ControlNets that are active in it."""


def prompt_of(spec: ResolvedSpec, half: Half) -> str:
    """Return a digest of one half's prompts, hex."""
    prompts: tuple[str | None, str | None] = (spec.negative_prompt, spec.negative_prompt_2)
    if half is Half.CONDITIONAL:
        prompts = (spec.prompt, spec.prompt_2)
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
