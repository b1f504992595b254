"""A template's recording: what blocks put out where the template itself stands, by step, half and block.

It knows no job and no budget; who may read or write it, and how long it is kept, its source says.
"""

from __future__ import annotations

import math
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bottega.diffusion.editing.recordings.keys import RecordingKey, StepKey
from bottega.diffusion.editing.recordings.projections import ProjectionsRoom, StepProjections
from bottega.diffusion.editing.recordings.step import MemoryStep, RecordedStep, copy_step
from bottega.v1.activations_pb2 import BlockProfile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTemplate:
    """What a template's edits have in common outside their masks: what the first one has drawn, in Diffusers' order.

    image_latent: a sample of the VAE's distribution of the image; noise: standard normal; [1, channels, height, width].
    seed: that both were drawn with.
    """

    image_latent: Tensor
    noise: Tensor
    seed: int


class RecordingUser(Protocol):
    """An image whose steps take from a recording."""

    def turns_until(self, key: StepKey) -> float:
        """In how many turns it takes from this forward, 0 in the next one; infinite where it does not any more."""
        ...


class Recording:
    """The activations of one template.

    id: 32 hex digits; a new one for a new recording. shape: height and width of the latent. drawn: None where edits put
    back latents that a generation has kept. origin: `source` of ActivationsOrder; empty where nobody said it.
    A step's `valid`, bool [height, width] of the latent, says where the template stood while it was recorded. Where all
    elements under a token are valid, the outputs are the template's.
    steps: of each forward the newest, with whatever prompt; see `step` for others.
    uses: edits that have read it. readers: under way. users: their images, which say what they still need. complete:
    whether it may be read.
    budget_bytes: that all of its outputs may take, wherever they are kept; 0 is without bound. profile: what the
    model's blocks take, where that was measured; its source sets both.
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
        self._others: dict[StepKey, RecordedStep] = {}
        # By the step itself: what follows from it goes with it.
        self._projections: MutableMapping[RecordedStep, StepProjections] = weakref.WeakKeyDictionary()
        # The engine's thread keeps some and drops them while links' threads ask how much there is.
        self._lock = threading.Lock()
        self.complete = False
        self.uses = 0
        self.readers = 0
        self.users: set[RecordingUser] = set()
        self.used_s = 0.0
        self.reserved_bytes = 0
        self.budget_bytes = 0
        self.profile: BlockProfile | None = None
        self._maps: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Of its outputs in this process's memory, or of the room that was made for them."""
        return max(self.held_bytes, self.reserved_bytes)

    @property
    def held_bytes(self) -> int:
        """Of its outputs in this process's memory, and of what is kept that follows from them. Any thread may ask."""
        with self._lock:
            kept = sum(each.size_bytes for each in self._projections.values())
        return kept + sum(step.held_bytes for step in self.all_steps)

    @property
    def recorded_bytes(self) -> int:
        """Of its outputs, wherever they are."""
        return sum(step.size_bytes for step in self.all_steps)

    @property
    def all_steps(self) -> list[RecordedStep]:
        """Those of every prompt."""
        return [*list(self.steps.values()), *list(self._others.values())]

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted."""
        return self.complete and self.readers == 0

    def turns_until(self, key: StepKey) -> float:
        """In how many turns the first of its users takes from this forward; infinite where none does."""
        return min((user.turns_until(key) for user in self.users), default=math.inf)

    @property
    def step_count(self) -> int:
        """How many steps of samplers it has."""
        return len({(key.timestep, key.noise_level) for key in self.steps})

    @property
    def valid_share(self) -> float:
        """Share of the template that can be taken from it, of the step that has least of it."""
        return min((float(step.valid.float().mean()) for step in self.steps.values()), default=0.0)

    def step(self, key: StepKey, prompt: str) -> RecordedStep | None:
        """A forward, that with this prompt where there is one; None where there is none."""
        other = self._others.get(key)
        return other if other is not None and other.prompt == prompt else self.steps.get(key)

    def add(self, key: StepKey, outputs: Mapping[str, Tensor], valid: Tensor, *, prompt: str = "") -> None:
        """Takes in a forward that was computed in full. One with another prompt stays beside it, but no third one."""
        before = self.steps.get(key)
        self.put(key, MemoryStep(valid=valid, outputs=outputs, prompt=prompt))
        if before is not None and before.prompt not in ("", prompt):
            self._others[key] = before

    def projections(self, step: RecordedStep, room: ProjectionsRoom) -> StepProjections:
        """What is kept that follows from a step. room: that what is kept of all recordings shares."""
        with self._lock:
            return self._projections.setdefault(step, StepProjections(room))

    def drop_projections(self) -> None:
        """Makes room: what follows from its outputs can be computed again."""
        with self._lock:
            self._projections.clear()

    def forget(self, key: StepKey) -> None:
        """A forward goes, with whatever prompts."""
        self.steps.pop(key, None)
        self.forget_other(key)

    def forget_other(self, key: StepKey) -> None:
        """Makes room: what stays beside a forward, with another prompt, goes."""
        self._others.pop(key, None)

    def forget_steps(self, gone: Callable[[RecordedStep], bool]) -> None:
        """Those go; what stays beside one, with another prompt, takes its place."""
        self._others = {key: step for key, step in self._others.items() if not gone(step)}
        for key in [key for key, step in self.steps.items() if gone(step)]:
            del self.steps[key]
            if (other := self._others.pop(key, None)) is not None:
                self.steps[key] = other

    def put(self, key: StepKey, step: RecordedStep) -> None:
        """Takes in a forward as it is, in place of what was there."""
        step.valid = self._shared(step.valid)
        self.steps[key] = step

    def writable(self, key: StepKey, step: RecordedStep | None = None) -> RecordedStep | None:
        """A step of its own, to be written to: a copy in its place, where it may not be. Its source has made room.

        step: one of those of `key`; None is the newest. Returns None where not all of it is here.
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
        """A forward has computed the template in this area, too, and written it into a step, here or replaced."""
        step.valid = self._shared(step.valid | area)
        step.prompt = prompt if step.prompt == prompt else ""

    def _shared(self, valid: Tensor) -> Tensor:
        """The map, the same tensor for all steps that have equal ones: what follows from it is kept by tensor."""
        known = next((each for each in self._maps if torch.equal(each, valid)), None)
        if known is None:
            self._maps = [each for each in self._maps if any(step.valid is each for step in self.all_steps)]
            self._maps.append(known := valid.clone())
        return known
