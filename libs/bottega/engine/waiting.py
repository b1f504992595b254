"""Jobs whose prompts are not encoded yet, how they are opened, and requests whose add-ons are not ready to go on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from bottega.device.device import PausableWork, Span, run_pieces
from bottega.engine.addon import EngineAddOn, Parts, close_parts, open_parts
from bottega.engine.batcher import Batcher
from bottega.engine.checkpoint import SavedJob, read_checkpoint
from bottega.engine.encode import (
    Conditions,
    Sources,
    encode_all_prompts,
    encode_image_in_pieces,
)
from bottega.engine.errors import not_finite, prompt_not_finite, to_job_failure, vae_not_finite
from bottega.engine.events import Event, JobDecided, JobFailed, JobStarted
from bottega.engine.job import EngineJob, EngineOrder, InputCheck
from bottega.engine.latent_step import latent_mask
from bottega.engine.limits import try_steps
from bottega.engine.parallel.remote_rows import RemoteJob
from bottega.engine.request import Request
from bottega.engine.spans import DeviceClock, SpanLog
from bottega.engine.spec import ResolvedSpec
from bottega.errors import FieldNotServed, InternalError
from bottega.model.model import Model
from bottega.model.rows import Half
from bottega.model.vae import encode_dtype

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingOrder:
    """A job whose prompt and picture have not been encoded."""

    order: EngineOrder
    addons: Parts
    """The states of its add-ons."""
    held: Parts = field(default_factory=dict)
    """The states of the add-ons that were not ready when they were asked last."""
    encoding: PausableWork[EngineJob] | None = None
    """The encoding, once it has begun."""
    preparing: bool = False
    """Whether its steps are being tried, or its add-ons compute what its prompt needs, before the encoding."""
    uncharged: list[Span] = field(default_factory=list)
    """Times of the encoding that its tenant has not been charged for."""
    device_s: float = 0.0
    """Seconds of the encoding that its tenant has been charged for."""

    @property
    def encodes_image(self) -> bool:
        """Whether an image is being encoded, and paused."""
        return self.encoding is not None and self.order.image is not None

    @property
    def prepares_prompt(self) -> bool:
        """Whether its add-ons may hold memory while they prepare its prompt."""
        return any(part.prepares_prompt for part in self.addons.values())

    def close(self) -> None:
        """End its encoding, and close its add-ons."""
        if self.encoding is not None:
            self.encoding.close()
        close_parts(self.addons)

    def refuse(self, error: Exception) -> JobFailed:
        """Close the job, and return its failure."""
        self.close()
        return JobFailed(key=self.order.key, error=to_job_failure(error))


class WaitingOrders:
    """The jobs whose prompts and pictures have not been encoded, oldest first.

    Args:
        addons: The engine's add-ons.
    """

    def __init__(self, addons: Sequence[EngineAddOn]) -> None:
        self._addons = addons
        self._waiting: deque[WaitingOrder] = deque()

    def __iter__(self) -> Iterator[WaitingOrder]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, order: EngineOrder) -> None:
        """Add a job. Raise the BottegaError of an add-on that cannot serve it."""
        self._waiting.append(WaitingOrder(order=order, addons=open_parts(self._addons, order)))

    def drop(self, key: Hashable) -> None:
        """Remove a job. Do nothing if it is unknown."""
        for waiting in [waiting for waiting in self._waiting if waiting.order.key == key]:
            self._waiting.remove(waiting)
            waiting.close()

    def enable_previews(self, key: Hashable) -> None:
        """Add previews to the progress of a job. Do nothing if it is unknown."""
        for waiting in self._waiting:
            if waiting.order.key == key:
                waiting.order = replace(waiting.order, preview=True)

    def put_back(self, waiting: WaitingOrder) -> None:
        """Let a job wait again whose encoding is paused. It is its tenant's next one."""
        self._waiting.appendleft(waiting)

    def take_ready(
        self, now_s: float, *, used: Callable[[str], float], may_begin: Callable[[str], bool]
    ) -> Iterator[WaitingOrder | JobFailed]:
        """Remove and yield the next job whose prompt can be encoded, after failures of those that never can be.

        Args:
            now_s: The engine's clock.
            used: Returns how much of the device a tenant has used. The oldest job of the tenant with the least is next.
            may_begin: Returns whether a tenant's job may be encoded now.
        """
        ordered = sorted(self._waiting, key=lambda waiting: used(waiting.order.share.tenant))
        # A paused encoding of an image holds memory, and so does what is prepared for a prompt: one of each at a time.
        encodes_image = any(waiting.encodes_image for waiting in self._waiting)
        prepares = any(waiting.preparing and waiting.prepares_prompt for waiting in self._waiting)
        for waiting in ordered:
            later = (encodes_image and waiting.order.image is not None) or (prepares and waiting.prepares_prompt)
            if later and waiting.encoding is None:
                continue
            try:
                waiting.held = {addon: part for addon, part in waiting.addons.items() if not part.ready(now_s)}
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                self._waiting.remove(waiting)
                yield waiting.refuse(error)
                continue
            if waiting.held:
                continue
            if not may_begin(waiting.order.share.tenant):
                return  # The tenants of all later ones have used more.
            self._waiting.remove(waiting)
            yield waiting
            return


