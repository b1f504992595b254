"""Jobs as the gateway reports them: their states, events and timelines, and the request that lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from google.protobuf.timestamp_pb2 import Timestamp

from bottega.client.types.messages import as_list, build_message, describe, moment_from, set_timestamp
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import Parameters, Provenance, parameters_from, provenance_from
from bottega.client.types.webhooks import Webhook, webhook_from
from bottega.errors import BottegaError, Violation
from bottega.rpc.status import from_job_error
from bottega.rules import refuse
from bottega.v1 import image_pb2, trace_pb2

GATEWAY = "gateway"
"""Value of `TraceSpan.service` for the gateway's own spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """An event: the job waits for a worker."""

    job_id: str
    place: int
    """Number of jobs of the same model that are ahead in the queue."""
    estimate_s: float | None
    """Estimated seconds until the job completes; None before anything has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A small image of an unfinished picture."""

    index: int
    """Index of the picture in the job, from 0."""
    jpeg: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """An event: the job runs."""

    job_id: str
    steps_done: int
    """Completed denoising steps, summed over all pictures."""
    steps_total: int
    previews: tuple[Preview, ...] = ()
    """Previews of the unfinished pictures; empty unless they were requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """An event: the gateway does not answer. The SDK attaches to the job again after `wait_s`."""

    error: BottegaError
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The last event: the job has completed."""

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
    """A state that only newer gateways have. Requests cannot name it."""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class Priority(StrEnum):
    """The priority of a request among those of its tenant. Requests of low priority do not wait forever."""

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
    """Completed denoising steps, summed over all pictures."""
    steps_total: int
    """All denoising steps of the job, summed over all pictures."""
    image_count: int
    """Number of finished pictures; client.job(job_id).image(index) fetches them."""
    provenance: Provenance | None = field(repr=False)
    """How the pictures were really drawn; None until the job has completed."""
    error: BottegaError | None
    """Why the job has no result, as job.result() raises it; None unless it failed or was cancelled."""
    priority: Priority
    """Priority of the job among those of its tenant."""
    webhook: Webhook | None = None
    """Where the job's end is announced; None if its request names nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """A page of a list of jobs."""

    jobs: tuple[JobStatus, ...]
    """Jobs, newest first."""
    next_page_token: str
    """Token that requests the next page; empty on the last page."""


def status_from(job: image_pb2.Job) -> JobStatus:
    """Convert a message to a JobStatus."""
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
        webhook=webhook_from(job.webhook) if job.HasField("webhook") else None,
    )


def priority_to_wire(priority: object) -> image_pb2.Priority.ValueType:
    """Convert a priority to the message's enum value. Raise InvalidRequest if it is not a priority."""
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
    """Return the request for a page of jobs. Raise InvalidRequest for invalid arguments."""
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
    """Convert the message's enum value to a Priority; NORMAL for one that is missing or unknown to this client."""
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
    """The part of the service that was busy or waited, such as its queue."""
    begin_s: float
    """Seconds from the gateway's acceptance of the job to the start of the span.

    For a span on another host, it is as exact as the worker's clock was when the attempt began. A store's span is
    centred in the time that the worker waited for the store."""
    seconds: float
    facts: Mapping[str, str] = field(default_factory=dict)
    """Details to show to people."""

    @property
    def end_s(self) -> float:
        """Seconds from the job's acceptance to the end of the span."""
        return self.begin_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """The spans of a job."""

    job_id: str
    spans: tuple[TraceSpan, ...]
    """Spans, sorted by start."""
    dropped: int = 0
    """Number of spans that are missing, because the size of a trace is limited."""


def trace_from(job_id: str, trace: trace_pb2.Trace) -> JobTrace:
    """Convert a message to a JobTrace."""
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
