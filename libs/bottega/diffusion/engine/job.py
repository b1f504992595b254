"""One job in the engine: from its order to its images' requests, and the record of what happened to it.

Knows no groups and no other jobs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from bottega.diffusion.controlnets.addon import ControlSessions, open_controls
from bottega.diffusion.controlnets.provider import ControlHosts, ControlNets
from bottega.diffusion.engine.checkpoint import read_checkpoint
from bottega.diffusion.engine.encode import Conditions, encode_image, encode_prompts
from bottega.diffusion.engine.events import EngineRecord, PairRecord
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.engine.request import Request
from bottega.diffusion.loras import LoraStore
from bottega.diffusion.loras.addon import JobLoras
from bottega.diffusion.loras.similarity import LatentMeter
from bottega.diffusion.model.model import Model
from bottega.diffusion.parallel.offload import RemoteJob
from bottega.diffusion.parallel.pair import PairPrediction
from bottega.diffusion.rows import Half
from bottega.diffusion.spec import ResolvedSpec
from bottega.errors import InternalError

_log = logging.getLogger(__name__)

# A checkpoint is due after this share of a job's steps at the latest, so that short jobs have some too.
_CHECKPOINT_SHARE = 0.1

STAGES = ("encode", "denoise", "batch", "decode")
# Of jobs that use some: waiting for them, before the first step and in steps.
CONTROLNETS = "controlnets"
# Of jobs that use some: what could not go on for want of them, and changing weights for them.
LORAS = "loras"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineOrder:
    """What the engine is told to draw.

    key: unique among the jobs that it holds. image: source of image-to-image, uint8 [height, width, 3].
    control_images: one for each of the spec's ControlNets, uint8 [its height, its width, 3].
    control_hosts: where each of those is, beside here; without them they are here.
    stale_residuals: whether residuals may be one step old. latent_parallelism: whether the other worker of a pair may
    compute rows.
    lora_stores: that have the spec's LoRAs, the best first. loras_step: at which they went in in an earlier attempt,
    where it told so.
    checkpoint: of an earlier attempt; empty to begin at the beginning. preview: whether to show the way.
    """

    key: Hashable
    spec: ResolvedSpec
    image: Tensor | None = None
    control_images: tuple[Tensor, ...] = ()
    control_hosts: tuple[ControlHosts, ...] = ()
    stale_residuals: bool = False
    lora_stores: tuple[LoraStore, ...] = ()
    loras_step: int | None = None
    latent_parallelism: bool = True
    checkpoint: bytes = b""
    preview: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class EngineJob:
    """A job whose prompt has been encoded. truncations: see Conditions. encoder_s, pair: see EngineRecord.

    meter: measures what its LoRAs change, where the order says so.
    started: whether its ControlNets have been there, and it was told to have begun.
    guest: what the other worker of a pair is told of it; None where none of its rows may be lent.
    """

    order: EngineOrder
    requests: Sequence[Request]
    truncations: dict[str, str]
    controls: ControlSessions = field(default_factory=ControlSessions)
    loras: JobLoras = field(default_factory=JobLoras)
    meter: LatentMeter = field(default_factory=LatentMeter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    guest: RemoteJob | None = None
    encoder_s: float = 0.0
    pair: PairRecord | None = None
    drawn: set[int] = field(default_factory=set)
    started: bool = False
    reported_s: float = -math.inf
    checkpoint_s: float = 0.0
    checkpoint_steps: int = 0
    _steps: int = 0
    _group_requests: int = 0

    @property
    def key(self) -> Hashable:
        """The order's."""
        return self.order.key

    @property
    def runs(self) -> tuple[Request, ...]:
        """All that is denoised for it: its images, and what is measured beside them."""
        return (*self.requests, *self.meter.shadows)

    @property
    def steps_total(self) -> int:
        """Over all images."""
        return sum(request.steps for request in self.requests)

    @property
    def steps_done(self) -> int:
        """Over all images, those of a checkpoint included."""
        return sum(request.step - request.begin for request in self.requests)

    @property
    def steps_resumed(self) -> int:
        """That a checkpoint brought."""
        return sum(request.resumed_from - request.begin for request in self.requests)

    def undrawn(self) -> Request | None:
        """An image whose latent is finished, and which has not been handed out; none before all was measured."""
        if not self.meter.done:
            return None
        return next((request for request in self.requests if request.done and request.index not in self.drawn), None)

    @property
    def finished(self) -> bool:
        """Whether all images have been handed out."""
        return len(self.drawn) == len(self.requests)

    def checkpoint_due(self, now_s: float, interval_s: float) -> bool:
        """By time or by a tenth of the steps, whichever comes first; never twice for the same step."""
        steps = self.steps_done - self.checkpoint_steps
        share = max(1, math.ceil(_CHECKPOINT_SHARE * self.steps_total))
        return steps > 0 and (steps >= share or now_s - self.checkpoint_s >= interval_s)

    def opened(self, waited_s: float) -> None:
        """Its ControlNets, if it uses some, were there after so long; again, when they had been lost."""
        if self.order.spec.controlnets:
            self.seconds[CONTROLNETS] += waited_s

    def took(self, prediction: Prediction, *, sampler_s: float, turn_s: float) -> None:
        """One of its steps ran in a turn of so many seconds; waiting for ControlNets is its own only if it has some."""
        denoise_s = prediction.seconds + sampler_s
        waited_s = prediction.waited_s if self.controls.active else 0.0
        self.seconds["denoise"] += denoise_s
        self.seconds["batch"] += turn_s - denoise_s - waited_s
        if self.controls.active:
            self.seconds[CONTROLNETS] += waited_s
            self.encoder_s += prediction.encoder_s

    def lent(self, prediction: PairPrediction, worker: str) -> None:
        """One of its steps ran in a turn of a pair whose other worker has this name."""
        steps = sum(request in prediction.lent for request in self.requests)
        taken_back = sum(request in prediction.taken_back for request in self.requests)
        if not steps and not taken_back:
            return
        before = self.pair or PairRecord(worker=worker, steps=0, taken_back_steps=0, waited_s=0.0)
        self.pair = PairRecord(
            worker=worker,
            steps=before.steps + steps,
            taken_back_steps=before.taken_back_steps + taken_back,
            waited_s=before.waited_s + prediction.peer_wait_s,
        )

    def shared(self, requests: int) -> None:
        """One of its steps ran in a group of so many requests."""
        self._steps += 1
        self._group_requests += requests

    def shown(self) -> Request:
        """The image that a preview shows: the first that is under way, else the last."""
        return next((request for request in self.requests if not request.done), self.requests[-1])

    def record(self) -> EngineRecord:
        """What happened to it."""
        if self.order.spec.loras:
            self.seconds[LORAS] = self.loras.wait_s + self.loras.patch_s
        return EngineRecord(
            begin_step=self.requests[0].begin,
            truncations=self.truncations,
            seconds=self.seconds,
            mean_group_requests=self._group_requests / self._steps if self._steps else 0.0,
            controlnets=self.controls.uses(self.order.spec),
            encoder_s=self.encoder_s,
            loras=self.loras.records(self.meter.similarities),
            pair=self.pair,
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time of the block to a stage."""
        began_s = perf_counter()
        yield
        self.seconds[name] += perf_counter() - began_s


def open_job(
    model: Model, order: EngineOrder, controlnets: ControlNets | None = None, loras: JobLoras | None = None
) -> EngineJob:
    """The first stage: encodes prompt and picture, and goes on from the checkpoint where there is one that fits.

    Its ControlNet sessions are begun, and need not be open yet. loras: what they do to the text encoders is in place.
    """
    conditions = encode_prompts(model, order.spec)
    requests = _resumed(model, order, conditions) or _begun(model, order, conditions)
    shadows = _begun(model, order, conditions) if order.spec.loras_measured else ()
    steps = sum(request.step - request.begin for request in requests)
    job = EngineJob(
        order=order,
        requests=requests,
        truncations=conditions.truncations,
        loras=loras or JobLoras(),
        meter=LatentMeter(shadows),
        checkpoint_steps=steps,
    )
    _pin(job)
    if order.spec.controlnets:
        step = min(request.step for request in requests)
        job.controls = open_controls(
            controlnets,
            order.spec,
            order.control_images,
            conditions,
            from_step=step,
            hosts=order.control_hosts,
            may_be_stale=order.stale_residuals,
        )
        job.seconds[CONTROLNETS] = 0.0
        for request in requests:
            request.controls = job.controls.active
    job.guest = _guest(order, conditions, job.controls)
    return job


def _pin(job: EngineJob) -> None:
    """An attempt goes on with the step at which the LoRAs went in before it, if they did."""
    decided = next((request.loras_from for request in job.requests if request.loras_from is not None), None)
    pinned = job.order.loras_step if decided is None else decided
    if pinned is not None:
        job.loras.step = pinned


def _guest(order: EngineOrder, conditions: Conditions, controls: ControlSessions) -> RemoteJob | None:
    """What another worker must know to compute rows of the job. Without guidance there is nothing to halve."""
    if conditions.unconditional is None or not order.latent_parallelism:
        return None
    halves = {Half.UNCONDITIONAL: conditions.unconditional, Half.CONDITIONAL: conditions.conditional}
    return RemoteJob(
        halves=halves,
        controls=controls.begun,
        handles=tuple(controls.handles),
        loras=order.spec.loras,
        lora_stores=order.lora_stores,
    )


def _begun(model: Model, order: EngineOrder, conditions: Conditions) -> list[Request]:
    spec = order.spec
    if (spec.strength is None) != (order.image is None):
        raise InternalError("a strength came without an image, or an image without one")
    image = None if order.image is None else encode_image(model, order.image)
    return [Request(model, spec, conditions, index=index, image=image) for index in range(spec.num_images)]


def _resumed(model: Model, order: EngineOrder, conditions: Conditions) -> list[Request]:
    """The requests as the order's checkpoint has them; none where there is none that fits.

    None as well where LoRAs are measured: what was measured before the checkpoint is not in it.
    """
    if not order.checkpoint or order.spec.loras_measured:
        return []
    try:
        states = read_checkpoint(order.checkpoint, model, order.spec)
        return [Request(model, order.spec, conditions, index=index, resume=state) for index, state in enumerate(states)]
    except ValueError as error:
        _log.warning("a checkpoint does not fit; the job begins again", extra={"why": str(error)})
        return []
