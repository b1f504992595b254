"""Takes orders: checks everything, fills in the rest, and hands the job over; or says why not.

Nothing is acknowledged before every check has passed, the pixels of input images included. Knows no wire.
"""

from __future__ import annotations

import asyncio
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
    RequestIdReused,
    Unavailable,
    Violation,
)
from bottega.gateway import defaults, validation, work
from bottega.gateway.clock import Clock
from bottega.gateway.fleet import Fleet
from bottega.gateway.foreman import Foreman
from bottega.gateway.input_images import has_images, input_images, without_images
from bottega.gateway.job_log import JobLog
from bottega.gateway.jobs import Job, Order
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.queueing import JobQueue
from bottega.gateway.results import ResultStore, digest
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec

# image, mask_image and as many ControlNets as a request may have.
_MAX_INPUT_IMAGES = 2 + validation.MAX_ADAPTERS
# Failures that ask for the same order again; it is then drawn as a new job.
_WORTH_A_RETRY = (Unavailable, DeadlinePassed, DeadlineUnmeetable)


class Inspector(Protocol):
    """Looks at encoded images, in another process."""

    async def inspect(self, image: bytes) -> ImageSize:
        """Decodes it completely and says its size. Raises BadImage."""


class Intake:
    """The only way in for jobs."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        foreman: Foreman,
        queue: JobQueue,
        log: JobLog,
        results: ResultStore,
        inspector: Inspector,
        metrics: GatewayMetrics,
        max_image_bytes: int,
        max_image_pixels: int,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._foreman = foreman
        self._queue = queue
        self._jobs = log
        self._results = results
        self._inspector = inspector
        self._metrics = metrics
        self._max_image_bytes = max_image_bytes
        self._max_image_pixels = max_image_pixels
        self._clock = clock

    async def accept(self, order: Order) -> tuple[Job, bool]:
        """The order's job, and whether it is new: a known request_id attaches to its first run.

        Raises RequestIdReused, InvalidRequest or BadImage, FieldNotServed, Draining, ModelNotFound or NoWorker,
        QueueFull, DeadlineUnmeetable, in this order; except that without room no image is decoded.
        """
        try:
            return await self._accept(order)
        except BottegaError as error:
            self._metrics.refused(error.reason_name)
            raise

    async def _accept(self, order: Order) -> tuple[Job, bool]:
        began = self._clock.monotonic()
        spec = order.spec
        packed = await _packed(spec)
        fingerprint, size_bytes = await digest(packed), len(packed)
        del packed
        job = self._attach(order, fingerprint)
        if job is not None:
            return job, False
        model = await self._check(order, size_bytes)
        image_digest = await digest(spec.image) if spec.HasField("image") else ""
        # The same order may have come twice while its image was looked at.
        job = self._attach(order, fingerprint)
        if job is not None:
            return job, False
        job = self._job(order, model, fingerprint, began)
        job.image_digest, job.size_bytes = image_digest, size_bytes
        self._refuse_if_draining()  # which may have begun meanwhile
        self._queue.check_room(size_bytes)
        self._foreman.refuse_unmeetable(job)
        self._foreman.submit(job)
        return job, True

    def _attach(self, order: Order, fingerprint: str) -> Job | None:
        job = self._jobs.of_request(order.request_id) if order.request_id else None
        if job is None:
            return None
        if job.fingerprint != fingerprint:
            raise RequestIdReused("this request_id was used for another request")
        if job.state == image_pb2.JOB_STATE_FAILED and isinstance(job.error, _WORTH_A_RETRY):
            return None  # The same order again is a retry, which is what those failures ask for.
        if any(self._results.get(picture.digest) is None for picture in job.pictures):
            return None  # Its pictures have expired before it has: nobody is helped by the news that it was done.
        if order.preview:
            self._foreman.show(job)
        return job

    async def _check(self, order: Order, size_bytes: int) -> image_pb2.Model:
        """Every rule; the model. Raises all violations at once."""
        spec = order.spec
        model, unknown = self._resolve(spec)
        found = [
            *validation.check_request_id(order.request_id),
            *validation.check_spec(spec, max_image_bytes=self._max_image_bytes),
            *(unknown.violations if unknown else ()),
            *(validation.check_model(spec, model) if model else ()),
        ]
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
        return model

    def _resolve(self, spec: GenerationSpec) -> tuple[image_pb2.Model | None, BottegaError | None]:
        """The model, or why there is none."""
        try:
            return self._fleet.resolve(spec.model if spec.HasField("model") else None), None
        except BottegaError as error:
            return None, error

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

    def _job(self, order: Order, model: image_pb2.Model, fingerprint: str, began: float) -> Job:
        spec = defaults.complete(order.spec, model)
        return Job(
            clock=self._clock,
            spec=spec,
            bare=without_images(spec),
            shape=work.latent_shape(spec, model),
            fingerprint=fingerprint,
            request_id=order.request_id,
            log_id=order.log_id,
            deadline=None if order.deadline_s is None else began + order.deadline_s,
            preview=order.preview,
            validate_s=self._clock.monotonic() - began,
        )


async def _packed(spec: GenerationSpec) -> bytes:
    """The spec as bytes, the same for equal ones. Asking for its size would pack it as well: so it is done once."""
    if has_images(spec):
        return await asyncio.to_thread(spec.SerializeToString, deterministic=True)
    return spec.SerializeToString(deterministic=True)
