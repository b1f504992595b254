"""The webhook event of a job's end: which webhook it has, and that nothing of it can keep a job from ending."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bottega.errors import Poisoned
from bottega.gateway.config import WebhooksConfig
from bottega.gateway.jobs.store import EndTime, JobRecord
from bottega.gateway.tenants import TenantTerms
from bottega.gateway.webhooks.events import FULL, WebhookEvents, without_query
from bottega.rpc.security.tenant_file import TenantWebhooks
from bottega.rpc.status import to_job_error
from bottega.v1.image_pb2 import Webhook
from bottega.webhook_payload import WebhookPayload

ALLOWED = WebhooksConfig(hosts=("*",))
OWN = Webhook(url="https://own.example/").SerializeToString()
TENANTS = TenantWebhooks(url="https://tenant.example./", events=("job.failed",))


def _failed(webhook: bytes = b"") -> JobRecord:
    record = JobRecord(
        job_id="ab" * 12, fingerprint="f", spec=b"", created_wall=1.0, request_id="order", webhook=webhook
    )
    error = to_job_error(Poisoned("it kills workers")).SerializeToString()
    ended = record.failed(error=error, end=EndTime(wall=2.5, steady=7.0))
    assert ended is not None
    return ended


def _events(
    config: WebhooksConfig = ALLOWED, webhooks: TenantWebhooks = TENANTS, *, room: bool = True
) -> WebhookEvents:
    return WebhookEvents(config, TenantTerms(webhooks=webhooks), lambda tenant: room)


def test_a_requests_webhook_comes_before_that_of_its_tenant() -> None:
    own, tenants = _events().event_of(_failed(OWN)), _events().event_of(_failed())
    assert own is not None
    assert tenants is not None
    assert (own.host, tenants.host) == ("own.example", "tenant.example")
    assert (tenants.event_id, tenants.due_steady, tenants.dead) == (f"evt_{'ab' * 12}", 7.0, False)
    body = json.loads(own.body)
    WebhookPayload.model_validate(body)
    assert (body["type"], body["timestamp"]) == ("job.failed", "1970-01-01T00:00:02.500+00:00")
    assert body["data"]["error"] == {"reason": "POISONED", "message": "it kills workers"}
    assert (body["data"]["request_id"], body["data"]["images"]) == ("order", [])


def test_events_that_nobody_wants_are_not_made() -> None:
    assert _events(WebhooksConfig()).event_of(_failed(OWN)) is None, "no host may be called"
    assert _events(webhooks=replace(TENANTS, events=("job.completed",))).event_of(_failed()) is None
    assert _events(webhooks=TenantWebhooks()).event_of(_failed()) is None


def test_an_event_without_room_is_given_up_at_once() -> None:
    event = _events(room=False).event_of(_failed(OWN))
    assert event is not None
    assert (event.dead, event.error) == (True, FULL)


@pytest.mark.parametrize("url", ["https://[broken/", "https://\u2100.example/", "https://a:b:c/"])
def test_a_tenants_url_that_is_none_does_not_keep_a_job_from_ending(url: str) -> None:
    event = _events(webhooks=replace(TENANTS, url=url)).event_of(_failed())
    assert event is not None
    assert without_query(f"{url}?secret") in ("", url)
