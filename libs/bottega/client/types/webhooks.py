"""Webhooks: where the ends of jobs are announced, and what operators see of those that are not delivered yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from bottega.client.types.messages import as_list, build_message, moment_from
from bottega.v1 import webhook_pb2
from bottega.v1.image_pb2 import Webhook as WebhookMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A receiver that hears of the end of a job, by a POST that is signed after Standard Webhooks."""

    url: str
    """URL of the receiver, whose host the gateway's operator allows."""
    events: tuple[str, ...] = ()
    """Types of events to announce, of job.completed, job.failed and job.cancelled; empty means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeliveredWebhook:
    """A webhook event that is not delivered yet."""

    event_id: str
    job_id: str
    tenant: str
    type: str
    """Type of the event, such as job.completed."""
    url: str
    """Where it is delivered, without the query."""
    created: datetime
    """When the job ended."""
    attempts: int
    """Number of deliveries that have failed."""
    error: str
    """Why the last delivery failed."""
    dead: bool
    """Whether it was given up, and waits for a replay."""
    next_attempt_s: float | None
    """Seconds until the next delivery; None if it was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookPage:
    """A page of undelivered webhook events."""

    events: tuple[UndeliveredWebhook, ...]
    """Events, newest first."""
    next_page_token: str
    """Token that requests the next page; empty on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedWebhooks:
    """The result of a replay of webhook events."""

    replayed: int
    """Number of events that are delivered again."""
    damaged: int
    """Number of events that the gateway dropped, because they are damaged in its job store."""
    left: int
    """With `all_dead` the number of events that are still given up: one call replays at most 1000."""


def webhook_to_wire(webhook: Webhook | str) -> WebhookMessage:
    """Convert a webhook, or the URL of one for all events, to its message. Raise InvalidRequest for invalid types."""
    if not isinstance(webhook, Webhook):
        webhook = Webhook(url=webhook)
    events = as_list(webhook.events, name="webhook.events", what="types of events")
    return build_message(WebhookMessage(), url=webhook.url, events=events)


def webhook_from(message: WebhookMessage) -> Webhook:
    """Convert a message to a webhook."""
    return Webhook(url=message.url, events=tuple(message.events))


def webhook_page_request(
    *, tenant: str | None, dead: bool, page_size: int, page_token: str
) -> webhook_pb2.ListWebhookEventsRequest:
    """Return the request for a page of events. Raise InvalidRequest for invalid arguments."""
    request = webhook_pb2.ListWebhookEventsRequest()
    given = {} if tenant is None else {"tenant": tenant}
    return build_message(request, dead=dead, page_size=page_size, page_token=page_token, **given)


def webhook_page_from(answer: webhook_pb2.ListWebhookEventsResponse) -> WebhookPage:
    """Convert a message to a page of events."""
    return WebhookPage(events=tuple(map(_event_from, answer.events)), next_page_token=answer.next_page_token)


def replay_request(
    event_ids: Iterable[str], *, all_dead: bool, tenant: str | None
) -> webhook_pb2.ReplayWebhookEventsRequest:
    """Return the request to deliver events again. Raise InvalidRequest for invalid arguments."""
    chosen = as_list(event_ids, name="event_ids", what="IDs of events")
    request = webhook_pb2.ReplayWebhookEventsRequest()
    given = {} if tenant is None else {"tenant": tenant}
    return build_message(request, event_ids=chosen, all_dead=all_dead, **given)


def _event_from(event: webhook_pb2.WebhookEvent) -> UndeliveredWebhook:
    return UndeliveredWebhook(
        event_id=event.event_id,
        job_id=event.job_id,
        tenant=event.tenant,
        type=event.type,
        url=event.url,
        created=moment_from(event.create_time.seconds + event.create_time.nanos / 1e9),
        attempts=event.attempts,
        error=event.error,
        dead=event.dead,
        next_attempt_s=event.next_attempt_s if event.HasField("next_attempt_s") else None,
    )
