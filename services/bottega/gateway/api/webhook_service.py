"""WebhookService: operators list the webhooks that are not delivered yet, and replay those that were given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from bottega import rules
from bottega.errors import Violation
from bottega.gateway.api.validation import check_ids
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import OutboxEvent
from bottega.gateway.webhooks.delivery import WebhookDelivery
from bottega.gateway.webhooks.events import without_query
from bottega.rpc.security.tenant_file import NAME_RULE, is_tenant_name
from bottega.rules import MAX_PAGE
from bottega.v1 import webhook_pb2, webhook_pb2_grpc

_DEFAULT_PAGE = 20
_MAX_IDS = 100
# More digits than any number of an event has, and fewer than overflow 63 bits.
_MAX_DIGITS = 18
_Context = grpc.aio.ServicerContext[Any, Any]


class WebhookService(webhook_pb2_grpc.WebhookServiceServicer):
    """The gRPC service on the port for services, which only operators may call."""

    def __init__(self, delivery: WebhookDelivery, storage: Storage) -> None:
        self._delivery = delivery
        self._storage = storage

    async def ListWebhookEvents(
        self, request: webhook_pb2.ListWebhookEventsRequest, context: _Context
    ) -> webhook_pb2.ListWebhookEventsResponse:
        """Return a page of events, newest first."""
        token = request.page_token
        violations = list(_tenant_violations(request))
        if not 0 <= request.page_size <= MAX_PAGE:
            violations.append(Violation(field="page_size", description=f"must be 0 to {MAX_PAGE}"))
        if token and not (token.isascii() and token.isdigit() and len(token) <= _MAX_DIGITS):
            violations.append(
                Violation(field="page_token", description="must be the next_page_token of an earlier answer")
            )
        rules.refuse(violations)
        size = request.page_size or _DEFAULT_PAGE
        found = await self._delivery.page(
            tenant=request.tenant if request.HasField("tenant") else None,
            dead=True if request.dead else None,
            before=int(token) if token else None,
            size=size + 1,
        )
        steady = self._storage.steady()
        return webhook_pb2.ListWebhookEventsResponse(
            events=[_to_wire(event, steady) for _, event in found[:size]],
            next_page_token=str(found[size - 1][0]) if len(found) > size else "",
        )

    async def ReplayWebhookEvents(
        self, request: webhook_pb2.ReplayWebhookEventsRequest, context: _Context
    ) -> webhook_pb2.ReplayWebhookEventsResponse:
        """Deliver events again that were given up, and waiting ones at once."""
        rules.refuse([*_tenant_violations(request), *check_ids("event_ids", *request.event_ids)])
        if bool(request.event_ids) == request.all_dead or len(request.event_ids) > _MAX_IDS:
            rule = f"give 1 to {_MAX_IDS} event_ids or all_dead, not both"
            rules.refuse([Violation(field="event_ids", description=rule)])
        if request.all_dead:
            replayed = await self._delivery.replay_dead(request.tenant if request.HasField("tenant") else None)
        else:
            replayed = await self._delivery.replay(tuple(dict.fromkeys(request.event_ids)))
        return webhook_pb2.ReplayWebhookEventsResponse(
            replayed=replayed.replayed, damaged=replayed.damaged, left=replayed.left
        )


def _tenant_violations(
    request: webhook_pb2.ListWebhookEventsRequest | webhook_pb2.ReplayWebhookEventsRequest,
) -> Iterator[Violation]:
    if request.tenant and not is_tenant_name(request.tenant):
        yield Violation(field="tenant", description=f"must be the name of a tenant: {NAME_RULE}")


def _to_wire(event: OutboxEvent, steady: float) -> webhook_pb2.WebhookEvent:
    created = Timestamp()
    created.FromNanoseconds(int(event.created_wall * 1e9))
    return webhook_pb2.WebhookEvent(
        event_id=event.event_id,
        job_id=event.job_id,
        tenant=event.tenant,
        type=event.kind,
        url=without_query(event.url),
        create_time=created,
        attempts=event.attempts,
        error=event.error,
        dead=event.dead,
        next_attempt_s=None if event.dead else max(0.0, event.due_steady - steady),
    )
