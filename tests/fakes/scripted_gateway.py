"""A gateway that follows a script, on a real gRPC server: for tests of the SDK and of the command."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc

from bottega.errors import BottegaError, Draining
from bottega.rpc.channel import channel_options
from bottega.rpc.status import to_grpc_status
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, generation_pb2, image_pb2, image_pb2_grpc, trace_pb2

SMALL = b"\x89PNG a small picture"

Step = image_pb2.JobEvent | BottegaError | grpc.StatusCode | threading.Event


@dataclass
class ScriptedGateway(image_pb2_grpc.ImageServiceServicer, fleet_pb2_grpc.FleetServiceServicer):
    """Plays one list of steps per Generate or WatchJob call: sends events, fails by errors, waits at gates.

    looks: answers of GetJob, one each; afterwards the job has completed.
    pages: answers of ListJobs, one each; afterwards one with a job that failed.
    whole_streams: calls of Generate whose caller waited for their end.
    """

    scripts: list[list[Step]] = field(default_factory=list)
    failures: list[BottegaError] = field(default_factory=list)
    images: dict[int, bytes] = field(default_factory=dict)
    requests: list[image_pb2.GenerateRequest] = field(default_factory=list)
    looks: list[image_pb2.Job] = field(default_factory=list)
    submitted: list[image_pb2.SubmitJobRequest] = field(default_factory=list)
    pages: list[image_pb2.ListJobsResponse] = field(default_factory=list)
    listed: list[image_pb2.ListJobsRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cancel_heard: threading.Event = field(default_factory=threading.Event)
    reports: list[fleet_pb2.Load] = field(default_factory=list)
    torn_fetches: int = 0
    whole_streams: int = 0
    seconds_left: float = 0.0
    adapters: list[image_pb2.Adapter] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    trace: trace_pb2.Trace = field(default_factory=trace_pb2.Trace)

    def Generate(
        self, request: image_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[image_pb2.GenerateResponse]:
        self.requests.append(request)
        self.seconds_left = context.time_remaining() or 0.0
        for event in self._play(context):
            yield image_pb2.GenerateResponse(event=event)
        self.whole_streams += context.is_active()

    def WatchJob(
        self, request: image_pb2.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[image_pb2.WatchJobResponse]:
        for event in self._play(context):
            yield image_pb2.WatchJobResponse(event=event)

    def GetImage(
        self, request: image_pb2.GetImageRequest, context: grpc.ServicerContext
    ) -> Iterator[image_pb2.GetImageResponse]:
        data = self.images[request.index]
        yield image_pb2.GetImageResponse(image=image(request.index, data, inline=False), chunk=data[: 1 << 20])
        if self.torn_fetches:
            self.torn_fetches -= 1
            fail(context, Draining("stopping"))
        for start in range(1 << 20, len(data), 1 << 20):
            yield image_pb2.GetImageResponse(chunk=data[start : start + (1 << 20)])

    def SubmitJob(
        self, request: image_pb2.SubmitJobRequest, context: grpc.ServicerContext
    ) -> image_pb2.SubmitJobResponse:
        self.submitted.append(request)
        self._maybe_fail(context)
        return image_pb2.SubmitJobResponse(job=job(image_pb2.JOB_STATE_QUEUED))

    def GetJob(self, request: image_pb2.GetJobRequest, context: grpc.ServicerContext) -> image_pb2.GetJobResponse:
        self._maybe_fail(context)
        return image_pb2.GetJobResponse(job=self.looks.pop(0) if self.looks else job(image_pb2.JOB_STATE_COMPLETED))

    def GetJobTrace(
        self, request: image_pb2.GetJobTraceRequest, context: grpc.ServicerContext
    ) -> image_pb2.GetJobTraceResponse:
        self._maybe_fail(context)
        return image_pb2.GetJobTraceResponse(trace=self.trace)

    def ListJobs(self, request: image_pb2.ListJobsRequest, context: grpc.ServicerContext) -> image_pb2.ListJobsResponse:
        self.listed.append(request)
        if self.pages:
            return self.pages.pop(0)
        return image_pb2.ListJobsResponse(jobs=[job(image_pb2.JOB_STATE_FAILED)], next_page_token="more")

    def CancelJob(
        self, request: image_pb2.CancelJobRequest, context: grpc.ServicerContext
    ) -> image_pb2.CancelJobResponse:
        self._maybe_fail(context)
        self.cancelled.append(request.job_id)
        self.cancel_heard.set()
        return image_pb2.CancelJobResponse(job=job(image_pb2.JOB_STATE_CANCELLED))

    def ListModels(
        self, request: image_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> image_pb2.ListModelsResponse:
        self._maybe_fail(context)
        euler, ddim = generation_pb2.SAMPLER_EULER, generation_pb2.SAMPLER_DDIM
        choices = [
            image_pb2.SamplerChoice(sampler=euler, use_karras_sigmas=True, is_default=True),
            image_pb2.SamplerChoice(sampler=ddim, is_default=True, refused_because="beta_schedule is odd"),
        ]
        model = image_pb2.Model(name="miniature", workers=2, default_sampler=euler, sampler_choices=choices)
        model.edits_refused_because = "model miniature edits no pictures"
        return image_pb2.ListModelsResponse(models=[model])

    def ListAdapters(
        self, request: image_pb2.ListAdaptersRequest, context: grpc.ServicerContext
    ) -> image_pb2.ListAdaptersResponse:
        self._maybe_fail(context)
        return image_pb2.ListAdaptersResponse(adapters=self.adapters)

    def DeleteJob(
        self, request: image_pb2.DeleteJobRequest, context: grpc.ServicerContext
    ) -> image_pb2.DeleteJobResponse:
        self._maybe_fail(context)
        self.deleted.append(request.job_id)
        return image_pb2.DeleteJobResponse()

    async def AdmitJobs(self, request: fleet_pb2.AdmitJobsRequest, context: object) -> fleet_pb2.AdmitJobsResponse:
        raise NotImplementedError

    def ListMembers(
        self, request: fleet_pb2.ListMembersRequest, context: grpc.ServicerContext
    ) -> fleet_pb2.ListMembersResponse:
        return fleet_pb2.ListMembersResponse(members=[fleet_pb2.Member(joined_s=3.0)], queued=4)

    def Join(
        self, request_iterator: Iterator[fleet_pb2.JoinRequest], context: grpc.ServicerContext
    ) -> Iterator[fleet_pb2.JoinResponse]:
        for request in request_iterator:
            if request.HasField("load"):
                self.reports.append(request.load)
            yield fleet_pb2.JoinResponse(backlog=len(self.reports) % 2)

    def _play(self, context: grpc.ServicerContext) -> Iterator[image_pb2.JobEvent]:
        for step in self.scripts.pop(0) if self.scripts else []:
            if isinstance(step, BottegaError):
                fail(context, step)
            elif isinstance(step, grpc.StatusCode):
                context.abort(step, step.name)  # as gRPC itself ends a call
            elif isinstance(step, threading.Event):
                context.add_callback(step.set)
                step.wait(10)
            else:
                yield step

    def _maybe_fail(self, context: grpc.ServicerContext) -> None:
        if self.failures:
            fail(context, self.failures.pop(0))


def fail(context: grpc.ServicerContext, error: BottegaError) -> None:
    context.abort_with_status(to_grpc_status(error))


def image(index: int, data: bytes, *, inline: bool = True) -> image_pb2.Image:
    return image_pb2.Image(
        index=index,
        seed=7 + index,
        format=generation_pb2.IMAGE_FORMAT_PNG,
        width=64,
        height=64,
        size_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
        data=data if inline else b"",
    )


def job(state: image_pb2.JobState.ValueType) -> image_pb2.Job:
    found = image_pb2.Job(job_id="job-1", state=state, images=[image(0, SMALL, inline=False)])
    found.create_time.FromDatetime(datetime(2026, 1, 2, tzinfo=UTC))
    found.provenance.worker = "worker-0"
    return found


def queued(place: int = 1) -> image_pb2.JobEvent:
    return image_pb2.JobEvent(job_id="job-1", queued=image_pb2.Queued(place=place, estimate_s=2.5))


def progress(done: int) -> image_pb2.JobEvent:
    return image_pb2.JobEvent(job_id="job-1", progress=image_pb2.Progress(steps_done=done, steps_total=30))


def completed(*images: image_pb2.Image) -> image_pb2.JobEvent:
    provenance = generation_pb2.Provenance(worker="worker-0", exact=True)
    return image_pb2.JobEvent(
        job_id="job-1", completed=image_pb2.Completed(images=images or [image(0, SMALL)], provenance=provenance)
    )


@contextmanager
def serving(gateway: ScriptedGateway) -> Iterator[str]:
    """Serves it on a free port, and says where."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=channel_options())
    image_pb2_grpc.add_ImageServiceServicer_to_server(gateway, server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()
