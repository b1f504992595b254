"""The latents that `keep_for_editing` stores with a picture for later edits, and their file format.

`JobKeeping` keeps them, and records the generation for later edits. The format is safetensors with a JSON header. This
module does not know where the bytes are stored or who may read them.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bottega.addons.edits.engine.activations import EditActivations
from bottega.addons.edits.engine.order import PendingAnswer
from bottega.addons.edits.engine.recordings.step_access import ImageRecorder
from bottega.device.device import Device, HostCopy
from bottega.engine.addon import JobAddOn
from bottega.engine.encode import Conditions
from bottega.engine.events import EngineRecord
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.latent_step import Trajectory
from bottega.engine.request import Request
from bottega.engine.spans import StoreWork
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.rows import Half
from bottega.model.samplers import same_noise
from bottega.rules import MAX_KEPT_BYTES

if TYPE_CHECKING:
    from bottega.addons.edits.engine.addon import EngineEdits

_log = logging.getLogger(__name__)

VERSION = 3
_MAX_BYTES = MAX_KEPT_BYTES - 256  # the rest is for the message around them

_HEADER = "bottega"
_TENSOR = "latents"
_NAME = re.compile("[0-9a-f]{32}")


class KeptLatentsMismatch(ValueError):
    """The error that kept latents are damaged, or of another model, size or format version."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptLatents:
    """The latents of all steps of one picture."""

    latents: Tensor
    """The latent before each evaluation, then the finished one, [evaluations + 1, channels, height, width]. They are
    divided by the sampler's signal, so that edits with other samplers can use them."""
    noise_levels: tuple[float, ...]
    """Noise level of each evaluation; see `Sampler`."""
    seed: int
    template: str
    """Name under which the picture's activations are recorded, 32 hex digits."""

    @property
    def image_latent(self) -> Tensor:
        """The finished latent, [1, channels, height, width]."""
        return self.latents[-1:]

    def trajectory(self, noise_levels: Sequence[float], begin: int) -> Trajectory | None:
        """Return the latents before an edit's evaluations from `begin` on; None if the picture lacks a noise level."""
        trajectory: dict[int, Tensor] = {}
        places = iter(enumerate(self.noise_levels))
        for evaluation, level in enumerate(noise_levels, begin):
            place = next((place for place, kept in places if same_noise(kept, level)), None)
            if place is None:
                return None
            trajectory[evaluation] = self.latents[place][None]
        return trajectory


def are_too_large(model: Model, spec: ResolvedSpec) -> bool:
    """Return whether the latents of a spec's pictures are too large to keep, even in float16."""
    height, width = spec.height // model.latent_scale, spec.width // model.latent_scale
    evaluations = model.samplers.pace(spec.sampler).evaluations(spec.steps)
    elements = (evaluations + 1) * model.latent_channels * height * width
    return elements * torch.float16.itemsize > _MAX_BYTES


def write_kept(model: Model, kept: KeptLatents) -> bytes | None:
    """Serialize latents in the model's dtype, or in float16 if that is too large. Return None if both are too large."""
    header = {
        "version": VERSION,
        "model_hash": model.digest,
        "dtype": model.dtype_name,
        "noise_levels": kept.noise_levels,
        "seed": kept.seed,
        "template": kept.template,
    }
    for dtype in (model.dtype, torch.float16):
        latents = kept.latents.to("cpu", dtype).contiguous()
        data = safetensors.torch.save({_TENSOR: latents}, metadata={_HEADER: json.dumps(header)})
        if len(data) <= _MAX_BYTES:
            return data
    return None


def template_of(data: bytes) -> str:
    """Return the template's name from serialized latents; empty if they cannot be read."""
    try:
        return str(_header(data)["template"])
    except (KeyError, TypeError, ValueError):
        return ""


def read_kept(data: bytes, model: Model, shape: tuple[int, ...]) -> KeptLatents:
    """Deserialize latents to the model's device and dtype. `shape` is the expected [channels, height, width].

    Raise KeptLatentsMismatch if they are damaged, or do not fit the model, its dtype or the shape.
    """
    try:
        header = _header(data)
        expected = {"version": VERSION, "model_hash": model.digest, "dtype": model.dtype_name}
        for name, value in expected.items():
            if header[name] != value:
                raise KeptLatentsMismatch(f"their {name} is {header[name]!r}, not {value!r}")
        latents = safetensors.torch.load(data)[_TENSOR]
        kept = KeptLatents(
            latents=latents.to(model.device, model.dtype),
            noise_levels=tuple(float(level) for level in header["noise_levels"]),
            seed=int(header["seed"]),
            template=str(header["template"]),
        )
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, KeptLatentsMismatch):
            raise
        raise KeptLatentsMismatch(f"they are damaged: {type(error).__name__}") from None
    if not _NAME.fullmatch(kept.template):
        raise KeptLatentsMismatch("their name is not 32 hex digits")
    if tuple(latents.shape) != (len(kept.noise_levels) + 1, *shape) or not torch.isfinite(kept.latents).all():
        raise KeptLatentsMismatch(f"they are {tuple(latents.shape)}, which does not fit")
    return kept


