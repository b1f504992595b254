"""One job in the engine: from its order to its images' requests, and the record of what happened to it."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.diffusion.device.device import HostCopy
from bottega.diffusion.device.span import Span
from bottega.diffusion.engine.addon import Parts
from bottega.diffusion.engine.checkpoint import SavedJob, read_checkpoint
from bottega.diffusion.engine.edit import latent_mask
from bottega.diffusion.engine.encode import Conditions, encode_all_prompts, encode_image
from bottega.diffusion.engine.events import Decisions, EngineRecord, PairRecord
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.engine.request import Request
from bottega.diffusion.engine.spans import DeviceClock, EngineTrace, SpanLog
from bottega.diffusion.errors import not_finite, prompt_not_finite, vae_not_finite
from bottega.diffusion.model.model import Model
from bottega.diffusion.model.vae import VaeDecoder, encode_dtype
from bottega.diffusion.parallel.offload import RemoteJob
from bottega.diffusion.parallel.pair import PairPrediction
from bottega.diffusion.rows import Half, Row
from bottega.diffusion.spec import ResolvedSpec
from bottega.errors import FieldNotServed, InternalError, NotFinite
from bottega.fair_order import Share

_log = logging.getLogger(__name__)

# A checkpoint is due after this share of a job's steps at the latest, so that short jobs have some too.
_CHECKPOINT_SHARE = 0.1

STAGES = ("encode", "denoise", "batch", "decode")
# Tracks of a trace.
DENOISE, WAITS = "denoise", "waits"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineOrder:
    """What the engine is told to draw.

    key: unique among the jobs that it holds. image: source of image-to-image, uint8 [height, width, 3].
    mask: of an edit of it, uint8 [height, width], 1 where it is redrawn, else 0.
    kept_latents: of the job that drew the image of an edit, as its JobKept; empty where nothing was kept.
    control_images: one for each of the spec's ControlNets, uint8 [its height, its width, 3].
    addons: what add-ons are told of it, by kind: messages of their own.
    decisions: of earlier attempts. checkpoint: of an earlier attempt; empty to begin at the beginning.
    latent_parallelism: whether the other worker of a pair may compute rows. preview: whether progress has previews.
    share: of the tenant whose it is.
    """

    key: Hashable
    spec: ResolvedSpec
    image: Tensor | None = None
    mask: Tensor | None = None
    kept_latents: bytes = b""
    control_images: tuple[Tensor, ...] = ()
    addons: Mapping[str, bytes] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=dict)
    latent_parallelism: bool = True
    checkpoint: bytes = b""
    preview: bool = False
    share: Share = field(default_factory=Share)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputCheck:
    """Whether something that a job is drawn from is finite, which a device says later."""

    finite: HostCopy
    """bool."""
    error: NotFinite
    """Why the job fails otherwise."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineJob:
    """A job whose prompt has been encoded. truncations: see Conditions. pair: see EngineRecord.

    addons: its parts of the engine's add-ons. pinned: what earlier attempts decided; decided: what this one has decided
    and told. extra: requests that are denoised beside its images, to measure by; the images are handed out after them.
    spans: what took how long. encoding: of its first stage. started: whether JobStarted was emitted. remote_job: what
    the other worker of a pair is told of it; None where none of its rows may be offloaded.
    """

    order: EngineOrder
    requests: Sequence[Request]
    truncations: dict[str, str]
    addons: Parts
    pinned: Decisions
    spans: SpanLog
    decided: Decisions = field(default_factory=dict)
    extra: Sequence[Request] = ()
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    encoding: Span | None = None
    device_s: float = 0.0
    """Seconds of the device that it has used, as far as they are known: its part of shared turns."""
    charged_encoding: bool = False
    """Whether its encoding is part of `device_s`."""
    remote_job: RemoteJob | None = None
    pair: PairRecord | None = None
    inputs: list[InputCheck] = field(default_factory=list)
    """Checks of prompts and pictures whose outcome has not been looked at."""
    vae_dtype: str = ""
    """The element type that its images were decoded in; empty before the first."""
    vae_tiled: bool = False
    """Whether one of its images was decoded in tiles."""
    decoded_as_stock: bool = True
    """Whether all of its images so far were decoded as stock Diffusers does."""
    drawn: set[int] = field(default_factory=set)
    started: bool = False
    reported_s: float = -math.inf
    checkpoint_s: float = 0.0
    checkpoint_steps: int = 0
    _steps: int = 0
    _group_requests: int = 0

    @property
    def key(self) -> Hashable:
        """The key of the order."""
        return self.order.key

    @property
    def runs(self) -> tuple[Request, ...]:
        """All that is denoised for it: its images, and what is measured beside them."""
        return (*self.requests, *self.extra)

    @property
    def steps_total(self) -> int:
        """Over all images."""
        return sum(request.steps for request in self.requests)

    @property
    def steps_done(self) -> int:
        """Over all images, those of a checkpoint included."""
        return sum(request.step - request.begin for request in self.requests)

    @property
    def steps_left(self) -> int:
        """To go, over all images."""
        return self.steps_total - self.steps_done

    @property
    def computed_share(self) -> float:
        """Of the tokens of its rows, what their next turns compute."""
        shares = [request.computed_share for request in self.requests if not request.done]
        return sum(shares) / len(shares) if shares else 1.0

    @property
    def steps_resumed(self) -> int:
        """Steps that the checkpoint had already done."""
        return sum(request.resumed_from - request.begin for request in self.requests)

    def undrawn(self) -> Request | None:
        """An image whose latent is finished, and which has not been handed out; none while something is measured."""
        if not all(request.done for request in self.extra):
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

    def state(self) -> SavedJob:
        """All that another engine needs to go on with it, beside its spec."""
        return SavedJob(
            images=[request.state() for request in self.requests], decisions={**self.pinned, **self.decided}
        )

    def check_inputs(self, *, to_the_end: bool = False) -> None:
        """Raise NotFinite if the prompt's embeddings, or the encoded picture, are known not to be finite.

        Args:
            to_the_end: Whether to wait for what the device has not said yet.
        """
        waiting = []
        for check in self.inputs:
            if not (to_the_end or check.finite.ready):
                waiting.append(check)
            elif not bool(check.finite.take()):
                raise check.error
        self.inputs = waiting

    def note_decoding(self, decoder: VaeDecoder, *, tiled: bool) -> None:
        """Note how one of its images was decoded."""
        self.vae_dtype = decoder.dtype_name
        self.vae_tiled |= tiled
        self.decoded_as_stock &= not tiled and decoder.dtype == decoder.stock_dtype

    def note_step(self, request: Request, *, group_requests: int) -> None:
        """A request of the job has made a step in a group of so many."""
        for part in self.addons.values():
            part.after_step(request)
        self._steps += 1
        self._group_requests += group_requests

    def note_turn(self, prediction: Prediction, *, sampler_s: float, turn: Span, steps: str) -> None:
        """One of its steps ran in a turn; waiting for an add-on is its own only if it has a part.

        steps: what it made in it, as people say it.
        """
        turn_s = turn.seconds
        facts = {"requests in the group": str(len({row.owner for row in prediction.noise}))}
        self.spans.add_of_device(steps, DENOISE, turn, facts)
        for wait in prediction.times.waits if self.addons else ():
            self.spans.add_of_device("waiting for residuals", WAITS, wait, {})
        denoise_s = prediction.seconds + sampler_s
        waited_s = sum(part.after_forward(prediction) for part in self.addons.values())
        self.seconds["denoise"] += denoise_s
        self.seconds["batch"] += turn_s - denoise_s - waited_s

    def note_offload(self, prediction: PairPrediction, worker: str) -> None:
        """One of its steps ran in a turn of a pair whose other worker has this name."""
        steps = sum(request in prediction.offloaded for request in self.requests)
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

    def active_parts(self, row: Row) -> tuple[int, ...]:
        """What is active in a row, of each part of its remote job."""
        parts = self.remote_job.parts if self.remote_job is not None else {}
        return tuple(part.active_in(row) for addon, part in self.addons.items() if addon.kind in parts)

    def previewed(self) -> Request:
        """The image that a preview shows: the first that is under way, else the last."""
        return next((request for request in self.requests if not request.done), self.requests[-1])

    def trace(self) -> EngineTrace:
        """What took how long, once it has ended."""
        if self.encoding is not None:
            self.spans.add_of_device("encode", "encode", self.encoding, {})
        for part in self.addons.values():
            for span in part.spans():
                self.spans.add(span)
        return self.spans.read()

    def record(self) -> EngineRecord:
        """Return the record of the job, whose work on the device is done."""
        if self.encoding is not None:
            self.seconds["encode"] = self.encoding.seconds
        record = EngineRecord(
            begin_step=self.requests[0].begin,
            truncations=self.truncations,
            seconds=self.seconds,
            mean_group_requests=self._group_requests / self._steps if self._steps else 0.0,
            pair=self.pair,
            vae_dtype=self.vae_dtype,
            vae_tiled=self.vae_tiled,
            decoded_as_stock=self.decoded_as_stock,
            device_s=self.device_s,
        )
        for part in self.addons.values():
            record = part.report(record)
        return record


