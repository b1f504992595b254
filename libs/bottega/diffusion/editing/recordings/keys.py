"""What a template's recording and its steps are found by."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from bottega.diffusion.rows import Half, SetKey
from bottega.diffusion.spec import ResolvedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedControl:
    """A ControlNet whose residuals are in the outputs. digest: of its weights; image_digest: of its image; hex."""

    digest: str
    image_digest: str
    scale: float
    guess_mode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingKey:
    """What two edits have in common where one uses the other's activations: all but prompt, seed, mask and sampler.

    A step's model input is a function of latent, noise, timestep and noise level alone, the same one for all samplers
    that are served; see StepKey.
    model_hash: hex. dtype: of the model. template: hex digest of the pixels as they are drawn, crop included, or the
    name that a generation gave its latents. weights: of the LoRAs. tenant: whose it is; empty where nobody says so.
    """

    model_hash: str
    dtype: str
    template: str
    weights: SetKey = ()
    controls: tuple[RecordedControl, ...] = ()
    tenant: str = ""

    @property
    def digest(self) -> str:
        """64 hex digits."""
        said = [
            self.model_hash,
            self.dtype,
            self.template,
            [[digest, scale] for digest, scale in self.weights],
            [[each.digest, each.image_digest, each.scale, each.guess_mode] for each in self.controls],
            self.tenant,
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """One forward of a template. controls: places of the ControlNets that are active in it.

    noise_level: see Sampler: several levels may have one timestep, even in one schedule.
    """

    timestep: float
    noise_level: float
    half: Half
    controls: tuple[int, ...] = ()


def prompt_of(spec: ResolvedSpec, half: Half) -> str:
    """What one half's activations follow beside the picture: a digest of its prompts, hex."""
    said: tuple[str | None, str | None] = (spec.negative_prompt, spec.negative_prompt_2)
    if half is Half.CONDITIONAL:
        said = (spec.prompt, spec.prompt_2)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