class TenantAccounts:
    """Charges the tenants of jobs for device seconds outside of denoising steps."""

    def __init__(self, batcher: Batcher[Request]) -> None:
        self._batcher = batcher

    def charge(self, job: EngineJob | WaitingOrder, seconds: float) -> None:
        """Charge a job's tenant for seconds of the device."""
        job.device_s += seconds
        self._batcher.charge(job.order.share, seconds)

    def charge_ended(self, job: EngineJob | WaitingOrder) -> None:
        """Charge a job's tenant for its `uncharged` work that the device has done."""
        while job.uncharged and job.uncharged[0].ready:
            self.charge(job, job.uncharged.pop(0).seconds)


# How long an idle engine waits for the data of jobs. It is short because commands are read between turns.
_PAUSE_S = 0.05


class ReadinessGate:
    """Adds requests to the batcher when their add-ons are ready, and removes them when they are not."""

    def __init__(self, batcher: Batcher[Request], addons: Sequence[EngineAddOn]) -> None:
        self._batcher = batcher
        self._addons = addons

    def update(self, job: EngineJob, now_s: float) -> Iterator[Event]:
        """Add requests of a job to the batcher if they can make their next step, and remove the others.

        Raises:
            BottegaError: The job can never go on.
        """
        if job.started and not job.addons:
            return
        for part in job.addons.values():
            part.update(now_s)
        yield from self._decisions(job)
        under_way = [request for request in job.runs if not request.done]
        blocked = set[Request]()
        job.held = {}
        for addon, part in job.addons.items():
            if held := {request for request in under_way if part.blocks(request)}:
                job.held, blocked = {**job.held, addon: part}, blocked | held
        for request in job.runs:
            if request in blocked:
                self._batcher.remove(request)
            elif not request.done and request not in self._batcher:
                self._batcher.add(request, job.order.share)
                if request.alone:
                    self._batcher.make_exclusive(request)
        if not job.started and len(blocked) < len(job.runs):
            job.started, job.checkpoint_s = True, now_s
            yield JobStarted(key=job.key, steps_total=job.steps_total, steps_resumed=job.steps_resumed)

    def wait(self, held: Sequence[Parts]) -> None:
        """Wait briefly for the data of the add-ons that hold jobs, when there is nothing else to do."""
        for addon in self._addons:
            waiting = [part for parts in held if (part := parts.get(addon)) is not None]
            if waiting:
                addon.wait(waiting, _PAUSE_S)
                return

    def _decisions(self, job: EngineJob) -> Iterator[Event]:
        """Yield the decisions that add-ons made since the last call, before the steps that they change."""
        made = {addon.kind: part.decision for addon, part in job.addons.items()}
        decided = {kind: decision for kind, decision in made.items() if decision is not None}
        if decided != job.decided:
            job.decided = decided
            yield JobDecided(key=job.key, decisions=decided)


def open_waiting(
    model: Model, waiting: WaitingOrder, addons: Sequence[EngineAddOn], now_s: float, clock: DeviceClock
) -> Generator[None, None, EngineJob]:
    """Prepare a job's add-ons for its prompt, and open the job, in pieces; see `open_job`.

    Args:
        addons: The engine's add-ons.
    """
    waiting.preparing = True
    yield from try_steps(waiting.order.spec, model.samplers)
    for part in waiting.addons.values():
        yield from part.prepare_prompt()
    waiting.preparing = False
    # Nothing may pause between this and the encoding of the prompt, for which add-ons change the text encoders.
    for addon in addons:
        addon.before_prompt(waiting.addons.get(addon))
    return (yield from open_job(model, waiting.order, waiting.addons, now_s, clock))


