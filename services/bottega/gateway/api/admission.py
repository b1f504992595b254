"""Admission: checks a request, fills in the rest, and makes it a job; or attaches it to the job of its request_id.

Nothing is acknowledged before every check has passed, the pixels of input images included, and the job is durable. A
request that is identical to one that was drawn is a job of its own, completed by that one's stored result: it never
waits, whether or not there is room in the queue or a worker is here, and images that were drawn from are not decoded
again. Of identical requests that come while the first is drawn all are drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from bottega import rules
from bottega.background_tasks import BackgroundTasks
from bottega.errors import (
    BottegaError,
    DeadlinePassed,
    DeadlineUnmeetable,
    Draining,
    ModelNotFound,
    RequestIdReused,
    Unavailable,
)
from bottega.fair_order import Share
from bottega.gateway.addons.addon import AddOn, RequiredModel, Resolution
from bottega.gateway.api import defaults, validation
from bottega.gateway.api.identical import IdenticalResult, IdenticalResults
from bottega.gateway.api.image_sources import ImageSource, ImageSources, SeenImages
from bottega.gateway.api.validation import ImageInspector
from bottega.gateway.config import GatewayConfig
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.provenance import answered_provenance
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.specs import has_images, latent_shape, without_images
from bottega.gateway.jobs.storage import Storage, digest
from bottega.gateway.jobs.values import JobRequest, JobTimes
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.tenants.access import Access
from bottega.gateway.tenants.quotas import Admittance, TenantTerms
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_FAILED, PRIORITY_NORMAL, Model, Priority
from bottega.v1.worker_pb2 import AttemptDecisions

# Failures after which the same request is drawn as a new job: they ask for a retry.
_WORTH_A_RETRY = (Unavailable, DeadlinePassed, DeadlineUnmeetable)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCommand:
    """What a caller asks for.

    spec: as it came. deadline_s: as it came: seconds from now after which nobody wants it; None is without bound.
    caller_s: seconds until its caller goes, and the job with it; None for one that goes on without. peer: its host.
    access: whose it is, and what may be named. preview: whether previews are wanted. priority: as it came. log_id: what
    the log calls the request where it has no request_id.
    """

    spec: GenerationSpec
    request_id: str = ""
    deadline_s: float | None = None
    caller_s: float | None = None
    peer: str = ""
    access: Access
    preview: bool = False
    priority: Priority.ValueType = PRIORITY_NORMAL
    log_id: str = ""

    def deadline(self, now: float) -> float | None:
        """The moment after which nobody wants it, on the clock that says `now`."""
        return min((now + s for s in (self.deadline_s, self.caller_s) if s is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The job of a request, and whether it is new: a known request_id attaches to its first run."""

    job: Job
    new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Received:
    """A command with what was found out when it came. fingerprint, size_bytes: of its spec. at: monotonic."""

    command: GenerateCommand
    fingerprint: str
    size_bytes: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """What a request without faults is about: its model, what its add-ons name, and what answers it already.

    images: what was seen of its images, where they were decoded.
    """

    model: Model
    resolutions: Sequence[Resolution]
    identical: IdenticalResult | None
    images: SeenImages


