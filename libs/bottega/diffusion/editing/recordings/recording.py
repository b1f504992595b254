"""A template's recording: what blocks put out where the template itself stands, by step, half and block.

It knows no job and no budget; who may read or write it, and how long it is kept, its source says.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bottega.diffusion.device.device import Device, HostCopy
from bottega.diffusion.device.pick import open_device
from bottega.diffusion.editing.recordings.projections import ProjectionsRoom, StepProjections
from bottega.diffusion.editing.recordings.step import MemoryStep, RecordedStep, copy_step
from bottega.diffusion.editing.recordings.step_loads import StepLoads
from bottega.diffusion.rows import Half, KeptProjections, SetKey
from bottega.diffusion.spec import ResolvedSpec
from bottega.v1.activations_pb2 import BlockProfile


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
        """Of its outputs in this process's memory, and of what is kept that follows from them."""
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
        return self._projections.setdefault(step, StepProjections(room))

    def drop_projections(self) -> None:
        """Makes room: what follows from its outputs can be computed again."""
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


def prompt_of(spec: ResolvedSpec, half: Half) -> str:
    """What one half's activations follow beside the picture: a digest of its prompts, hex."""
    said: tuple[str | None, str | None] = (spec.negative_prompt, spec.negative_prompt_2)
    if half is Half.CONDITIONAL:
        said = (spec.prompt, spec.prompt_2)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


class StepReader:
    """The RecordedActivations of a row that takes from a recorded step.

    loads: what was planned of what is not here; without a plan that is computed. shapes: that the network puts out, by
    name: what has another one, from a store that lies, would fail its whole batch, and is computed; None trusts it.
    projections: that are kept of the step; None keeps none.
    """

    def __init__(
        self,
        step: RecordedStep,
        device: torch.device,
        loads: StepLoads | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        projections: KeptProjections | None = None,
    ) -> None:
        self.projections = projections
        self.reused: set[str] = set()
        self.waited_s = 0.0
        self._step = step
        self._device = device
        self._loads = loads
        self._shapes = shapes

    def get(self, name: str) -> Tensor | None:
        output = self._step.get(name)
        if output is None and self._loads is not None:
            output = self._awaited(name, self._loads)
        if output is None or (self._shapes is not None and output.shape != self._shapes.get(name)):
            return None
        self.reused.add(name)
        if output.is_pinned():
            return output.to(self._device, non_blocking=True)
        return open_device(self._device).to_device(output)  # a view of a store's file is memory that is not pinned

    def stored(self, name: str) -> Tensor | None:
        return self._step.get(name)

    def put(self, name: str, output: Tensor) -> None:
        """Nothing: who reads gives to another one."""

    def _awaited(self, name: str, loads: StepLoads) -> Tensor | None:
        before_s = loads.waited_s
        here = loads.wait_for(name)
        self.waited_s += loads.waited_s - before_s
        return self._step.get(name) if here else None


class StepRecorder:
    """The StepActivations that a row gives to which is computed in full; the forward may fail.

    kept: names of what there is room for; None keeps all. size_bytes: of what it was given so far.
    """

    def __init__(self, kept: frozenset[str] | None = None) -> None:
        self.size_bytes = 0
        self._copies: dict[str, HostCopy] = {}
        self._kept = kept

    @property
    def outputs(self) -> dict[str, Tensor]:
        """On the CPU, float16. Waits for the device where it has not computed them."""
        return {name: copy.take() for name, copy in self._copies.items()}

    def get(self, name: str) -> Tensor | None:
        copy = self._copies.get(name)
        return None if copy is None else copy.take()

    def put(self, name: str, output: Tensor) -> None:
        if self._kept is None or name in self._kept:
            # Of its own, because blocks that follow may write to the output while it leaves.
            own = output.detach().to(torch.float16, copy=True, memory_format=torch.contiguous_format)
            before = self._copies.get(name)
            self.size_bytes += own.nbytes - (0 if before is None else before.take().nbytes)
            self._copies[name] = open_device(own.device).to_host(own)

    @property
    def finite(self) -> bool:
        """Whether float16 has room for all of it."""
        return _finite(self.outputs.values())


class StepCompleter:
    """The StepActivations of a row that computes parts of the template which a recorded step lacks.

    step: writable. area: bool [height, width] of the latent: cells that are computed, and wholly the template's.
    Whatever happens to the forward, what it has put out there is the template's. Whether it is all of it, `grow` says.
    """

    def __init__(self, step: RecordedStep, area: Tensor) -> None:
        self.step = step
        self.area = area
        self._copies: dict[str, HostCopy] = {}
        self._within: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def get(self, name: str) -> Tensor | None:
        return self.step.get(name)

    def put(self, name: str, output: Tensor) -> None:
        stored = self.step.get(name)
        if stored is None or stored.shape != output.shape:
            return  # what was not recorded is computed in full, and remains so
        device = open_device(output.device)
        _, index = self._inside(output, device)
        # Places by their numbers: a GPU would have to be waited for to know how many a map of them has.
        cut = output.detach().index_select(0, index) if output.ndim == 2 else output.flatten(1).index_select(1, index)
        self._copies[name] = device.to_host(cut.to(torch.float16))

    @torch.inference_mode()
    def write(self) -> bool:
        """Writes what was put out, and waits for it where it has not come. Whether it has written anything.

        All of it or nothing: what float16 has no room for would spoil the edits of everyone who reads the step.
        """
        outputs = {name: copy.take() for name, copy in self._copies.items()}
        self._copies = {}
        if not outputs or not _finite(outputs.values()):
            return False
        for name, output in outputs.items():
            stored = self.step.get(name)
            if stored is not None:
                inside, _ = self._inside(stored, open_device(stored.device))
                stored[(inside.flatten(),) if stored.ndim == 2 else (slice(None), inside)] = output
        return True

    def _inside(self, output: Tensor, device: Device) -> tuple[Tensor, Tensor]:
        """The area at an output's level, bool [height, width] on the CPU, and its places by number on the device."""
        # Cells are whole tokens of every level.
        size = level_of(self.area.shape, output.shape[0]) if output.ndim == 2 else (output.shape[1], output.shape[2])
        if size not in self._within:
            area = self.area[None].float()
            while area.shape[1] > size[0] or area.shape[2] > size[1]:
                area = functional.max_pool2d(area, 2, ceil_mode=True)
            inside = area[0] > 0
            self._within[size] = inside, device.to_device(inside.flatten().nonzero()[:, 0])
        return self._within[size]


def _finite(outputs: Iterable[Tensor]) -> bool:
    """Whether float16 had room for all of it. outputs: on the CPU."""
    return all(bool(torch.isfinite(output).all()) for output in outputs)


def level_of(shape: tuple[int, ...], tokens: int) -> tuple[int, int]:
    """Height and width of the level of a latent of this shape that has so many tokens. Raises ValueError."""
    height, width = shape[-2:]
    while height * width > tokens:
        height, width = -(-height // 2), -(-width // 2)
    if height * width != tokens:
        raise ValueError(f"a latent of {tuple(shape)} has no level of {tokens} tokens")
    return height, width


def whole_cells(area: Tensor, cell: int) -> Tensor:
    """What of an area, bool [height, width], is made of whole cells of so many elements a side."""
    outside = functional.max_pool2d((~area)[None].float(), cell, ceil_mode=True)[0] > 0
    height, width = area.shape
    return ~outside.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[:height, :width]