def open_job(
    model: Model,
    order: EngineOrder,
    addons: Parts,
    now_s: float,
    clock: DeviceClock,
    *,
    conditions: Sequence[Conditions] | None = None,
) -> Generator[None, None, EngineJob]:
    """Encode a job's prompt and picture in pieces, and resume from its checkpoint if there is one that fits.

    Args:
        addons: The states of the job's add-ons, which may still wait for something.
        now_s: Monotonic seconds.
        clock: Clock of the model's device.
        conditions: Conditions of each image; None if they have to be encoded, or an add-on has them.

    Raises:
        BottegaError: An add-on cannot serve the job, or an input has NaN or infinity.
    """
    tokenizers = next((part.tokenizers for part in addons.values() if part.tokenizers), model.tokenizers)
    given = (part.conditions for part in addons.values() if part.conditions is not None)
    conditions = conditions if conditions is not None else next(given, None)
    if conditions is None:
        changed = any(part.changes_prompt for part in addons.values())
        reading = replace(model, tokenizers=tokenizers)
        conditions = encode_all_prompts(reading, order.spec, tenant=order.share.tenant, changed=changed)
    yield
    state = _resumed_state(model, order) if all(part.resumable for part in addons.values()) else None
    if state is None:
        sources = yield from _encode_sources(model, order)
        requests, pinned = new_requests(model, order, conditions, sources), order.decisions
    else:
        sources = Sources(mask=_latent_mask(model, order))
        requests = [
            Request(
                model,
                order.spec,
                conditions[index],
                index=index,
                sources=sources,
                resume=image,
                alone=not order.shared_turns,
            )
            for index, image in enumerate(state.images)
        ]
        pinned = {**order.decisions, **state.decisions}
    job = EngineJob(
        order=order,
        requests=requests,
        truncations=list(dict.fromkeys(cut for single in conditions for cut in single.truncations)),
        addons=addons,
        pinned=pinned,
        spans=SpanLog(clock),
        inputs=_input_checks(model, order.spec, conditions, requests),
        shared_in_half_precision=state is not None and state.shared_in_half_precision,
        denoised_as_stock=not model.operations.rounds_weights and (state is None or state.denoised_as_stock),
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
    of_prompt = prompt_not_finite(model.text_encoders[-1].dtype)
    if spec.loras or spec.embeddings:
        of_prompt = not_finite(spec.loras, embeddings=spec.embeddings)
    distinct = {id(single): single for single in conditions}
    checks = [InputCheck(finite=single.finite, error=of_prompt) for single in distinct.values()]
    # All images of a job have the same sources.
    error = vae_not_finite("encoded the image", encode_dtype(model.vae))
    return checks + [InputCheck(finite=finite, error=error) for finite in requests[0].sources_finite]


def _encode_sources(model: Model, order: EngineOrder) -> Generator[None, None, Sources]:
    """Encode the picture of an order in pieces."""
    _check_image(order)
    mask = _latent_mask(model, order)
    if order.image is None:
        return Sources(mask=mask)
    image = yield from encode_image_in_pieces(model, order.image)
    if mask is None or not model.image_channels:
        return Sources(image=image, mask=mask)
    masked_image = yield from encode_image_in_pieces(model, order.image, mask=order.mask)
    return Sources(image=image, mask=mask, masked_image=masked_image)


def new_requests(
    model: Model, order: EngineOrder, conditions: Sequence[Conditions], sources: Sources | None = None
) -> list[Request]:
    """Return the requests of an order's images, before their first steps.

    Args:
        conditions: Conditions of each image.
        sources: The order's encoded picture; by default, it is encoded here.
    """
    sources = sources or run_pieces(_encode_sources(model, order))
    return [
        Request(model, order.spec, single, index=index, sources=sources, alone=not order.shared_turns)
        for index, single in enumerate(conditions)
    ]


def _check_image(order: EngineOrder) -> None:
    if (order.spec.strength is None) != (order.image is None):
        raise InternalError("a strength came without an image, or an image without one")


def _latent_mask(model: Model, order: EngineOrder) -> Tensor | None:
    """Return the mask of an edit in the model's latent size; None if the order is no edit.

    Raises:
        FieldNotServed: The model cannot edit images (`Model.edits_refused_because`).
        InternalError: An input of the edit is missing.
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
    """Return the state in the order's checkpoint; None if there is none that fits."""
    if not order.checkpoint:
        return None
    try:
        return read_checkpoint(order.checkpoint, model, order.spec)
    except ValueError as error:
        _log.warning("a checkpoint does not fit; the job starts from the beginning", extra={"why": str(error)})
        return None


def _remote_job(job: EngineJob, conditions: Sequence[Conditions]) -> RemoteJob | None:
    """Return what another worker needs to compute rows of the job; None if it may compute none.

    Without guidance there is only one row. A job of several prompts stays here, because a remote job has one prompt.
    """
    first, order = conditions[0], job.order
    if first.unconditional is None or order.spec.prompts or not (order.latent_parallelism and order.shared_turns):
        return None
    if not all(part.offloadable for part in job.addons.values()):
        return None
    halves = {Half.UNCONDITIONAL: first.unconditional, Half.CONDITIONAL: first.conditional}
    offloaded = {addon.kind: part.offload() for addon, part in job.addons.items()}
    return RemoteJob(halves=halves, parts={kind: part for kind, part in offloaded.items() if part is not None})