def _header(data: bytes) -> dict[str, Any]:
    """Return the JSON header. Raise KeyError, TypeError or ValueError if there is none."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])
    return header


_TOO_LARGE = "no latents are kept: those of the picture are too large"


@dataclass(slots=True, kw_only=True, eq=False)
class _Picture:
    """An image whose latents are kept."""

    request: Request
    template: str
    """See `KeptLatents.template`."""
    device: Device
    latents: dict[int, HostCopy] = field(default_factory=dict)
    """Latents before each evaluation and after the last one, by its index, being copied to the host."""
    recorder: ImageRecorder | None = None
    """Records the image's activations; None if they are not recorded."""

    def row(self, half: Half) -> EditActivations | None:
        """Return the activations that one row of the next step records, None without a recorder, and keep the latent.

        A step that is retried may call this again.
        """
        self.keep_latent()
        return self.recorder.row(half) if self.recorder is not None else None

    @property
    def next_share(self) -> float:
        """Share of the tokens that the next step computes: always 1 in a generation."""
        return 1.0

    def keep_latent(self) -> None:
        """Keep the current latent, unless that was done before this evaluation."""
        now = self.request.evaluation
        if now not in self.latents:
            # A request that continues from a cached latent has skipped steps; drop latents from its other steps.
            self.latents = {before: latent for before, latent in self.latents.items() if before < now}
            self.latents[now] = self.device.to_host(self.request.latent[0])

    def kept(self) -> KeptLatents | None:
        """Return the finished picture's latents; None if another worker ran some steps, because edits need all."""
        request = self.request
        self.keep_latent()
        evaluations = range(request.first_evaluation, request.last_evaluation + 1)
        if not self.latents.keys() >= set(evaluations):
            return None
        return KeptLatents(
            latents=torch.stack([self.latents[place].take() / request.signal_of(place) for place in evaluations]),
            noise_levels=tuple(request.noise_levels),
            seed=request.spec.seed + request.index,
            template=self.template,
        )


def open_keeping(addon: EngineEdits, order: EngineOrder) -> JobKeeping | None:
    """Return the object for a job that keeps latents; None if they would be too large.

    Then activations are not recorded either, because edits find a recording by the name of the latents.
    """
    spec = order.spec
    if not are_too_large(addon.model, spec):
        return JobKeeping(addon, order)
    _log.warning(_TOO_LARGE, extra={"width": spec.width, "height": spec.height, "steps": spec.steps})
    return None


class JobKeeping(JobAddOn):
    """The add-on's object for one generation with `keep_for_editing`."""

    def __init__(self, addon: EngineEdits, order: EngineOrder) -> None:
        self._addon = addon
        self._order = order
        self._job: EngineJob | None = None
        self._pictures: dict[int, _Picture] = {}
        self._templates = [uuid.uuid4().hex for _ in range(order.spec.num_images)]
        self._answers: list[PendingAnswer] = []
        if not addon.unusable:
            self._answers = [addon.ask(order, addon.key(order, template)) for template in self._templates]

    @property
    def waiting_for(self) -> Future[StoreWork | None] | None:
        """The first response that the job waits for, about space for a recording; None if it waits for none."""
        return next((answer.asked for answer in self._answers if answer.asked is not None), None)

    def ready(self, now_s: float) -> bool:
        """Return whether all responses have arrived or timed out."""
        waiting = [answer for answer in self._answers if not answer.ready(now_s)]
        return not waiting

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        self._job = job
        for request in job.requests:
            picture = self._pictures[request.index] = _Picture(
                request=request, template=self._templates[request.index], device=self._addon.model.runtime
            )
            # A request that began elsewhere keeps no latents, so that no edit would find its recording.
            if not self._addon.unusable and not request.begun:
                picture.recorder = self._begin(picture)
            request.activations = picture
        # A second worker records nothing.
        self.offloadable = not any(picture.recorder is not None for picture in self._pictures.values())

    def after_step(self, request: Request) -> None:
        picture = self._pictures.get(request.index)
        if picture is None or picture.request is not request:
            return
        if request.done:
            picture.keep_latent()  # Starts the copy now, so that it has ended when the picture is decoded.
        if picture.recorder is not None:
            picture.recorder.made_step()

    def after_decode(self, index: int, pixels: Tensor) -> bytes | None:
        """Return the image's serialized latents, from which edits of it start."""
        picture = self._pictures[index]
        latents = picture.kept()
        kept = None if latents is None else write_kept(self._addon.model, latents)
        if kept is None:
            why = "no latents are kept: the picture did not begin on this worker" if latents is None else _TOO_LARGE
            _log.warning(why, extra={"image": index})
            if picture.recorder is not None:
                picture.recorder.give_up("its latents are not kept")
        return kept

    def report(self, record: EngineRecord) -> None:
        """Complete the recordings. Discard those with stale residuals, which are known only now."""
        for recorder in self._recorders():
            if any(use.stale_steps for use in record.provenance.controlnets):
                recorder.give_up("residuals of its ControlNets were stale")
            recorder.complete()

    def close(self) -> None:
        for answer in self._answers:
            answer.close()
        for recorder in self._recorders():
            if self._job is None or not self._job.finished:
                recorder.give_up("the job that recorded it did not finish")

    def _recorders(self) -> Iterator[ImageRecorder]:
        return (picture.recorder for picture in self._pictures.values() if picture.recorder is not None)

    def _begin(self, picture: _Picture) -> ImageRecorder | None:
        _, _, height, width = picture.request.latent.shape
        key = self._addon.key(self._order, picture.template)
        begun = self._addon.begin(self._order, key, (height, width))
        if begun is None:
            return None
        return self._addon.recorder(begun, picture.request, torch.ones(height, width, dtype=torch.bool))
