"""Admission: checks a request, fills in defaults, and creates a job or finds the existing job of its request_id.

A request is acknowledged after every check has passed, including those of the pixels of input images, and the job is
durable. If an identical request was drawn before, the new job gets its stored result at once: it needs no worker and no
place in the queue, and its images are not decoded. Identical requests that arrive while the first one is being drawn
are all drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any

from bottega import rules
from bottega.addons.interface.gateway_addon import AddOn, PrefetchReason, Resolution
from bottega.addons.interface.views import Access, JobRequest
from bottega.background_tasks import BackgroundTasks
from bottega.errors import (
    BottegaError,
    DeadlinePassed,
    DeadlineUnmeetable,
    Draining,
    InvalidRequest,
    RequestIdReused,
    StorageUnavailable,
    TooLarge,
    Unavailable,
    Violation,
)
from bottega.fair_order import Share
from bottega.gateway.api import validation
from bottega.gateway.api.reuse import IdenticalResult, IdenticalResults, ImageSources, fingerprinted
from bottega.gateway.api.validation import ImageInspector, SeenImages
from bottega.gateway.config import GatewayConfig
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.conversion import answered_provenance
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.specs import has_images, latent_shape, without_images
from bottega.gateway.jobs.storage import NotScheduler
from bottega.gateway.jobs.stored_jobs import StoredJobs
from bottega.gateway.jobs.values import JobTimes
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.tenants import Admittance
from bottega.rpc.security.tenant_file import Quotas
from bottega.schedules import keeps_steps
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_FAILED, Model
from bottega.v1.worker_pb2 import AttemptDecisions

# Failures after which the same request becomes a new job, because a retry may help.
_WORTH_A_RETRY = (Unavailable, DeadlinePassed, DeadlineUnmeetable)


class Admission:
    """Checks the requests of callers and creates their jobs. No other class of the gateway creates jobs."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        fleet: Fleet,
        controller: JobController,
        jobs: JobRepository,
        stored: StoredJobs,
        addons: Sequence[AddOn],
        inspector: ImageInspector,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._controller = controller
        self._jobs = jobs
        self._storage = storage = jobs.storage
        self._addons = addons
        self._identical = IdenticalResults(
            default=config.identical_results, jobs=stored, storage=storage, addons=addons, metrics=metrics
        )
        self._sources = ImageSources(stored, storage)
        self._inspector = inspector
        self._metrics = metrics
        self._storing = BackgroundTasks("storing of jobs")

    async def admit(self, spec: GenerationSpec, request: JobRequest, access: Access) -> tuple[Job, bool]:
        """Check a request, and return its job and whether that job is new: the request_id may have one already.

        Args:
            spec: The spec as the caller sent it.
            request: The other fields of the request as the caller sent them. Admission adds facts to it.
            access: The models, LoRAs and ControlNets that the caller may name.

        Raises:
            QuotaExceeded: If a quota of the tenant allows no new job now. It does not refuse a known request_id.
            BottegaError: RequestIdReused, InvalidRequest, FieldNotServed or BadImage, Draining, ModelNotFound or
                NoWorker, ControlNetNotFound, ControlNetUnusable or NoControlNet, CannotSign, QueueFull,
                DeadlineUnmeetable, StorageUnavailable, checked in this order. LoraNotFound, LoraUnusable, NoLora and
                RecordingNotKept come before errors that depend on the model. StorageUnavailable comes first if a
                request_id cannot be looked up.
        """
        try:
            return await self._admit(spec, request, access)
        except BottegaError as error:
            self._metrics.refused.labels(error.reason_name).inc()
            raise

    async def prepare(self, spec: GenerationSpec, request: JobRequest, access: Access) -> Job | None:
        """Check a request while another gateway is the scheduler, and return its new job, which is not stored.

        Return None if the scheduler has to admit the request: because its request_id or stored pictures may answer it,
        or because it would be refused for a reason that may not hold there, such as a worker that is not known here.
        Raises InvalidRequest, TooLarge and StorageUnavailable.
        """
        try:
            request = await fingerprinted(spec, request)
            if await self._before(request) is not None:
                return None
            return await self._new_job(spec, request, access, None)
        except (InvalidRequest, TooLarge) as error:
            self._metrics.refused.labels(error.reason_name).inc()
            raise
        except (BottegaError, NotScheduler) as error:
            if isinstance(error, StorageUnavailable):
                raise
            return None

    def reserve(self, job: Job) -> None:
        """Reserve a place in the queue for a job that another gateway stores.

        Raises Draining, QueueFull, DeadlineUnmeetable and StorageUnavailable.
        """
        self._refuse_if_draining()
        self._controller.queue.reserve(job)
        try:
            self._check_deadline(job)
            self._storage.check_writable()
        except BottegaError:
            self._controller.queue.remove(job)
            raise

    def quotas_of(self, job: Job) -> Quotas:
        """Return the quotas that the store checks when it adds a job."""
        return self._controller.quotas.of_store(job.request.tenant)

    def count_acknowledged(self) -> None:
        """Count a job that was stored here while another gateway is the scheduler."""
        self._metrics.acknowledged.inc()

    async def _admit(self, spec: GenerationSpec, request: JobRequest, access: Access) -> tuple[Job, bool]:
        request = await fingerprinted(spec, request)
        while True:
            before = await self._before(request)
            if before is not None and self._attach(request, before):
                return before, False
            async with self._controller.quotas.admitting(request.tenant) as place:
                job = await self._new_job(spec, request, access, before)
                if await self._store_though_cancelled(job, place, replaces=before.job_id if before else ""):
                    return job, True
            # Another copy of this request was stored first, or the images that answer it were deleted: start again.

    async def _before(self, request: JobRequest) -> Job | None:
        """Return the earlier job with the request_id of this request, or None."""
        if not request.request_id or any(validation.check_request_id(request.request_id)):
            return None
        return await self._jobs.of_request(request.request_id, tenant=request.tenant)

    def _attach(self, request: JobRequest, job: Job) -> bool:
        """Return whether the job with this request_id answers the request. Raises RequestIdReused if they differ."""
        if job.request.fingerprint != request.fingerprint:
            raise RequestIdReused("this request_id was used for another request")
        if job.state == JOB_STATE_FAILED and isinstance(job.error, _WORTH_A_RETRY):
            return False
        if not all(self._storage.images.holds(image.digest) for image in job.images):
            return False  # its images have expired, so the request has to be drawn again
        rules.refuse(list(validation.check_deadline(request.deadline_s)))
        self._controller.extend(job, request.deadline(self._controller.clock.monotonic()))
        if request.preview:
            self._controller.enable_previews(job)
        return True

    async def _new_job(self, spec: GenerationSpec, request: JobRequest, access: Access, before: Job | None) -> Job:
        """Check every rule, raise all violations together, and return a new job.

        Args:
            spec: The spec as the caller sent it.
            request: The rest of the request.
            access: The models, LoRAs and ControlNets that the caller may name.
            before: The earlier job with the same request_id that the new job replaces, or None. The new job draws the
                same images with the same model.
        """
        violations = self._violations(spec, request)
        meant = before.bare if before else spec
        # Stores resolve the names of LoRAs and ControlNets. They are asked only if the rest of the request is valid.
        model = validation.find_model(meant, [], self._fleet, self._addons, access)
        of_model = self._violations_with(spec, model)
        resolutions = [] if violations or of_model else await self._resolve(meant, access)
        if resolutions:
            model = validation.find_model(meant, resolutions, self._fleet, self._addons, access)
            of_model = self._violations_with(spec, model)
        violations += of_model
        identical: IdenticalResult | None = None
        if isinstance(model, BottegaError):
            violations += model.violations
        elif model is not None and not violations:
            validation.check_served(spec, model)
            identical = await self._find_identical(spec, request, before, model, resolutions)
        seen = SeenImages()
        if has_images(spec) and identical is None:
            seen = await self._inspect(spec, violations, model if isinstance(model, Model) else None, request)
        rules.refuse(violations)
        self._refuse_if_draining()
        if not isinstance(model, Model):
            assert model is not None
            raise model
        for resolution in resolutions:
            resolution.check_model(model)
        if identical is not None:
            return self._answered_job(request, identical, model)
        await self._controller.signing.check()
        full = self._complete(spec, before, model, resolutions)
        request = await self._sources.describe(request, full, model, seen)
        self._refuse_if_draining()  # a drain may have begun meanwhile
        return self._job(request, full, model, decisions=self._decisions_of(before) if before else None)

    def _violations(self, spec: GenerationSpec, request: JobRequest) -> list[Violation]:
        signed = bool(self._controller.queue.terms.webhooks(request.tenant).secrets)
        return [
            *validation.check_request_id(request.request_id),
            *validation.check_deadline(request.deadline_s),
            *validation.check_priority(request.priority),
            *validation.check_webhook(request.webhook, self._config.webhooks, signed=signed),
            *validation.check_spec(spec, self._addons, max_image_bytes=self._config.max_image_bytes),
        ]

    def _violations_with(self, spec: GenerationSpec, model: Model | BottegaError | None) -> list[Violation]:
        """Return the violations that depend on the model; none if it is unknown."""
        return list(validation.check_model(spec, model, self._addons)) if isinstance(model, Model) else []

    async def _inspect(
        self, spec: GenerationSpec, violations: list[Violation], model: Model | None, request: JobRequest
    ) -> SeenImages:
        """Decode the images of a request, and raise all of its violations. Decode nothing if the queue is full."""
        if not violations:
            self._refuse_if_draining()
            self._controller.queue.check_room(request.size_bytes, tenant=request.tenant)
        return await validation.check_images(
            spec,
            violations,
            self._inspector,
            max_pixels=self._config.max_image_pixels,
            model=model,
            share=Share(tenant=request.tenant, weight=self._controller.queue.terms.weight(request.tenant)),
            tokens=self._fleet.mask_tokens(model.name) if model is not None else None,
        )

    def _answered_job(self, request: JobRequest, identical: IdenticalResult, model: Model) -> Job:
        """Return a job that is already completed, with the stored images of an identical job."""
        source = identical.source
        request = dataclasses.replace(
            request,
            image_digest=source.request.image_digest,
            mask_digest=source.request.mask_digest,
            result_size=source.request.result_size,
        )
        job = self._job(request, identical.spec, model)
        job.answer(source.images, answered_provenance(job, source))
        return job

    def _job(
        self,
        request: JobRequest,
        full: GenerationSpec,
        model: Model,
        *,
        decisions: AttemptDecisions | None = None,
    ) -> Job:
        return Job(
            clock=self._controller.clock,
            request=dataclasses.replace(
                request,
                shape=latent_shape(full, model),
                evaluations_per_step=specs.evaluations_per_step(full, model),
                keeps_steps=keeps_steps(full, model.strength_keeps_steps),
            ),
            spec=full,
            bare=without_images(full) if has_images(full) else full,
            life=self._jobs.life,
            deadline=request.deadline(request.received_at),
            decisions=decisions or AttemptDecisions(),
            preview=request.preview,
            times=JobTimes(validate_s=self._controller.clock.monotonic() - request.received_at),
        )

    def _decisions_of(self, before: Job) -> AttemptDecisions:
        """Return the decisions of the earlier attempt that depended on timing, so that the new job repeats them."""
        decisions = AttemptDecisions()
        decisions.CopyFrom(before.decisions)
        for addon in self._addons:
            addon.decide_again(decisions, before)
        return decisions

    async def _store_though_cancelled(self, job: Job, place: Admittance, *, replaces: str) -> bool:
        """Store the job even if the caller disconnects. Then abandon the job unless it has a request_id."""

        def abandon(stored: bool) -> None:
            if stored and not job.request.request_id:
                self._controller.abandon(job)

        return await self._storing.run_shielded(self._store_counted(job, place, replaces), on_abandoned=abandon)

    def _store_counted(self, job: Job, place: Admittance, replaces: str) -> Coroutine[Any, Any, bool]:
        """Return a coroutine that stores a job and counts it in its tenant's quotas, even if the caller disconnects.

        The quota is reserved by this call, not only when the coroutine runs.
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
        """Store a job durably and submit it to the queue.

        Return False if another job with its request_id was stored first, or if the stored images that answer it are
        deleted.
        """
        waits = job.open  # False if the job already has its result
        if waits:
            self._controller.queue.reserve(job)
        try:
            if waits:
                self._check_deadline(job)
            self._storage.check_writable()
            answer = job.outcome.images if job.outcome is not None else ()
            with self._storage.pinned(answer):  # another request may delete the job whose pictures these are
                if not await self._storage.renew_images(answer, tenant=job.request.tenant, job_id=job.job_id):
                    return False
                if await self._jobs.add(job, replaces=replaces, quotas=self.quotas_of(job)) is not job:
                    return False
            self._metrics.acknowledged.inc()
            self._controller.submit(job)
            return True
        finally:
            if job.sequence == 0:
                self._controller.queue.remove(job)  # submit was not reached: give back the reserved place

    def _check_deadline(self, job: Job) -> None:
        try:
            self._controller.estimates.check_deadline(job)
        except DeadlineUnmeetable:
            for addon in self._addons:
                addon.prefetch([job], PrefetchReason.REFUSED)
            raise

    async def _find_identical(
        self,
        spec: GenerationSpec,
        request: JobRequest,
        before: Job | None,
        model: Model,
        resolutions: Sequence[Resolution],
    ) -> IdenticalResult | None:
        """Return the stored result of an identical request, or None. The spec must be valid apart from its images."""
        if before is not None and before.images:
            return None  # its images are deleted; those of another job may differ
        return await self._identical.find(
            spec,
            model,
            lambda outline: self._complete(outline, before, model, resolutions),
            tenant=request.tenant,
        )

    def _complete(
        self, spec: GenerationSpec, before: Job | None, model: Model, resolutions: Sequence[Resolution]
    ) -> GenerationSpec:
        if before is not None:
            return specs.as_before(spec, before.bare)
        return specs.complete(spec, model, resolutions)

    async def _resolve(self, spec: GenerationSpec, access: Access) -> list[Resolution]:
        try:
            resolutions = [await addon.resolve(spec, access) for addon in self._addons]
        except BottegaError:
            self._refuse_if_draining()
            raise
        return [resolution for resolution in resolutions if resolution is not None]

    def _refuse_if_draining(self) -> None:
        if self._controller.draining:
            raise Draining("the gateway is stopping; retry, or use another gateway", retry_after_s=1.0)
