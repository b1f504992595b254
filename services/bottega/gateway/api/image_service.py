"""ImageService: the public API. It converts messages and streams the events of jobs to callers."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from bottega import rules
from bottega.addons.interface.gateway_addon import AddOn
from bottega.addons.interface.views import Access, JobRequest
from bottega.errors import BottegaError, ImageNotFound, JobNotFinished, JobNotFound, TraceNotFound
from bottega.gateway.api import validation
from bottega.gateway.api.admission import Admission
from bottega.gateway.api.watching import EndedEvent, JobWatch, WatchEvent, event_to_wire, image_to_wire, job_to_wire
from bottega.gateway.dispatch.job_traces import JobTraces
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.store import JobFilter
from bottega.gateway.jobs.stored_jobs import StoredJobs
from bottega.gateway.jobs.values import StoredImage
from bottega.gateway.scheduling.controller import JobController
from bottega.rpc.address import host_of
from bottega.rpc.interceptor import call_limits
from bottega.rpc.operation import logs
from bottega.rpc.security.caller import caller, caller_host
from bottega.storage import ContentReader, SharedContentStore
from bottega.v1 import image_pb2, image_pb2_grpc

# Sizes of the chunks of images. Every call may send small ones (rpc.answers); large ones are twice as fast.
_CHUNK_BYTES = 256 << 10
_SMALL_CHUNK_BYTES = 64 << 10
# Upper bound on the bytes of a message besides its chunk.
_ABOUT_CHUNK_BYTES = 4 << 10
# Larger results do not come with events; callers fetch them by GetImage (contract: Image.data).
_MAX_INLINE_BYTES = 2 << 20
# Upper bound on the event of a completed job without its images; most of it is the provenance.
_COMPLETED_BYTES = 64 << 10
_DEFAULT_PAGE = 20
# A page of ListJobs ends before it has more bytes, because clients take 4 MiB by default. It is read from the store in
# parts of so many jobs.
_PAGE_BYTES = 2 << 20
_PART_OF_PAGE = 5
# Seconds for which the list of adapters made for a caller's first page serves its later pages.
_LISTED_S = 5.0
# Upper bound on the lists that are kept.
_MAX_LISTINGS = 8
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdapterListing:
    """The adapters that a caller may name, sorted by their page tokens. One listing serves all pages of a caller."""

    access: Access
    made_at: float
    tokens: Sequence[str]
    adapters: Sequence[image_pb2.Adapter]


class ImageService(image_pb2_grpc.ImageServiceServicer):
    """The public gRPC service, which product backends call.

    Args:
        default_deadline_s: Deadline of Generate calls without a request_id whose caller set none, in seconds.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        controller: JobController,
        jobs: JobRepository,
        stored: StoredJobs,
        fleet: Fleet,
        traces: JobTraces,
        addons: Sequence[AddOn],
        default_deadline_s: float,
    ) -> None:
        self._admission = admission
        self._controller = controller
        self._jobs = jobs
        self._stored = stored
        self._images = jobs.storage.images
        self._fleet = fleet
        self._traces = traces
        self._addons = addons
        self._default_deadline_s = default_deadline_s
        self._listings: OrderedDict[tuple[str, int], _AdapterListing] = OrderedDict()

    async def Generate(
        self, request: image_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[image_pb2.GenerateResponse]:
        """Draw a request and stream its events. If the caller leaves, a job without request_id is cancelled."""
        goes_on, preview = bool(request.request_id), request.preview
        caller_s = None if goes_on else self._caller_s(context)
        received = self.received(request, context, caller_s=caller_s, preview=preview)
        job, new = await self._admission.admit(request.spec, received, Access.of(caller()))
        del request  # the job has what it needs of it; with images it is large
        _bind(job)
        try:
            watch = JobWatch(job, preview=preview, announce=new)
            async with contextlib.aclosing(watch.events()) as events:
                async for event in events:
                    if isinstance(event, EndedEvent) and job.error is not None:
                        raise job.error.with_traceback(None)
                    yield image_pb2.GenerateResponse(event=await self._to_wire(job, event))
        finally:
            if not goes_on:
                self._controller.abandon(job)

    async def GetImage(
        self, request: image_pb2.GetImageRequest, context: _Context
    ) -> AsyncIterator[image_pb2.GetImageResponse]:
        """Stream a finished image, or answer with its URL."""
        job = await self.find_job(request.job_id)
        if request.as_url:
            yield image_pb2.GetImageResponse(image=await self._with_url(job, request.index))
            return
        reader = await self.open_image(job, request.index)
        if reader is None:
            raise ImageNotFound("the image has expired")
        async with contextlib.aclosing(self.chunks(job, request.index, reader)) as answers:
            async for answer in answers:
                yield answer

    async def open_image(self, job: Job, index: int) -> ContentReader | None:
        """Return a reader of an image of a job; None if it is gone. Raises JobNotFinished and ImageNotFound.

        A gateway that is not the scheduler opens only the job's own copy in the object store: it keeps no list of the
        others.
        """
        self._check_index(job, index)
        return await self._open(job, job.images[index])

    async def chunks(
        self, job: Job, index: int, reader: ContentReader
    ) -> AsyncGenerator[image_pb2.GetImageResponse, None]:
        """Yield an image with its bytes in chunks, and close its reader."""
        async with reader:
            image: image_pb2.Image | None = image_to_wire(job, index)
            begin = 0
            while image is not None or begin < reader.size_bytes:
                size_bytes = _chunk_bytes()
                yield image_pb2.GetImageResponse(image=image, chunk=await reader.read(begin, size_bytes))
                image, begin = None, begin + size_bytes

    async def SubmitJob(self, request: image_pb2.SubmitJobRequest, context: _Context) -> image_pb2.SubmitJobResponse:
        """Accept a request as a job that outlives the call. The call's deadline does not bound the job."""
        job, _ = await self._admission.admit(request.spec, self.received(request, context), Access.of(caller()))
        return submitted(job)

    async def GetJob(self, request: image_pb2.GetJobRequest, context: _Context) -> image_pb2.GetJobResponse:
        """Return the current state of a job."""
        return image_pb2.GetJobResponse(job=job_to_wire(await self.find_job(request.job_id)))

    async def ListJobs(self, request: image_pb2.ListJobsRequest, context: _Context) -> image_pb2.ListJobsResponse:
        """Return a page of jobs, filtered by state and time, newest first."""
        rules.refuse(list(validation.check_page(request)))
        wanted = JobFilter(
            tenant=caller().tenant,
            states=frozenset(request.states),
            created_after=_unix_s(request.created_after) if request.HasField("created_after") else None,
            created_before=_unix_s(request.created_before) if request.HasField("created_before") else None,
        )
        answer = image_pb2.ListJobsResponse(next_page_token=request.page_token)
        left, room = request.page_size or _DEFAULT_PAGE, _PAGE_BYTES
        while left > 0 and room > 0:
            part = min(left, _PART_OF_PAGE)
            jobs, answer.next_page_token = await self._stored.page(
                wanted, size=part, max_bytes=room, token=answer.next_page_token
            )
            listed = [job_to_wire(job) for job in jobs]
            answer.jobs.extend(listed)
            left, room = left - part, room - sum(job.ByteSize() for job in listed)
            if not answer.next_page_token:
                break
        return answer

    async def WatchJob(
        self, request: image_pb2.WatchJobRequest, context: _Context
    ) -> AsyncIterator[image_pb2.WatchJobResponse]:
        """Stream the events of a job, starting with its current state."""
        job = await self.find_job(request.job_id)
        if request.preview:
            self._controller.enable_previews(job)
        async with contextlib.aclosing(self.watch(job, preview=request.preview)) as answers:
            async for answer in answers:
                yield answer

    async def watch(self, job: Job, *, preview: bool) -> AsyncGenerator[image_pb2.WatchJobResponse, None]:
        """Yield the events of a job, starting with its current state."""
        async with contextlib.aclosing(JobWatch(job, preview=preview).events()) as events:
            async for event in events:
                yield image_pb2.WatchJobResponse(event=await self._to_wire(job, event))

    async def CancelJob(self, request: image_pb2.CancelJobRequest, context: _Context) -> image_pb2.CancelJobResponse:
        """Cancel a job, and return when the cancellation is durable."""
        job = await self.find_job(request.job_id)
        await self._controller.cancel_durably(job)
        return image_pb2.CancelJobResponse(job=job_to_wire(job))

    async def DeleteJob(self, request: image_pb2.DeleteJobRequest, context: _Context) -> image_pb2.DeleteJobResponse:
        """Delete a job that has ended, and return when the deletion is durable."""
        with contextlib.suppress(JobNotFound):  # a repeated call is answered, too
            await self.find_job(request.job_id)
        await self._stored.delete(request.job_id, tenant=caller().tenant)
        self._traces.remove(request.job_id)
        return image_pb2.DeleteJobResponse()

    async def GetJobTrace(
        self, request: image_pb2.GetJobTraceRequest, context: _Context
    ) -> image_pb2.GetJobTraceResponse:
        """Return the trace of a job: the time spans of its queueing, drawing and other phases."""
        job = await self.find_job(request.job_id)
        trace = self._traces.find(job.job_id)
        if trace is None:
            raise TraceNotFound(
                "no attempt at the job has ended yet" if job.live else "the job's trace is deleted, or it never ran"
            )
        return image_pb2.GetJobTraceResponse(trace=trace)

    async def ListModels(self, request: image_pb2.ListModelsRequest, context: _Context) -> image_pb2.ListModelsResponse:
        """List the models that are served now."""
        return image_pb2.ListModelsResponse(models=self._fleet.models(Access.of(caller())))

    async def ListAdapters(
        self, request: image_pb2.ListAdaptersRequest, context: _Context
    ) -> image_pb2.ListAdaptersResponse:
        """Return a page of the LoRAs and ControlNets that the caller's requests may name."""
        rules.refuse(list(validation.check_adapters_page(request)))
        listing = await self._adapters(request, Access.of(caller()))
        first = bisect_right(listing.tokens, request.page_token) if request.page_token else 0
        end = first + (request.page_size or rules.MAX_PAGE)
        return image_pb2.ListAdaptersResponse(
            adapters=listing.adapters[first:end],
            next_page_token=listing.tokens[end - 1] if end < len(listing.tokens) else "",
        )

    async def _adapters(self, request: image_pb2.ListAdaptersRequest, access: Access) -> _AdapterListing:
        """Return all adapters of the requested kind that a caller may name.

        For a few seconds, later pages reuse the list that was made for the first page.
        """
        now, key = self._controller.clock.monotonic(), (access.tenant, request.kind)
        known = self._listings.get(key)
        if request.page_token and known and known.access == access and now - known.made_at <= _LISTED_S:
            return known
        models = self._fleet.models(access)
        adapters = [
            adapter
            for addon in self._addons
            if request.kind in (image_pb2.ADAPTER_KIND_UNSPECIFIED, addon.adapter_kind)
            for adapter in await addon.adapters(access, models)
        ]
        adapters.sort(key=_adapter_token)
        tokens = [_adapter_token(adapter) for adapter in adapters]
        listing = _AdapterListing(access=access, made_at=now, tokens=tokens, adapters=adapters)
        self._listings.pop(key, None)
        self._listings[key] = listing
        if len(self._listings) > _MAX_LISTINGS:
            self._listings.popitem(last=False)
        return listing

    def received(
        self,
        request: image_pb2.GenerateRequest | image_pb2.SubmitJobRequest,
        context: _Context,
        *,
        caller_s: float | None = None,
        preview: bool = False,
    ) -> JobRequest:
        """Return the JobRequest of a call: all its fields except the spec.

        `caller_s`: seconds for which the caller of a stream waits; None if the job does not end with its caller.
        """
        tenant = caller().tenant
        return JobRequest(
            request_id=request.request_id,
            deadline_s=request.deadline_s if request.HasField("deadline_s") else None,
            caller_s=caller_s,
            ends_with_caller=caller_s is not None,
            tenant=tenant,
            peer=tenant or caller_host() or host_of(context.peer()),
            preview=preview,
            priority=request.priority or image_pb2.PRIORITY_NORMAL,
            webhook=_webhook(request),
            log_id=_log_id(request.request_id),
            received_at=self._controller.clock.monotonic(),
        )

    def _caller_s(self, context: _Context) -> float:
        return self._default_deadline_s if context.time_remaining() is None else context.time_remaining()

    async def find_job(self, job_id: str) -> Job:
        """Return the caller's job with this ID. Raises JobNotFound, InvalidRequest, StorageUnavailable and DataLoss."""
        rules.refuse(list(validation.check_ids("job_id", job_id)))
        job = await self._jobs.get(job_id, tenant=caller().tenant)
        _bind(job)
        return job

    async def _to_wire(self, job: Job, event: WatchEvent) -> image_pb2.JobEvent:
        """Convert an event of a job. Images are omitted while too many bytes already wait for callers to read them."""
        inline = isinstance(event, EndedEvent) and _travels_inline(job) and call_limits.reserve(_inline_bytes(job))
        data = [await self._inline(job, picture) for picture in job.images] if inline else []
        return event_to_wire(job, event, data)

    async def _inline(self, job: Job, picture: StoredImage) -> bytes:
        """Return the bytes of a picture, or b"" if it cannot be read: GetImage then reports the error."""
        with contextlib.suppress(BottegaError):
            if (reader := await self._open(job, picture)) is not None:
                async with reader:
                    return await reader.read(0, reader.size_bytes)
        return b""

    async def _with_url(self, job: Job, index: int) -> image_pb2.Image:
        self._check_index(job, index)
        image = image_to_wire(job, index)
        if isinstance(self._images, SharedContentStore):
            image.url = await self._images.url(image.digest, owner=job.request.tenant, job=job.job_id)
        return image

    async def _open(self, job: Job, picture: StoredImage) -> ContentReader | None:
        tenant = job.request.tenant
        if isinstance(self._images, SharedContentStore) and not self._jobs.restored:
            return await self._images.own_copy(
                picture.digest, size_bytes=picture.size_bytes, owner=tenant, job=job.job_id
            )
        return await self._images.reader(picture.digest, owner=tenant)

    @staticmethod
    def _check_index(job: Job, index: int) -> None:
        """Raise JobNotFinished or ImageNotFound if the job has no such image."""
        if job.state != image_pb2.JOB_STATE_COMPLETED:
            raise JobNotFinished("the job has no images" if not job.live else "the job has no images yet")
        if not 0 <= index < len(job.images):
            raise ImageNotFound(f"the job has {len(job.images)} images, counted from 0")


def _adapter_token(adapter: image_pb2.Adapter) -> str:
    """Return the page token of an adapter: a sort key. The next page starts after it."""
    return f"{adapter.kind}/{adapter.name}/{adapter.digest}"


def _chunk_bytes() -> int:
    return _CHUNK_BYTES if call_limits.reserve(_CHUNK_BYTES + _ABOUT_CHUNK_BYTES) else _SMALL_CHUNK_BYTES


def _webhook(request: image_pb2.GenerateRequest | image_pb2.SubmitJobRequest) -> bytes:
    if isinstance(request, image_pb2.GenerateRequest) or not request.HasField("webhook"):
        return b""
    # A Webhook without fields is refused, but would be serialized to b"", which means that there is none.
    return request.webhook.SerializeToString() or image_pb2.Webhook(url=" ").SerializeToString()


def _log_id(request_id: str) -> str:
    """Return a request's ID for the log: its request_id (not validated yet), else the ID in the call's metadata."""
    if found := logs.request_id_from(request_id):
        logs.bind(request_id=found)
    return logs.bound().get("request_id", "")


def _bind(job: Job) -> None:
    logs.bind(job_id=job.job_id, request_id=job.log_id)


def submitted(job: Job) -> image_pb2.SubmitJobResponse:
    """Return the answer to a caller whose job is stored."""
    _bind(job)
    return image_pb2.SubmitJobResponse(job=job_to_wire(job))


def _unix_s(timestamp: Timestamp) -> float:
    return float(timestamp.seconds) + timestamp.nanos / 1e9


def _travels_inline(job: Job) -> bool:
    """Return whether the completion event of a job may include the bytes of its images."""
    return _result_bytes(job) < _MAX_INLINE_BYTES


def _inline_bytes(job: Job) -> int:
    """Return the size of the completion event of a job with its images, in bytes."""
    return _result_bytes(job) + _COMPLETED_BYTES


def _result_bytes(job: Job) -> int:
    return sum(picture.size_bytes for picture in job.images)
