"""A template's recording: block outputs by step and half of guidance, and its keys.

A recording knows neither jobs nor budgets; its source decides who may use it and how long it is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bottega.addons.edits.engine.recordings.step import (
    MemoryStep,
    ProjectionsRoom,
    RecordedStep,
    StepProjections,
    copy_step,
)
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.model.rows import Half, SetKey
from bottega.v1.activations_pb2 import BlockProfile

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


def prompt_of(spec: ResolvedSpec, half: Half, *, embeds_guidance: bool) -> str:
    """Return a digest, in hex, of a half's prompts, and of the guidance scale if the network reads it."""
    prompts, negative_prompts = (spec.prompt, spec.prompt_2), (spec.negative_prompt, spec.negative_prompt_2)
    facts: list[object] = list(prompts if half is Half.CONDITIONAL else negative_prompts)
    if half is Half.CONDITIONAL or spec.weighted:
        facts.append(spec.clip_skip)
    if spec.weighted:
        # Both halves are as long as the longer one.
        facts += [*prompts, *negative_prompts]
    facts += [embedding.digest for embedding in spec.embeddings]
    if spec.max_sequence_length is not None:
        facts.append(spec.max_sequence_length)
    if embeds_guidance:
        facts.append(spec.guidance_scale)
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


def loras_rule_out_recordings(request: Request) -> bool:
    """Return whether the next step cannot be one of a recording, because of the request's LoRAs.

    They have not arrived, or change norms, whose statistics masked blocks take from recordings.
    """
    return bool(request.spec.loras) and (request.loras_now is None or request.loras_now.changes_norms)


def begins_with_noise(request: Request, turn: int = 0) -> bool:
    """Return whether an evaluation starts from pure noise; see `Edit.start`.

    Such an evaluation is neither recorded nor read from a recording: an edit at a lower strength has one with the same
    key whose latent contains the template.

    Args:
        turn: Number of evaluations ahead; 0 is the next one.
    """
    edit = request.edit
    full = edit is not None and edit.puts_back and edit.trajectory is None and request.spec.strength == 1.0
    return full and request.evaluation + turn == request.first_evaluation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTemplate:
    """The image latent and noise that a template's edits share outside their masks, drawn by the first edit.

    Both are [1, channels, height, width] and drawn in Diffusers' order.
    """

    image_latent: Tensor
    """A sample from the VAE's distribution of the image."""
    noise: Tensor
    """A sample of the standard normal distribution."""
    seed: int
    """The seed with which both were drawn."""


class RecordingUser(Protocol):
    """An image whose steps read from a recording."""

    def turns_until(self, key: StepKey) -> float:
        """Return in how many forward passes of the engine the image reads this step: 0 is the next, infinity never."""
        ...


