"""A job in the engine: its order, the requests of its images, and the record of what happened to it."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from bottega.device.device import HostCopy, Span
from bottega.engine.addon import Parts
from bottega.engine.checkpoint import SavedJob
from bottega.engine.events import CutText, Decisions, EngineRecord
from bottega.engine.forward import Prediction
from bottega.engine.parallel.pair import PairPrediction
from bottega.engine.parallel.remote_rows import RemoteJob
from bottega.engine.request import Request
from bottega.engine.spans import EngineTrace, SpanLog
from bottega.engine.spec import ResolvedSpec
from bottega.errors import NotFinite
from bottega.fair_order import Share
from bottega.model.rows import Row
from bottega.model.vae import DecodedAs
from bottega.v1.generation_pb2 import Provenance, Truncation

# A checkpoint is due after at most this share of a job's steps, so that short jobs have checkpoints too.
_CHECKPOINT_SHARE = 0.1

STAGES = ("encode", "denoise", "batch", "decode")
# Tracks of a trace.
DENOISE, WAITS = "denoise", "waits"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineOrder:
    """The input of a job: its spec, images, messages to add-ons, and the state of earlier attempts."""

    key: Hashable
    """Unique among the jobs of the engine."""
    spec: ResolvedSpec
    image: Tensor | None = None
    """Source of image-to-image, uint8 [height, width, 3]; None for text-to-image."""
    mask: Tensor | None = None
    """Mask of an edit, uint8 [height, width]: 1 where the image is redrawn, else 0. None if the job is no edit."""
    kept: Mapping[str, bytes] = field(default_factory=dict)
    """`JobKept.by_kind` of the job that drew the image of an edit; empty if nothing was stored."""
    control_images: tuple[Tensor, ...] = ()
    """One for each of the spec's ControlNets, uint8 [its height, its width, 3]."""
    addons: Mapping[str, bytes] = field(default_factory=dict)
    """Serialized messages to add-ons, by kind. Each add-on defines its own."""
    decisions: Decisions = field(default_factory=dict)
    """Decisions of earlier attempts, by kind of add-on."""
    latent_parallelism: bool = True
    """Whether the other worker of a pair may compute rows."""
    shared_turns: bool = True
    """Whether its steps may run with rows of other jobs, and be split over forward passes and workers."""
    checkpoint: bytes = b""
    """A checkpoint of an earlier attempt; b"" to start from the beginning."""
    preview: bool = False
    """Whether progress reports have previews."""
    share: Share = field(default_factory=Share)
    """The tenant of the job, and its weight."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputCheck:
    """The check that an input of a job has neither NaN nor infinity. The device reports the result later."""

    finite: HostCopy
    """One bool: whether it passed."""
    error: NotFinite
    """The error of the job if it did not."""


class TurnSeconds(NamedTuple):
    """The seconds of the device that a request has in turns that it shares with others."""

    charged_s: float = 0.0
    """What its tenant is charged for: computing by rows, waiting for ControlNets, and patching LoRAs."""
    plain_s: float = 0.0
    """What its turns take alone and without ControlNets and LoRAs."""
    controlnets_s: float = 0.0
    """Its part of waiting for ControlNets."""
    loras_s: float = 0.0
    """Its part of patching LoRAs, and of computing them beside the weights."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineJob:
    """A job whose prompt has been encoded."""

    order: EngineOrder
    requests: Sequence[Request]
    truncations: Sequence[CutText]
    addons: Parts
    """The states of the job's add-ons."""
    pinned: Decisions
    """Decisions of earlier attempts, by kind of add-on."""
    spans: SpanLog
    """Time spans for the trace of the job."""
    held: Parts = field(default_factory=dict)
    """The states of the add-ons that block one of its requests."""
    decided: Decisions = field(default_factory=dict)
    """Decisions of this attempt that have been reported."""
    extra: Sequence[Request] = ()
    """Additional requests that are denoised only to measure something. Images are reported after these are done."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    encodings: Sequence[Span] = ()
    """The times of encoding: several if steps of other jobs ran in between."""
    device_s: float = 0.0
    """Seconds of the device that the job has used so far, including its share of batches."""
    turns_s: TurnSeconds = field(default_factory=TurnSeconds)
    """Seconds of its turns so far."""
    uncharged: list[Span] = field(default_factory=list)
    """Times of work outside of batches, such as encoding, that `device_s` does not include yet."""
    remote_job: RemoteJob | None = None
    """What the other worker of a pair needs to know of the job; None if it may compute no rows."""
    provenance: Provenance = field(default_factory=Provenance)
    """Facts for its record: how its images were decoded, and what the other worker of a pair computed."""
    inputs: list[InputCheck] = field(default_factory=list)
    """Checks of prompts and pictures whose results have not been read."""
    decoded_as_stock: bool = True
    """Whether all of its images so far were decoded as stock Diffusers does."""
    shared_in_half_precision: bool = False
    """Whether, in half precision, a step of its images was not computed alone, in this attempt or before."""
    denoised_as_stock: bool = True
    """Whether no step, in this attempt or before, was computed with rounded weights."""
    drawn: set[int] = field(default_factory=set)
    """Indices of the images that have been reported."""
    started: bool = False
    """Whether JobStarted was reported."""
    reported_s: float = -math.inf
    """Time of the last progress report, in monotonic seconds."""
    checkpoint_s: float = 0.0
    """Time of the last checkpoint, in monotonic seconds."""
    checkpoint_steps: int = 0
    """Finished steps at the last checkpoint."""
    _steps: int = 0
    _group_requests: int = 0

    @property
    def key(self) -> Hashable:
        return self.order.key

    @property
    def runs(self) -> tuple[Request, ...]:
        """The requests that are denoised for the job: its images and `extra`."""
        return (*self.requests, *self.extra)

    @property
    def steps_total(self) -> int:
        """Number of steps over all images."""
        return sum(request.steps for request in self.requests)

    @property
    def steps_done(self) -> int:
        """Number of finished steps over all images, including those before a checkpoint."""
        return sum(request.step - request.begin for request in self.requests)

    @property
    def evaluations_left(self) -> int:
        """Number of evaluations of the network that its images still need."""
        return sum(request.evaluations_left for request in self.requests)

    @property
    def computed_share(self) -> float:
        """Fraction of its rows' tokens that their next steps compute; the rest is reused."""
        shares = [request.computed_share for request in self.requests if not request.done]
        return sum(shares) / len(shares) if shares else 1.0

    @property
    def steps_resumed(self) -> int:
        """Number of steps that were finished before the checkpoint."""
        return sum(request.resumed_from - request.begin for request in self.requests)

    def undrawn(self, under_way: Container[Request]) -> Request | None:
        """Return an image whose latent is finished but that has not been reported, or None.

        While requests of `extra` run, no image is reported.

        Args:
            under_way: Images that are being decoded, which are left out.
        """
        if not all(request.done for request in self.extra):
            return None
        left = (request for request in self.requests if request.done and request.index not in self.drawn)
        return next((request for request in left if request not in under_way), None)

    @property
    def finished(self) -> bool:
        """Whether all images have been reported."""
        return len(self.drawn) == len(self.requests)

    def checkpoint_due(self, now_s: float, interval_s: float) -> bool:
        """Return whether a checkpoint is due: after `interval_s` or a tenth of the steps, but at most one per step."""
        steps = self.steps_done - self.checkpoint_steps
        share = max(1, math.ceil(_CHECKPOINT_SHARE * self.steps_total))
        return steps > 0 and (steps >= share or now_s - self.checkpoint_s >= interval_s)

    def state(self) -> SavedJob:
        """Return the state that another engine needs to continue the job, besides its spec."""
        return SavedJob(
            images=[request.state() for request in self.requests],
            decisions={**self.pinned, **self.decided},
            shared_in_half_precision=self.shared_in_half_precision,
            denoised_as_stock=self.denoised_as_stock,
        )

    def check_inputs(self, *, to_the_end: bool = False) -> None:
        """Raise NotFinite if the prompt's embeddings or the encoded picture are known to have NaN or infinity.

        Args:
            to_the_end: Whether to wait for results that the device has not reported yet.
        """
        waiting = []
        for check in self.inputs:
            if not (to_the_end or check.finite.ready):
                waiting.append(check)
            elif not bool(check.finite.take()):
                raise check.error
        self.inputs = waiting

    def note_decoding(self, how: DecodedAs) -> None:
        """Record how one of its images was decoded."""
        self.provenance.vae_dtype = how.dtype
        self.provenance.vae_tiled |= how.tiled
        self.decoded_as_stock &= not how.tiled and how.stock_dtype

    def note_elsewhere(self, stage: str, seconds: float) -> None:
        """Add the seconds that another process computed a stage for it."""
        self.seconds[stage] += seconds
        self.device_s += seconds

    def note_step(self, request: Request, *, group_requests: int, shared: bool) -> None:
        """Record that a request of the job made a step in a batch of `group_requests` requests.

        Args:
            shared: Whether its rows were not computed alone (`Prediction.shared`).
        """
        for part in self.addons.values():
            part.after_step(request)
        self.shared_in_half_precision |= shared and request.key.dtype.itemsize < torch.float32.itemsize
        self._steps += 1
        self._group_requests += group_requests

    def note_turn(self, prediction: Prediction, *, sampler_s: float, turn: Span, steps: str) -> None:
        """Record the times of a turn in which the job made a step.

        Time spent waiting for an add-on counts only for jobs that use this add-on.

        Args:
            sampler_s: Seconds of guidance and samplers.
            turn: The time of the turn.
            steps: Description of the steps that the job made, for the trace.
        """
        turn_s = turn.seconds
        self._note_blocks(prediction)
        facts = {"requests in the batch": str(len({row.owner for row in prediction.noise}))}
        self.spans.add_of_device(steps, DENOISE, turn, facts)
        for wait in prediction.times.waits if self.addons else ():
            self.spans.add_of_device("waiting for residuals", WAITS, wait, {})
        denoise_s = prediction.seconds + sampler_s
        waited_s = sum(part.after_forward(prediction) for part in self.addons.values())
        self.seconds["denoise"] += denoise_s
        self.seconds["batch"] += turn_s - denoise_s - waited_s

    def _note_blocks(self, prediction: Prediction) -> None:
        """Count the blocks that its rows computed and reused, if they may reuse any."""
        if self.order.spec.step_caching and self.order.spec.edit is None:
            rows = [row for row in prediction.noise if row.owner in self.requests]
            self.provenance.blocks_total += len(rows) * prediction.blocks
            self.provenance.blocks_reused += len(prediction.reused.intersection(rows)) * (prediction.blocks - 1)

    def note_seconds(self, took: TurnSeconds) -> None:
        """Add the seconds of one of its requests in a turn."""
        self.device_s += took.charged_s
        self.turns_s = TurnSeconds(*map(add, self.turns_s, took))

    def note_offload(self, prediction: PairPrediction, worker: str) -> None:
        """Record the job's steps in a turn that the pair's other worker, `worker`, computed."""
        steps = sum(request in prediction.offloaded for request in self.requests)
        taken_back = sum(request in prediction.taken_back for request in self.requests)
        if not steps and not taken_back:
            return
        pair = self.provenance.pair
        pair.worker = worker
        pair.steps += steps
        pair.taken_back_steps += taken_back
        pair.waited_s += prediction.peer_wait_s

    def active_parts(self, row: Row) -> tuple[int, ...]:
        """Return what is active in a row, as `active_in` of each add-on of the remote job returns it."""
        parts = self.remote_job.parts if self.remote_job is not None else {}
        return tuple(part.active_in(row) for addon, part in self.addons.items() if addon.kind in parts)

    def previewed(self) -> Request:
        """Return the image that a preview shows: the first unfinished one, else the last."""
        return next((request for request in self.requests if not request.done), self.requests[-1])

    def trace(self) -> EngineTrace:
        """Return the trace of the job, which has ended."""
        for encoding in self.encodings:
            self.spans.add_of_device("encode", "encode", encoding, {})
        for part in self.addons.values():
            for span in part.spans():
                self.spans.add(span)
        return self.spans.read()

    def record(self) -> EngineRecord:
        """Return the record of the job, whose work on the device is done."""
        self.seconds["encode"] += sum(span.seconds for span in self.encodings)
        facts = Provenance(
            begin_step=self.requests[0].begin,
            truncations=[Truncation(field=cut.field, text=cut.text, encoders=cut.encoders) for cut in self.truncations],
            mean_group_requests=self._group_requests / self._steps if self._steps else 0.0,
            device_s=self.device_s,
            plain_s=self.turns_s.plain_s,
            controlnets_s=self.turns_s.controlnets_s,
            loras_s=max(0.0, self.turns_s.loras_s),
        )
        facts.MergeFrom(self.provenance)
        record = EngineRecord(
            provenance=facts,
            seconds=self.seconds,
            decoded_as_stock=self.decoded_as_stock,
            denoised_as_stock=self.denoised_as_stock,
            # What an earlier attempt reused is not known.
            exact=not (self.order.spec.step_caching and (facts.blocks_reused or self.steps_resumed)),
            shared_in_half_precision=self.shared_in_half_precision,
        )
        for part in self.addons.values():
            part.report(record)
        return record
