"""The routes of Bottega's own: jobs, which outlive their requests, what requests may name, and the services."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import datetime

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.types.fleet import FleetMember, HostedItem
from bottega.client.types.jobs import Completed, Event, Interrupted, JobState, JobStatus, Progress, Queued
from bottega.client.types.models import Adapter, AdapterKindName
from bottega.client.types.webhooks import Webhook
from bottega.errors import BottegaError, Forbidden, JobNotFound, MethodNotServed
from bottega.http.bodies import Body, JobBody, drawing_of, parse_fields
from bottega.http.context import context_of, fetch_images
from bottega.http.errors import error_object
from bottega.http.events import event, event_stream, with_pings
from bottega.http.gateway import bound_key
from bottega.http.input_images import encoded
from bottega.http.pictures import base64_text, file_response, picture_facts

# Seconds for which a stream of a job's events goes on; a client attaches again with Last-Event-ID.
_WATCH_S = 3600.0
_NO_CONTENT = 204
_END_ID = "end"


class JobQuery(Body):
    """The query of a list of jobs."""

    page_size: int = 20
    """Largest number of jobs in the answer, 1 to 100."""
    page_token: str = ""
    """`next_page_token` of the page before."""
    states: list[JobState] = Field(default_factory=list, max_length=len(JobState))
    """Only jobs in these states; empty for all."""
    created_after: datetime | None = None
    """Only newer jobs."""
    created_before: datetime | None = None
    """Only older jobs."""


class EventsQuery(Body):
    """The query of a stream of events."""

    preview: bool = False
    """Whether events of progress carry previews, JPEG in base64."""


async def start_job(request: Request) -> Response:
    """Start a job that outlives the request."""
    context = context_of(request)
    body = await context.bodies.read_json(request, JobBody)
    await fetch_images(request, body)
    drawing = drawing_of(body, image=encoded(body.image), mask=encoded(body.mask))
    job = await context.client.submit(
        drawing.prompt,
        num_images=drawing.num_images,
        deadline_s=drawing.deadline_s,
        request_id=request.headers.get("idempotency-key") or None,
        priority=drawing.priority,
        webhook=Webhook(url=body.webhook.url, events=tuple(body.webhook.events)) if body.webhook else None,
        **drawing.options,
    )
    status = await job.status()
    return _answer(job_object(status), status=202, headers={"location": f"/v1/jobs/{job.id}"})


async def list_jobs(request: Request) -> Response:
    """Return a page of jobs, the newest first."""
    given: dict[str, object] = dict(request.query_params)
    if "states" in given:
        given["states"] = [state for text in request.query_params.getlist("states") for state in text.split(",")]
    query = parse_fields(JobQuery, given)
    page = await context_of(request).client.list_jobs(
        states=query.states,
        created_after=query.created_after,
        created_before=query.created_before,
        page_size=query.page_size,
        page_token=query.page_token,
    )
    jobs = [job_object(job) for job in page.jobs]
    return _answer({"object": "list", "data": jobs, "next_page_token": page.next_page_token})


async def get_job(request: Request) -> Response:
    """Return how a job stands."""
    return _answer(job_object(await _job(request).status()))


async def cancel_job(request: Request) -> Response:
    """Cancel a job unless it has ended, and return how it stands."""
    return _answer(job_object(await _job(request).cancel()))


async def delete_job(request: Request) -> Response:
    """Delete a job that has ended, with its pictures. One that has not ended is cancelled first."""
    job = _job(request)
    await job.cancel()
    await job.delete()
    return Response(None, _NO_CONTENT)


async def get_picture(request: Request) -> Response:
    """Return a picture of a completed job as a file."""
    return await file_response(request, _job(request), request.path_params["index"])


async def get_trace(request: Request) -> Response:
    """Return what took how long in a job that has ended."""
    trace = await _job(request).trace()
    return _answer({"object": "job.trace", "job_id": trace.job_id, "spans": trace.spans, "dropped": trace.dropped})


async def watch_job(request: Request) -> Response:
    """Stream a job's events, from its current state to its end.

    A client that attaches again sends the id of the last event that it got (Last-Event-ID), and does not get that one
    again. After the last event it gets 204.
    """
    query = parse_fields(EventsQuery, dict(request.query_params))
    job = _job(request)
    status = await job.status()  # errors are the status of the answer
    seen = request.headers.get("last-event-id", "")
    if status.state.ended and seen == _END_ID:
        return Response(None, _NO_CONTENT)
    events = job.stream(preview=query.preview, timeout_s=_WATCH_S, fetch=False)
    return event_stream(with_pings(_event_parts(job, events, seen), context_of(request).draining))


async def _event_parts(job: AsyncJob, events: AsyncGenerator[Event, None], seen: str) -> AsyncGenerator[bytes, None]:
    first = True
    async with aclosing(events):
        try:
            async for item in events:
                name, event_id, facts = _facts(item)
                if name and not (first and event_id == seen):
                    yield event(name, {"type": name, "job_id": job.id, **facts}, event_id=event_id)
                first = first and not name
        except BottegaError:
            if (failure := await _failure_of(job)) is not None:
                facts = {"type": "job.failed", "job_id": job.id, "error": error_object(failure)}
                yield event("job.failed", facts, event_id=_END_ID)


async def _failure_of(job: AsyncJob) -> BottegaError | None:
    """Return why a job has failed, was cancelled or does not exist any more; None if a client has to attach again."""
    try:
        return (await job.status()).error
    except JobNotFound as error:
        return error
    except BottegaError:
        return None


def _facts(item: Event) -> tuple[str, str, Mapping[str, object]]:
    """Return the name, the id and the data of an event; an empty name for events that are not sent."""
    match item:
        case Queued():
            return "job.queued", f"queued-{item.place}", {"place": item.place, "estimate_s": item.estimate_s}
        case Progress():
            previews = [{"index": preview.index, "b64_json": base64_text(preview.jpeg)} for preview in item.previews]
            facts = {"steps_done": item.steps_done, "steps_total": item.steps_total, "previews": previews}
            return "job.progress", f"steps-{item.steps_done}", facts
        case Completed():
            images = [_image_object(item.job_id, picture_facts(picture)) for picture in item.images]
            return "job.completed", _END_ID, {"images": images, "provenance": item.provenance}
        case Interrupted():
            return "", "", {}


def job_object(status: JobStatus) -> dict[str, object]:
    """Return a job as answers have it."""
    images = [_image_object(status.job_id, {"index": index}) for index in range(status.image_count)]
    return {
        "id": status.job_id,
        "object": "job",
        "status": status.state,
        "request_id": status.request_id or None,
        "priority": status.priority,
        "created_at": status.created,
        "started_at": status.started,
        "ended_at": status.ended,
        "steps_done": status.steps_done,
        "steps_total": status.steps_total,
        "images": images,
        "webhook": status.webhook,
        "parameters": status.parameters,
        "provenance": status.provenance,
        "error": error_object(status.error) if status.error else None,
    }


def _image_object(job_id: str, facts: Mapping[str, object]) -> dict[str, object]:
    return {**facts, "url": f"/v1/jobs/{job_id}/images/{facts['index']}"}


def _job(request: Request) -> AsyncJob:
    return context_of(request).client.job(request.path_params["job_id"])


def _answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = to_json(value, inf_nan_mode="null")
    return Response(text, status, headers, media_type="application/json")


async def list_loras(request: Request) -> Response:
    """Return the LoRAs and textual inversion embeddings that requests may name."""
    return await _adapters(request, "lora")


async def list_controlnets(request: Request) -> Response:
    """Return the ControlNets that requests may name."""
    return await _adapters(request, "controlnet")


async def get_fleet(request: Request) -> Response:
    """Return the services of the suite, what they host and how busy they are.

    Only where the gateway asks its callers for no API key. A key is a tenant's, and the fleet is for operators, whom
    the gateway knows by their certificates: a certificate cannot be passed on, as its private key stays with its owner.
    """
    client, config = context_of(request).client, context_of(request).config
    if not config.fleet:
        raise MethodNotServed("the service has joined no fleet: `fleet` in its configuration is empty")
    if bound_key():
        raise Forbidden("the fleet is for operators, and an API key is a tenant's: use bottega fleet")
    await client.models()  # raises if the gateway has tenants
    fleet = await client.fleet()
    members = [_member(member) for member in fleet.members]
    facts = {"queued": fleet.queued, "longest_wait_s": fleet.longest_wait_s, "scheduler": fleet.scheduler}
    return _json({"object": "fleet", **facts, "data": members})


async def _adapters(request: Request, kind: AdapterKindName) -> Response:
    adapters = await context_of(request).client.adapters(kind)
    return _json({"object": "list", "data": [_adapter(adapter) for adapter in adapters]})


def _adapter(adapter: Adapter) -> dict[str, object]:
    return {
        "id": adapter.name,
        "object": adapter.kind,
        "digest": adapter.digest,
        "models": adapter.models,
        "trigger_words": adapter.trigger_words,
        "control_modes": adapter.control_modes,
    }


def _member(member: FleetMember) -> dict[str, object]:
    load = member.load
    return {
        "name": member.name,
        "kind": member.kind,
        "address": member.address,
        "version": member.version,
        "device": member.device,
        "models": [model.name for model in member.models],
        "joined_s": member.joined_s,
        "heard_s": member.heard_s,
        "starting": member.starting.stage if member.starting else None,
        "draining": load.draining,
        "running": len(load.running),
        "steps_left": sum(attempt.steps_left for attempt in load.running),
        "memory_bytes": load.memory_bytes,
        "hosted": [_hosted(item) for item in load.hosted if item.name],
        "completed": load.activity.completed,
        "failed": load.activity.failed,
        "left_out": [{"name": item.name, "reason": item.reason} for item in load.left_out],
    }


def _hosted(item: HostedItem) -> dict[str, object]:
    return {"kind": item.kind, "name": item.name, "readiness": item.readiness}


def _json(value: object) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