def open_job(model: Model, order: EngineOrder, addons: Parts, now_s: float, clock: DeviceClock) -> EngineJob:
    """The first stage: encodes prompt and picture, and goes on from the checkpoint where there is one that fits.

    addons: its parts, which may be waiting for something still. clock: of the model's device. Raises what the first of
    the parts raises.
    """
    conditions = encode_all_prompts(model, order.spec)
    state = _resumed_state(model, order) if all(part.resumable for part in addons.values()) else None
    if state is None:
        requests, pinned = new_requests(model, order, conditions), order.decisions
    else:
        mask = _latent_mask(model, order)
        requests = [
            Request(model, order.spec, conditions[index], index=index, mask=mask, resume=image)
            for index, image in enumerate(state.images)
        ]
        pinned = {**order.decisions, **state.decisions}
    job = EngineJob(
        order=order,
        requests=requests,
        truncations={field: text for each in conditions for field, text in each.truncations.items()},
        addons=addons,
        pinned=pinned,
        spans=SpanLog(clock),
        inputs=_input_checks(model, order.spec, conditions, requests),
    )
    job.check_inputs()
    job.checkpoint_steps = job.steps_done
    for part in addons.values():
        part.attach(job, conditions[0], now_s)
    job.remote_job = _remote_job(job, conditions)
    return job


