"""The webhook event of a job's end: who gets it, and its payload."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit, urlunsplit

from bottega.gateway.config import WebhooksConfig
from bottega.gateway.jobs.store import JobRecord, OutboxEvent
from bottega.gateway.tenants import TenantTerms
from bottega.rpc.status import from_job_error
from bottega.v1 import image_pb2
from bottega.v1.error_pb2 import JobError
from bottega.v1.generation_pb2 import GenerationSpec, ImageFormat
from bottega.v1.image_pb2 import JobState, Webhook
from bottega.webhook_payload import WebhookPayload

_KINDS: Mapping[JobState.ValueType, str] = {
    image_pb2.JOB_STATE_COMPLETED: "job.completed",
    image_pb2.JOB_STATE_FAILED: "job.failed",
    image_pb2.JOB_STATE_CANCELLED: "job.cancelled",
}
FULL = "the outbox had no room for this event"
"""Error of events that are left out until there is room, because too many wait already."""


class WebhookEvents:
    """Makes the events of ended jobs. It is called in threads of the job store.

    Args:
        config: The configuration of webhooks; without hosts there are no events.
        terms: The tenants' own webhooks.
        has_room: Returns whether another event of a tenant may wait.
    """

    def __init__(self, config: WebhooksConfig, terms: TenantTerms, has_room: Callable[[str], bool]) -> None:
        self._config = config
        self._terms = terms
        self._has_room = has_room

    def event_of(self, record: JobRecord) -> OutboxEvent | None:
        """Return the event of an ended job; None if no webhook wants it."""
        webhook = self._webhook(record)
        kind = _KINDS[record.state]
        if not webhook.url or (webhook.events and kind not in webhook.events):
            return None
        full = not self._has_room(record.tenant)
        steady = record.ended_steady or 0.0
        return OutboxEvent(
            event_id=event_id_of(record.job_id),
            job_id=record.job_id,
            tenant=record.tenant,
            kind=kind,
            url=webhook.url,
            host=_host(webhook.url),
            body=_body(kind, record, self._config.public_url),
            created_wall=record.ended_wall or 0.0,
            tried_since_steady=steady,
            due_steady=steady,
            error=FULL if full else "",
            dead=full,
        )

    def _webhook(self, record: JobRecord) -> Webhook:
        if not self._config.allows_any:
            return Webhook()
        if record.webhook:
            return Webhook.FromString(record.webhook)
        own = self._terms.webhooks(record.tenant)
        return Webhook(url=own.url, events=own.events)


def event_id_of(job_id: str) -> str:
    """Return the ID of the event of a job's end. A job ends once."""
    return f"evt_{job_id}"


def without_query(url: str) -> str:
    """Return a URL without its query, which may have a secret; "" if it is no URL."""
    try:
        return urlunsplit(urlsplit(url)._replace(query=""))
    except ValueError:
        return ""


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:  # a tenant's URL that is none: its deliveries fail, and not the end of the job
        return ""


def _body(kind: str, record: JobRecord, public_url: str) -> bytes:
    """Return the payload, as Standard Webhooks recommends it: type, timestamp and data."""
    error = from_job_error(JobError.FromString(record.error)) if record.error else None
    payload = WebhookPayload.model_validate(
        {
            "type": kind,
            "timestamp": _time(record.ended_wall),
            "data": {
                "job_id": record.job_id,
                "request_id": record.request_id,
                "state": kind.removeprefix("job."),
                "created_at": _time(record.created_wall),
                "started_at": _time(record.started_wall),
                "ended_at": _time(record.ended_wall),
                "error": error and {"reason": error.reason_name, "message": error.message},
                "images": _images(record, public_url.rstrip("/")),
            },
        }
    )
    return json.dumps(payload.model_dump(), separators=(",", ":")).encode("ascii")


def _images(record: JobRecord, public_url: str) -> list[dict[str, object]]:
    if not record.images:
        return []
    spec = GenerationSpec.FromString(record.spec)
    width, height = record.result_size if any(record.result_size) else (spec.width, spec.height)
    return [
        {
            "index": index,
            "seed": spec.seed + index,
            "width": width,
            "height": height,
            "format": ImageFormat.Name(spec.format).removeprefix("IMAGE_FORMAT_").lower(),
            "size_bytes": image.size_bytes,
            "digest": image.digest,
            "url": f"{public_url}/v1/jobs/{record.job_id}/images/{index}",
        }
        for index, image in enumerate(record.images)
    ]


def _time(wall: float | None) -> str | None:
    return None if wall is None else dt.datetime.fromtimestamp(wall, dt.UTC).isoformat(timespec="milliseconds")