class Recording:
    """The recorded activations of one template.

    A step's `valid`, bool [height, width] of the latent, is True where the recorded image was the unchanged template. A
    token's outputs may be reused if all elements under it are valid.

    Args:
        shape: Height and width of the latent.
        drawn: Image latent and noise that edits share; None if edits restore latents that a generation kept.
        origin: Name of the source image at the gateway, see `ActivationsOrder.source`.
        id: 32 hex digits; new by default.
    """

    def __init__(
        self,
        key: RecordingKey,
        shape: tuple[int, int],
        drawn: DrawnTemplate | None = None,
        *,
        origin: str = "",
        id: str = "",
    ) -> None:
        self.id = id or uuid.uuid4().hex
        self.key = key
        self.shape = shape
        self.drawn = drawn
        self.origin = origin
        self.steps: dict[StepKey, RecordedStep] = {}
        """The newest recorded outputs of each forward pass, for any prompt; `step` also finds older ones for another
        prompt."""
        self._others: dict[StepKey, RecordedStep] = {}
        # Keyed weakly by step, so that projections are freed with their step.
        self._projections: MutableMapping[RecordedStep, StepProjections] = weakref.WeakKeyDictionary()
        # The engine's thread changes projections while threads of links ask for their size.
        self._lock = threading.Lock()
        self.complete = False
        """Whether the recording may be read."""
        self.uses = 0
        """Number of edits that have read the recording."""
        self.readers = 0
        """Number of edits that read the recording now."""
        self.users: set[RecordingUser] = set()
        """Images of the edits that read the recording now."""
        self.used_s = 0.0
        self.reserved_bytes = 0
        self.budget_bytes = 0
        """Maximum bytes of all outputs, wherever they are; 0 for no limit. Set by the source."""
        self.profile: BlockProfile | None = None
        """Measured costs of the model's blocks; None if unknown. Set by the source."""
        self._maps: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Bytes in this process's memory, or reserved for the recording if that is more."""
        return max(self.held_bytes, self.reserved_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of outputs and projections in this process's memory. Thread-safe."""
        with self._lock:
            kept = sum(each.size_bytes for each in self._projections.values())
        return kept + sum(step.held_bytes for step in self.all_steps)

    @property
    def recorded_bytes(self) -> int:
        """Bytes of all outputs, in this process or in a store."""
        return sum(step.size_bytes for step in self.all_steps)

    @property
    def all_steps(self) -> list[RecordedStep]:
        """The steps of all prompts."""
        return [*list(self.steps.values()), *list(self._others.values())]

    @property
    def is_idle(self) -> bool:
        """Whether the recording may be evicted."""
        return self.complete and self.readers == 0

    def turns_until(self, key: StepKey) -> float:
        """Return in how many of the engine's forward passes any user reads this step; infinity if none will."""
        return min((user.turns_until(key) for user in self.users), default=math.inf)

    @property
    def step_count(self) -> int:
        """Number of denoising steps."""
        return len({(key.timestep, key.noise_level) for key in self.steps})

    @property
    def valid_share(self) -> float:
        """Share of the template that can be reused, in the step with the smallest share."""
        return min((float(step.valid.float().mean()) for step in self.steps.values()), default=0.0)

    def step(self, key: StepKey, prompt: str) -> RecordedStep | None:
        """Return the outputs of a forward pass, preferably with this prompt; None if there are none."""
        other = self._others.get(key)
        return other if other is not None and other.prompt == prompt else self.steps.get(key)

    def add(self, key: StepKey, outputs: Mapping[str, Tensor], valid: Tensor, *, prompt: str = "") -> None:
        """Add the outputs of a forward pass that computed all tokens. The last one with another prompt is also kept."""
        before = self.steps.get(key)
        self.put(key, MemoryStep(valid=valid, outputs=outputs, prompt=prompt))
        if before is not None and before.prompt not in ("", prompt):
            self._others[key] = before

    def projections(self, step: RecordedStep, room: ProjectionsRoom) -> StepProjections:
        """Return the cached projections of a step; `room` is shared by all recordings."""
        with self._lock:
            return self._projections.setdefault(step, StepProjections(room))

    def drop_projections(self) -> None:
        """Free all cached projections; they can be computed again."""
        with self._lock:
            self._projections.clear()

    def forget(self, key: StepKey) -> None:
        """Remove the outputs of a forward pass, for all prompts."""
        self.steps.pop(key, None)
        self.forget_other(key)

    def forget_other(self, key: StepKey) -> None:
        """Remove the outputs of a forward pass that are kept beside the newest ones, for another prompt."""
        self._others.pop(key, None)

    def forget_steps(self, gone: Callable[[RecordedStep], bool]) -> None:
        """Remove the steps for which `gone` returns True. A step that is kept for another prompt replaces it."""
        self._others = {key: step for key, step in self._others.items() if not gone(step)}
        for key in [key for key, step in self.steps.items() if gone(step)]:
            del self.steps[key]
            if (other := self._others.pop(key, None)) is not None:
                self.steps[key] = other

    def put(self, key: StepKey, step: RecordedStep) -> None:
        """Store a step as the newest of its forward pass."""
        step.valid = self._shared(step.valid)
        self.steps[key] = step

    def writable(self, key: StepKey, step: RecordedStep | None = None) -> RecordedStep | None:
        """Return a step that may be written to; None if that needs a copy and parts of the step are in a store.

        A copy replaces the original; the source has reserved memory for it. `step` is one of `key`, by default the
        newest.
        """
        step = step or self.steps[key]
        if step.writable:
            return step
        copy = copy_step(step)
        if copy is not None and self.steps.get(key) is step:
            self.put(key, copy)
        elif copy is not None:
            self._others[key] = copy
        return copy

    def grow(self, step: RecordedStep, area: Tensor, *, prompt: str) -> None:
        """Extend a step's valid area after a forward pass wrote the template's outputs for `area` into it."""
        step.valid = self._shared(step.valid | area)
        step.prompt = prompt if step.prompt == prompt else ""

    def _shared(self, valid: Tensor) -> Tensor:
        """Return one tensor for all equal maps, because plans are cached by the identity of their tensor."""
        known = next((each for each in self._maps if torch.equal(each, valid)), None)
        if known is None:
            self._maps = [each for each in self._maps if any(step.valid is each for step in self.all_steps)]
            self._maps.append(known := valid.clone())
        return known