class Admission:
    """The only way in for jobs."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        fleet: Fleet,
        controller: JobController,
        jobs: JobRepository,
        storage: Storage,
        addons: Sequence[AddOn],
        inspector: ImageInspector,
        terms: TenantTerms,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._controller = controller
        self._jobs = jobs
        self._storage = storage
        self._addons = addons
        self._identical = IdenticalResults(
            default=config.identical_results, jobs=jobs, storage=storage, addons=addons, metrics=metrics
        )
        self._sources = ImageSources(jobs, storage)
        self._inspector = inspector
        self._terms = terms
        self._metrics = metrics
        self._storing = BackgroundTasks("storing of jobs")

    async def admit(self, command: GenerateCommand) -> Admitted:
        """Return the job of a request; a new one is durable.

        Raises:
            QuotaExceeded: Not of a known request_id.
            BottegaError: RequestIdReused, InvalidRequest, FieldNotServed or BadImage, Draining, ModelNotFound or
                NoWorker, ControlNetNotFound, ControlNetUnusable or NoControlNet, QueueFull, DeadlineUnmeetable,
                StorageUnavailable, in this order. LoraNotFound, LoraUnusable, NoLora and RecordingNotKept come before
                what is wrong because of the model. Without room no image is decoded, and a request_id cannot be looked
                for where the disk cannot be read.
        """
        try:
            return await self._admit(command)
        except BottegaError as error:
            self._metrics.refused.labels(error.reason_name).inc()
            raise

    async def _admit(self, command: GenerateCommand) -> Admitted:
        at = self._controller.clock.monotonic()
        packed = await _packed(command.spec)
        received = _Received(command=command, fingerprint=await digest(packed), size_bytes=len(packed), at=at)
        del packed
        while True:
            before = await self._before(command)
            if before is not None and self._attach(received, before):
                return Admitted(job=before, new=False)
            async with self._controller.quotas.admitting(command.access.tenant) as place:
                job = await self._new_job(received, before)
                if await self._store_though_cancelled(job, place, replaces=before.job_id if before else ""):
                    return Admitted(job=job, new=True)
            # The same request came twice at once and the other one is stored now, or its answer has gone meanwhile.

    async def _before(self, command: GenerateCommand) -> Job | None:
        """The job that has the request_id of a command."""
        if not command.request_id:
            return None
        return await self._jobs.of_request(command.request_id, tenant=command.access.tenant)

    def _attach(self, received: _Received, job: Job) -> bool:
        """Whether a request is served by the job that has its request_id. Raises RequestIdReused."""
        command = received.command
        if job.request.fingerprint != received.fingerprint:
            raise RequestIdReused("this request_id was used for another request")
        if job.state == JOB_STATE_FAILED and isinstance(job.error, _WORTH_A_RETRY):
            return False
        if not all(self._storage.images.holds(image.digest) for image in job.images):
            return False  # Its images have expired before it has: that it was completed helps nobody.
        rules.refuse(list(validation.check_deadline(command.deadline_s)))
        self._controller.extend(job, command.deadline(self._controller.clock.monotonic()))
        if command.preview:
            self._controller.enable_previews(job)
        return True

    async def _new_job(self, received: _Received, before: Job | None) -> Job:
        """before: the job of the same request that it replaces; a repeated request gets the same image."""
        checked = await self._check(received, before)
        if checked.identical is not None:
            return self._answered_job(received, checked.identical, checked.model)
        full = self._complete(received.command.spec, before, checked.model, checked.resolutions)
        source = await self._sources.find(full, checked.model, checked.images, tenant=received.command.access.tenant)
        self._refuse_if_draining()  # which may have begun meanwhile
        decisions = None if before is None else self._decisions_of(before)
        return self._job(received, full, checked.model, source, decisions=decisions)

    def _answered_job(self, received: _Received, identical: IdenticalResult, model: Model) -> Job:
        """A job that has its result already."""
        source = identical.source
        job = self._job(received, identical.spec, model, ImageSource.of(source.request))
        job.answer(source.images, answered_provenance(job, source))
        return job

    def _job(
        self,
        received: _Received,
        full: GenerationSpec,
        model: Model,
        source: ImageSource,
        *,
        decisions: AttemptDecisions | None = None,
    ) -> Job:
        command = received.command
        request = JobRequest(
            fingerprint=received.fingerprint,
            shape=latent_shape(full, model),
            request_id=command.request_id,
            log_id=command.log_id,
            image_digest=source.image_digest,
            mask_digest=source.mask_digest,
            kept_latents=source.kept_latents,
            result_size=source.result_size,
            template=source.template,
            computed_share=source.computed_share,
            size_bytes=received.size_bytes,
            tenant=command.access.tenant,
            peer=command.access.tenant or command.peer,
            ends_with_caller=command.caller_s is not None,
            priority=command.priority or PRIORITY_NORMAL,
        )
        return Job(
            clock=self._controller.clock,
            request=request,
            spec=full,
            bare=without_images(full) if has_images(full) else full,
            life=self._jobs.life,
            deadline=command.deadline(received.at),
            decisions=decisions or AttemptDecisions(),
            preview=command.preview,
            times=JobTimes(validate_s=self._controller.clock.monotonic() - received.at),
        )

    def _decisions_of(self, before: Job) -> AttemptDecisions:
        """What timing decided when the same request was drawn, and the new job keeps to as a later attempt would."""
        decisions = AttemptDecisions()
        decisions.CopyFrom(before.decisions)
        for addon in self._addons:
            addon.decide_again(decisions, before)
        return decisions

    async def _store_though_cancelled(self, job: Job, place: Admittance, *, replaces: str) -> bool:
        """Stores the job even if the caller leaves; then abandons it if it has no request_id."""

        def abandon(stored: bool) -> None:
            if stored and not job.request.request_id:
                self._controller.abandon(job)

        return await self._storing.run_shielded(self._store_counted(job, place, replaces), on_abandoned=abandon)

    def _store_counted(self, job: Job, place: Admittance, replaces: str) -> Coroutine[Any, Any, bool]:
        """Return what stores a job and counts it for its tenant's quotas, whether or not its caller is still there.

        It holds the place from now on, which is before it begins to run.
        """
        held = contextlib.ExitStack()
        held.enter_context(place.held())

        async def store() -> bool:
            with held:
                stored = await self._store(job, replaces)
                if stored:
                    place.count()
                return stored

        return store()

    async def _store(self, job: Job, replaces: str) -> bool:
        """Make a job durable and submit it.

        Return False if another job with its request_id was stored before, or if the pictures that answer it are gone.
        """
        waits = job.open  # else it has its result
        if waits:
            self._controller.queue.reserve(job)
        try:
            if waits:
                self._check_deadline(job)
            self._storage.check_writable()
            answer = job.outcome.images if job.outcome is not None else ()
            with self._storage.pinned(answer):  # another request may delete the job whose pictures these are
                if not await self._storage.renew_images(answer):
                    return False
                if await self._jobs.add(job, replaces=replaces) is not job:
                    return False
            self._metrics.acknowledged.inc()
            self._controller.submit(job)
            return True
        finally:
            if job.sequence == 0:
                self._controller.queue.remove(job)  # only the room that was reserved

    def _check_deadline(self, job: Job) -> None:
        """Raises DeadlineUnmeetable."""
        try:
            self._controller.estimates.check_deadline(job)
        except DeadlineUnmeetable:
            for addon in self._addons:
                addon.job_refused(job)
            raise

    async def _check(self, received: _Received, before: Job | None) -> _Checked:
        """Every rule, with all violations at once. The model is that of the job before, where there was one."""
        command, spec = received.command, received.command.spec
        found = [
            *validation.check_request_id(command.request_id),
            *validation.check_deadline(command.deadline_s),
            *validation.check_priority(command.priority),
            *validation.check_spec(spec, self._addons, max_image_bytes=self._config.max_image_bytes),
        ]
        meant = before.bare if before else spec
        # What is wrong with a request comes before what the stores know: they are asked when nothing is.
        likely = self._model_of(meant, [], command.access)
        wrong = found or (isinstance(likely, Model) and any(validation.check_model(spec, likely, self._addons)))
        resolutions = [] if wrong else await self._resolve(meant, command.access)
        model = self._model_of(meant, resolutions, command.access)
        identical: IdenticalResult | None = None
        images = SeenImages()
        if isinstance(model, Model):
            found += validation.check_model(spec, model, self._addons)
            if not found:
                validation.check_served(spec, model)
            identical = None if found else await self._find_identical(command, before, model, resolutions)
        elif model is not None:
            found += model.violations
        if has_images(spec) and identical is None:
            tenant = command.access.tenant
            if not found:
                self._refuse_if_draining()
                self._controller.queue.check_room(received.size_bytes, tenant=tenant)
            images = await validation.check_images(
                spec,
                found,
                self._inspector,
                max_pixels=self._config.max_image_pixels,
                model=model if isinstance(model, Model) else None,
                share=Share(tenant=tenant, weight=self._terms.weight(tenant)),
                tokens=self._fleet.mask_tokens(model.name) if isinstance(model, Model) else None,
            )
        rules.refuse(found)
        self._refuse_if_draining()
        if not isinstance(model, Model):
            assert model is not None
            raise model
        for resolution in resolutions:
            resolution.check_model(model)
        return _Checked(model=model, resolutions=resolutions, identical=identical, images=images)

    async def _find_identical(
        self, command: GenerateCommand, before: Job | None, model: Model, resolutions: Sequence[Resolution]
    ) -> IdenticalResult | None:
        """What answers a request that nothing is wrong with, its images aside."""
        if before is not None and before.images:
            return None  # they have gone, and those of another job need not be the same where they are not exact
        return await self._identical.find(
            command.spec,
            model,
            lambda spec: self._complete(spec, before, model, resolutions),
            tenant=command.access.tenant,
        )

    def _complete(
        self, spec: GenerationSpec, before: Job | None, model: Model, resolutions: Sequence[Resolution]
    ) -> GenerationSpec:
        if before is not None:
            return defaults.as_before(spec, before.bare, self._addons)
        return defaults.complete(spec, model, resolutions)

    async def _resolve(self, spec: GenerationSpec, access: Access) -> list[Resolution]:
        resolutions = []
        for addon in self._addons:
            if addon.is_named(spec):
                self._refuse_if_draining()
                resolutions.append(await addon.resolve(spec, access))
        return resolutions

    def _model_of(
        self, spec: GenerationSpec, resolutions: Sequence[Resolution], access: Access
    ) -> Model | BottegaError | None:
        """The model, or why there is none: that which is named, else that which an add-on requires, else the only one.

        None where an add-on that is not resolved may require one.
        """
        if spec.HasField("model"):
            return self._found_model(spec.model, None, access)
        if not resolutions and any(addon.may_require_model(spec) for addon in self._addons):
            with contextlib.suppress(BottegaError):
                return self._fleet.resolve(None, access)
            return None
        required = next(filter(None, (resolution.required_model for resolution in resolutions)), None)
        return self._found_model(required.name if required else None, required, access)

    def _found_model(self, name: str | None, required: RequiredModel | None, access: Access) -> Model | BottegaError:
        try:
            return self._fleet.resolve(name, access)
        except ModelNotFound as error:
            return _not_served(required, error) if required else error.with_traceback(None)
        except BottegaError as error:
            # A caller that keeps the error must not keep these frames with it: they hold the request, of many MiB
            # perhaps.
            return error.with_traceback(None)

    def _refuse_if_draining(self) -> None:
        if self._controller.draining:
            raise Draining("the gateway is stopping; ask another one or retry", retry_after_s=1.0)


def _not_served(required: RequiredModel, error: ModelNotFound) -> ModelNotFound:
    served = error.metadata["served"].replace(",", ", ") or "none"
    text = f"{required.needed_by} was made for the base model {required.name}, which no worker serves; served: {served}"
    return ModelNotFound(text, metadata=error.metadata)


async def _packed(spec: GenerationSpec) -> bytes:
    """The spec as bytes, the same for equal ones. Asking for its size would pack it as well: so it is done once."""
    if has_images(spec):
        return await asyncio.to_thread(spec.SerializeToString, deterministic=True)
    return spec.SerializeToString(deterministic=True)