def _input_checks(
    model: Model, spec: ResolvedSpec, conditions: Sequence[Conditions], requests: Sequence[Request]
) -> list[InputCheck]:
    of_prompt = not_finite(spec.loras) if spec.loras else prompt_not_finite(model.text_encoders[1].dtype)
    distinct = {id(each): each for each in conditions}
    checks = [InputCheck(finite=each.finite, error=of_prompt) for each in distinct.values()]
    source = next((request.source_finite for request in requests if request.source_finite is not None), None)
    if source is not None:  # all images of a job have the same source
        error = vae_not_finite("encoded the image", encode_dtype(model.vae))
        checks.append(InputCheck(finite=source, error=error))
    return checks


def new_requests(model: Model, order: EngineOrder, conditions: Sequence[Conditions]) -> list[Request]:
    """Return the order's images, before their first steps.

    Args:
        model: Model that draws them.
        order: What is drawn.
        conditions: Conditions of each image.
    """
    spec = order.spec
    if (spec.strength is None) != (order.image is None):
        raise InternalError("a strength came without an image, or an image without one")
    image = None if order.image is None else encode_image(model, order.image)
    mask = _latent_mask(model, order)
    return [Request(model, spec, each, index=index, image=image, mask=mask) for index, each in enumerate(conditions)]


def _latent_mask(model: Model, order: EngineOrder) -> Tensor | None:
    """Return the mask of an edit for the model's latents; None where the order is no edit.

    Raises:
        FieldNotServed: Where the VAE has statistics of its latents.
        InternalError: Where a part of an edit is missing.
    """
    spec = order.spec
    if order.mask is None and spec.edit is None:
        return None
    if order.mask is None or spec.edit is None or order.image is None:
        raise InternalError("an edit came without its mask or its image, or a mask without an edit")
    if order.mask.shape != (spec.height, spec.width):
        raise InternalError("the mask of an edit came in another size than its picture's")
    if reason := model.edits_refused_because:
        raise FieldNotServed(reason, metadata={"field": "mask_image"})
    return latent_mask(model, order.mask)


def _resumed_state(model: Model, order: EngineOrder) -> SavedJob | None:
    """What the order's checkpoint holds; None where it has none that fits."""
    if not order.checkpoint:
        return None
    try:
        return read_checkpoint(order.checkpoint, model, order.spec)
    except ValueError as error:
        _log.warning("a checkpoint does not fit; the job begins again", extra={"why": str(error)})
        return None


def _remote_job(job: EngineJob, conditions: Sequence[Conditions]) -> RemoteJob | None:
    """Return what another worker must know to compute rows of the job; None where it computes none.

    Without guidance there is nothing to halve. A job of several prompts stays here: the other worker knows one.
    """
    first = conditions[0]
    if first.unconditional is None or not job.order.latent_parallelism or job.order.spec.prompts:
        return None
    if not all(part.offloadable for part in job.addons.values()):
        return None
    halves = {Half.UNCONDITIONAL: first.unconditional, Half.CONDITIONAL: first.conditional}
    told = {addon.kind: part.offload() for addon, part in job.addons.items()}
    return RemoteJob(halves=halves, parts={kind: part for kind, part in told.items() if part is not None})
