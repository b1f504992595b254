"""Takes orders: checks everything, fills in the rest, and hands the job over; or says why not.

Nothing is acknowledged before every check has passed, the pixels of input images included. Knows no wire.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from bottega import rules
from bottega.codec import ImageSize
from bottega.errors import (
    BadImage,
    BottegaError,
    DeadlinePassed,
    DeadlineUnmeetable,
    Draining,
    InvalidRequest,
    ModelNotFound,
    RequestIdReused,
    Unavailable,
    Violation,
)
from bottega.gateway.addons.loras.resolver import LoraResolver, refuse_misfits
from bottega.gateway.api import defaults, validation
from bottega.gateway.api.command import GenerateCommand
from bottega.gateway.clock import Clock
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.specs import has_images, input_images, latent_shape, without_images
from bottega.gateway.jobs.storage import Storage, digest
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.scheduling.queue import JobQueue
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.lora_pb2 import StoredLora

# image, mask_image and as many ControlNets as a request may have.
_MAX_INPUT_IMAGES = 2 + rules.MAX_ADAPTERS
# Failures that ask for the same order again; it is then drawn as a new job.
_WORTH_A_RETRY = (Unavailable, DeadlinePassed, DeadlineUnmeetable)


class ImageInspector(Protocol):
    """Looks at encoded images, in another process."""

    async def inspect(self, image: bytes) -> ImageSize:
        """Decodes it completely and says its size. Raises BadImage."""


class Admission:
    """The only way in for jobs."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        loras: LoraResolver,
        foreman: JobController,
        queue: JobQueue,
        log: JobRepository,
        storehouse: Storage,
        inspector: ImageInspector,
        metrics: GatewayMetrics,
        max_image_bytes: int,
        max_image_pixels: int,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._loras = loras
        self._foreman = foreman
        self._queue = queue
        self._jobs = log
        self._storehouse = storehouse
        self._inspector = inspector
        self._metrics = metrics
        self._max_image_bytes = max_image_bytes
        self._max_image_pixels = max_image_pixels
        self._clock = clock
        self._taking: set[asyncio.Task[tuple[Job, bool]]] = set()

    async def accept(self, order: GenerateCommand) -> tuple[Job, bool]:
        """The order's job, and whether it is new: a known request_id attaches to its first run. A new one is durable.

        Raises RequestIdReused, InvalidRequest or BadImage, FieldNotServed, Draining, ModelNotFound or NoWorker,
        ControlNetNotFound or ControlNetUnusable or NoControlNet, QueueFull, DeadlineUnmeetable, StorageUnavailable, in
        this order; LoraNotFound, LoraUnusable or NoLora come before what is wrong because of the model. Except that
        without room no image is decoded, and that a request_id cannot be looked for where the disk cannot be read.
        """
        try:
            return await self._accept(order)
        except BottegaError as error:
            self._metrics.refused(error.reason_name)
            raise

    async def _accept(self, order: GenerateCommand) -> tuple[Job, bool]:
        began = self._clock.monotonic()
        spec = order.spec
        packed = await _packed(spec)
        fingerprint, size_bytes = await digest(packed), len(packed)
        del packed
        known, before = await self._known(order, fingerprint)
        if known is not None:
            return known, False
        model, loras = await self._check(order, size_bytes, before)
        image_digest = await digest(spec.image) if spec.HasField("image") else ""
        job = self._job(order, model, loras, fingerprint=fingerprint, began=began, before=before)
        job.image_digest, job.size_bytes = image_digest, size_bytes
        self._refuse_if_draining()  # which may have begun meanwhile
        return await self._take_whatever_happens(order, job, before.job_id if before else "")

    async def _take_whatever_happens(self, order: GenerateCommand, job: Job, replaces: str) -> tuple[Job, bool]:
        """A caller that goes meanwhile stops nothing half way: a job that nobody can ask for is given up afterwards."""
        taking = asyncio.create_task(self._take(order, job, replaces))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_up)
            raise

    async def _take(self, order: GenerateCommand, job: Job, replaces: str) -> tuple[Job, bool]:
        self._queue.reserve(job)
        try:
            self._foreman.refuse_unmeetable(job)
            self._storehouse.check_writable()
            taken = await self._jobs.add(job, replaces=replaces)
            if taken is job:
                self._metrics.acknowledged()
                self._foreman.submit(job)
                return job, True
        finally:
            if job.sequence == 0:
                self._queue.remove(job)  # only the room that was reserved
        return await self._accept(order)  # The same one has come twice at once, and the other is known now.

    def _give_up(self, taking: asyncio.Task[tuple[Job, bool]]) -> None:
        if taking.cancelled() or taking.exception() is not None:
            return
        job, new = taking.result()
        if new and not job.request_id:
            self._foreman.abandon(job)

    async def _known(self, order: GenerateCommand, fingerprint: str) -> tuple[Job | None, Job | None]:
        """The job to attach to; else None, and the one that this order replaces, where there is one."""
        job = await self._jobs.of_request(order.request_id) if order.request_id else None
        return self._judge(order, fingerprint, job) if job is not None else (None, None)

    def _judge(self, order: GenerateCommand, fingerprint: str, job: Job) -> tuple[Job | None, Job | None]:
        if job.fingerprint != fingerprint:
            raise RequestIdReused("this request_id was used for another request")
        if job.state == image_pb2.JOB_STATE_FAILED and isinstance(job.error, _WORTH_A_RETRY):
            return None, job  # The same order again is a retry, which is what those failures ask for.
        if not all(self._storehouse.images.holds(picture.digest) for picture in job.images):
            return None, job  # Its pictures have expired before it has: the news that it was done helps nobody.
        rules.refuse(list(validation.check_deadline(order.deadline_s)))
        self._foreman.extend(job, order.deadline(self._clock.monotonic()))
        if order.preview:
            self._foreman.show(job)
        return job, None

    async def _check(
        self, order: GenerateCommand, size_bytes: int, before: Job | None
    ) -> tuple[image_pb2.Model, list[StoredLora]]:
        """Every rule; the model: that of the job before it, where there was one, or the base of its LoRAs.

        Raises all violations at once.
        """
        spec = order.spec
        found = [
            *validation.check_request_id(order.request_id),
            *validation.check_deadline(order.deadline_s),
            *validation.check_spec(spec, max_image_bytes=self._max_image_bytes),
        ]
        meant = before.bare if before else spec
        # What is wrong with a request comes before what the stores know: they are asked when nothing is.
        likely, _ = self._resolve(meant, [])
        asks = not found and not (likely and any(validation.check_model(spec, likely)))
        loras = await self._find_loras(meant) if asks else []
        model, unknown = self._resolve(meant, loras)
        found += unknown.violations if unknown else ()
        found += validation.check_model(spec, model) if model else ()
        if has_images(spec):
            if not found:
                self._refuse_if_draining()
                self._queue.check_room(size_bytes)
            await self._check_images(spec, found)
        rules.refuse(found)
        validation.refuse_unserved(spec)
        self._refuse_if_draining()
        if model is None:
            assert unknown is not None
            raise unknown
        refuse_misfits(loras, model.name)
        self._fleet.hosting.resolve((net.name for net in spec.controlnets), model)
        return model, loras

    async def _find_loras(self, spec: GenerationSpec) -> list[StoredLora]:
        if not spec.loras:
            return []
        self._refuse_if_draining()
        return await self._loras.resolve(spec.loras)

    def _resolve(
        self, spec: GenerationSpec, loras: Sequence[StoredLora]
    ) -> tuple[image_pb2.Model | None, BottegaError | None]:
        """The model, or why there is none. A request that names LoRAs and no model is for their base."""
        named = spec.model if spec.HasField("model") else None
        if named is None and spec.loras and not loras:
            # Nobody has looked for them, for want of a request without violations: there may be more.
            with contextlib.suppress(BottegaError):
                return self._fleet.resolve(None), None
            return None, None
        try:
            return self._fleet.resolve(loras[0].base if named is None and loras else named), None
        except ModelNotFound as error:
            return None, _without_base(loras[0], error) if named is None and loras else error.with_traceback(None)
        except BottegaError as error:
            # Who keeps the error must not keep these frames by it: they hold the request, of many MiB perhaps.
            return None, error.with_traceback(None)

    def _refuse_if_draining(self) -> None:
        if self._foreman.draining:
            raise Draining("the gateway is stopping; ask another one or retry", retry_after_s=1.0)

    async def _check_images(self, spec: GenerationSpec, found: Sequence[Violation]) -> None:
        """Looks at the pixels of every input image that can be one. Raises what is wrong with them beside `found`."""
        known = {violation.field for violation in found}
        bad: list[Violation] = []
        try:
            for path, image in islice(input_images(spec), _MAX_INPUT_IMAGES):
                if path not in known:
                    bad.extend(await self._look(path, image))
        except BottegaError:
            rules.refuse(found)
            raise
        rules.refuse([*found, *bad], kind=InvalidRequest if found else BadImage)

    async def _look(self, path: str, image: bytes) -> list[Violation]:
        try:
            size = await self._inspector.inspect(image)
        except BadImage as error:
            return [Violation(field=path, description=error.message)]
        if size.width * size.height <= self._max_image_pixels:
            return []
        rule = f"is {size.width}x{size.height} pixels; at most {self._max_image_pixels} in all"
        return [Violation(field=path, description=rule)]

    def _job(
        self,
        order: GenerateCommand,
        model: image_pb2.Model,
        loras: Sequence[StoredLora],
        *,
        fingerprint: str,
        began: float,
        before: Job | None,
    ) -> Job:
        # Whoever comes again by the same request_id wants the same picture.
        spec = defaults.as_before(order.spec, before.bare) if before else defaults.complete(order.spec, model, loras)
        self._loras.prefetch(loras)
        return Job(
            clock=self._clock,
            spec=spec,
            bare=without_images(spec) if has_images(spec) else spec,
            shape=latent_shape(spec, model),
            fingerprint=fingerprint,
            request_id=order.request_id,
            log_id=order.log_id,
            ends_with_caller=order.caller_s is not None,
            peer=order.peer,
            life=self._jobs.life,
            deadline=order.deadline(began),
            preview=order.preview,
            validate_s=self._clock.monotonic() - began,
        )


def _without_base(lora: StoredLora, error: ModelNotFound) -> ModelNotFound:
    served = error.metadata["served"].replace(",", ", ") or "none"
    said = f"{lora.name} was made for the base model {lora.base}, which no worker serves; served: {served}"
    return ModelNotFound(said, metadata=error.metadata)


async def _packed(spec: GenerationSpec) -> bytes:
    """The spec as bytes, the same for equal ones. Asking for its size would pack it as well: so it is done once."""
    if has_images(spec):
        return await asyncio.to_thread(spec.SerializeToString, deterministic=True)
    return spec.SerializeToString(deterministic=True)
