"""Jobs as the gateway reports them: their states, their events, the request that lists them, and their time line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from google.protobuf.timestamp_pb2 import Timestamp

from bottega.client.types.messages import as_list, build_message, describe, moment_from, set_timestamp
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import Parameters, Provenance, parameters_from, provenance_from
from bottega.errors import BottegaError, Violation
from bottega.rpc.status import from_job_error
from bottega.rules import refuse
from bottega.v1 import image_pb2, trace_pb2

GATEWAY = "gateway"
"""The service of the gateway's own spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The job waits for a worker."""

    job_id: str
    place: int
    """Number of jobs of the same model before it."""
    estimate_s: float | None
    """Estimated seconds until it completes; None if nothing has been measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A small image of an unfinished picture."""

    index: int
    """Index of the picture in the job, from 0."""
    jpeg: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The job runs."""

    job_id: str
    steps_done: int
    """Denoising steps done, over all pictures."""
    steps_total: int
    previews: tuple[Preview, ...] = ()
    """Previews, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The gateway does not answer. The SDK attaches again by itself after `wait_s`."""

    error: BottegaError
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The job has completed. This is always the last event."""

    job_id: str
    images: tuple[Picture, ...]
    provenance: Provenance = field(repr=False)


Event = Queued | Progress | Interrupted | Completed


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """A state of a gateway that is newer than this client. Requests cannot name it."""

    @property
    def ended(self) -> bool:
        """Whether the job will not change any more."""
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class Priority(StrEnum):
    """The urgency of a request among those of its tenant. The gateway bounds how long a request is passed over."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


_ASKED_FOR = tuple(state for state in JobState if state is not JobState.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A snapshot of a job."""

    job_id: str
    request_id: str
    """The caller's idempotency key; empty if there is none."""
    state: JobState
    parameters: Parameters = field(repr=False)
    """The complete parameters, with defaults and seed."""
    created: datetime
    started: datetime | None
    ended: datetime | None
    steps_done: int
    """Denoising steps done, over all pictures."""
    steps_total: int
    """Denoising steps in all, over all pictures."""
    image_count: int
    """Number of finished pictures; client.job(job_id).image(index) fetches them."""
    provenance: Provenance | None = field(repr=False)
    """How it was really drawn; None until it has completed."""
    error: BottegaError | None
    """Why it failed, as job.result() raises it; None unless it failed or was cancelled."""
    priority: Priority
    """Its urgency among the jobs of its tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """A page of a list of jobs."""

    jobs: tuple[JobStatus, ...]
    """Jobs, newest first."""
    next_page_token: str
    """Token that asks for the next page; empty on the last one."""


def status_from(job: image_pb2.Job) -> JobStatus:
    """Return the job that the wire describes."""
    return JobStatus(
        job_id=job.job_id,
        request_id=job.request_id,
        state=_state(job.state),
        parameters=parameters_from(job.spec),
        created=_time(job.create_time),
        started=_time(job.start_time) if job.HasField("start_time") else None,
        ended=_time(job.end_time) if job.HasField("end_time") else None,
        steps_done=job.steps_done,
        steps_total=job.steps_total,
        image_count=len(job.images),
        provenance=provenance_from(job.provenance) if job.HasField("provenance") else None,
        error=from_job_error(job.error) if job.HasField("error") else None,
        priority=_priority(job.priority),
    )


def priority_to_wire(priority: object) -> image_pb2.Priority.ValueType:
    """Return the contract's number of a priority. Raise InvalidRequest if it is none."""
    if not (isinstance(priority, str) and priority in tuple(Priority)):  # str, as equality compares values
        refuse([Violation(field="priority", description=f"must be of {', '.join(Priority)}; got {describe(priority)}")])
    if priority == Priority.NORMAL:
        return image_pb2.PRIORITY_UNSPECIFIED
    return image_pb2.Priority.Value(f"PRIORITY_{Priority(str(priority)).name}")


def page_request(
    states: Iterable[JobState],
    created_after: datetime | None,
    created_before: datetime | None,
    *,
    page_size: int,
    page_token: str,
) -> image_pb2.ListJobsRequest:
    """Return the request for a page of jobs. Raise InvalidRequest for arguments that cannot be sent."""
    request = image_pb2.ListJobsRequest()
    wanted = as_list(states, name="states", what="job states")
    broken = [violation for state in wanted for violation in _put_state(request, state)]
    if created_after is not None:
        broken.extend(set_timestamp(request.created_after, created_after, path="created_after"))
    if created_before is not None:
        broken.extend(set_timestamp(request.created_before, created_before, path="created_before"))
    refuse(broken)
    return build_message(request, page_size=page_size, page_token=page_token)


def _put_state(request: image_pb2.ListJobsRequest, state: object) -> Iterator[Violation]:
    if isinstance(state, str) and state in _ASKED_FOR:  # a StrEnum equals its value
        request.states.append(image_pb2.JobState.Value(f"JOB_STATE_{JobState(state).name}"))
    else:
        yield Violation(field="states", description=f"must be of {', '.join(_ASKED_FOR)}; got {describe(state)}")


def _state(state: image_pb2.JobState.ValueType) -> JobState:
    known = state in image_pb2.JobState.values()
    name = image_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower() if known else ""
    return JobState(name) if name in set(JobState) else JobState.UNKNOWN


def _priority(priority: image_pb2.Priority.ValueType) -> Priority:
    """Return a priority; NORMAL for one that is not given, or unknown to this client."""
    known = priority in image_pb2.Priority.values()
    name = image_pb2.Priority.Name(priority).removeprefix("PRIORITY_").lower() if known else ""
    return Priority(name) if name in set(Priority) else Priority.NORMAL


def _time(stamp: Timestamp) -> datetime:
    return moment_from(stamp.seconds + stamp.nanos / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A span of time in which a service worked on a job, or waited for something."""

    name: str
    service: str
    """Name of the service in the fleet; "gateway" for the gateway itself."""
    track: str
    """The part of the service that was busy, or waited."""
    begin_s: float
    """Seconds since the gateway accepted the job.

    On another host they are as exact as the worker's clock was when the attempt began. A store's span is put in the
    middle of the time that the worker waited for it.
    """
    seconds: float
    facts: Mapping[str, str] = field(default_factory=dict)
    """Details, for people."""

    @property
    def end_s(self) -> float:
        """Seconds from the job's acceptance to the end of the span."""
        return self.begin_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """The spans of a job."""

    job_id: str
    spans: tuple[TraceSpan, ...]
    """Spans, by their beginnings."""
    dropped: int = 0
    """Number of spans that were left out, because a trace has a size limit."""


def trace_from(job_id: str, trace: trace_pb2.Trace) -> JobTrace:
    """Return the trace that the wire describes."""
    spans = tuple(
        TraceSpan(
            name=span.name,
            service=span.service or GATEWAY,
            track=span.track,
            begin_s=span.begin_ns / 1e9,
            seconds=span.duration_ns / 1e9,
            facts=dict(span.facts),
        )
        for span in trace.spans
    )
    return JobTrace(job_id=job_id, spans=spans, dropped=trace.dropped)
