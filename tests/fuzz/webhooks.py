"""The fixed corpus of webhooks: those of requests, and what operators ask of those that are not delivered."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import Message

from bottega.rpc.security.tenant_file import WEBHOOK_EVENTS, new_webhook_secret
from bottega.v1 import image_pb2, webhook_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fuzz.case import INVALID, OK, Case, case_of, shown

# Nobody listens there.
_URL = "http://127.0.0.1:1/hook?a=b"
_BAD_URLS = (
    "",
    "x",
    "http://",
    "https://example.com/",
    "http://127.0.0.1:2/",
    "http://127.0.0.2.nip.io:1/",
    "http://0x7f.1:1/",
    "http://2130706433:1/",
    "http://user:word@127.0.0.1:1/",
    "http://[::1]:1/",
    "http://169.254.169.254:1/",
    "file:///etc/passwd",
    "http://127.0.0.1:1/\r\nHost: a",
    "http://127.0.0.1:1/" + "x" * 2048,
    "http://127.0.0.1:99999/",
    "\0",
    "x" * (1 << 20),
)
_EVENT = f"evt_{'ab' * 12}"


@contextmanager
def allowing() -> Iterator[Mapping[str, object]]:
    """A gateway's configuration of webhooks that allows `_URL`. Its bounds are small, so that they are reached."""
    with tempfile.NamedTemporaryFile("w", prefix="bottega-secret-") as file:
        file.write(new_webhook_secret())
        file.flush()
        bounds = {"max_waiting": 50, "max_dead": 50}
        hosts: dict[str, object] = {"hosts": ["127.0.0.1"], "networks": ["127.0.0.1/32"], "ports": [1]}
        yield {**hosts, "plain_http": True, "secrets": file.name, **bounds}


def webhook_corpus() -> Iterator[Case]:
    yield from _of_requests()
    yield from _listed()
    yield from _replayed()


def valid(method: str) -> Sequence[Message]:
    """Requests of operators, to mutate."""
    if method == "ListWebhookEvents":
        return [webhook_pb2.ListWebhookEventsRequest(page_size=9, page_token="12", tenant="shop", dead=True)]
    return [
        webhook_pb2.ReplayWebhookEventsRequest(event_ids=[_EVENT]),
        webhook_pb2.ReplayWebhookEventsRequest(all_dead=True, tenant="shop"),
    ]


def submission() -> image_pb2.SubmitJobRequest:
    """A request with a webhook, to mutate."""
    spec = GenerationSpec(model="miniature", prompt="a big red star", num_inference_steps=1)
    return image_pb2.SubmitJobRequest(spec=spec, webhook=image_pb2.Webhook(url=_URL, events=["job.failed"]))


def _of_requests() -> Iterator[Case]:
    def case(name: str, url: str, events: Sequence[str] = (), *fields: str) -> Case:
        request = submission()
        request.webhook.CopyFrom(image_pb2.Webhook(url=url, events=events))
        return case_of("SubmitJob", f"webhook {name}", request, INVALID if fields else OK, *fields)

    yield case("of all events", _URL)
    yield case("of named events", _URL, WEBHOOK_EVENTS)
    for url in _BAD_URLS:
        yield case(f"at {shown(url)}", url, (), "webhook.url")
    for events in (["job.started"], [""], ["job.failed"] * 2, ["x" * (1 << 20)], ["job.failed"] * 1000):
        yield case(f"of {shown(str(events))}", _URL, events, "webhook.events")


def _listed() -> Iterator[Case]:
    def case(name: str, /, *fields: str, **request: Any) -> Case:
        message = webhook_pb2.ListWebhookEventsRequest(**request)
        return case_of("ListWebhookEvents", name, message, INVALID if fields else OK, *fields)

    for size in (0, 1, 100):
        yield case(f"page_size {size}", page_size=size)
    for size in (-1, 101, 2**31 - 1, -(2**31)):
        yield case(f"page_size {size}", "page_size", page_size=size)
    for token in ("0", "9" * 18):
        yield case(f"page_token {token}", page_token=token)
    for token in ("x", "-1", "9" * 19, "\u0661", "\0", "x" * (1 << 20)):
        yield case(f"page_token {shown(token)}", "page_token", page_token=token)
    for tenant in ("", "shop", "x" * 63):
        yield case(f"tenant {shown(tenant)}", tenant=tenant, dead=True)
    for tenant in ("Shop", "x" * 64, "\0", "../up"):
        yield case(f"tenant {shown(tenant)}", "tenant", tenant=tenant)


def _replayed() -> Iterator[Case]:
    def case(name: str, /, *fields: str, **request: Any) -> Case:
        message = webhook_pb2.ReplayWebhookEventsRequest(**request)
        return case_of("ReplayWebhookEvents", name, message, INVALID if fields else OK, *fields)

    yield case("events that nobody has", event_ids=[_EVENT, "", "\u00fc", "x" * (1 << 20), *["x"] * 96])
    yield case("all of a tenant", all_dead=True, tenant="shop")
    yield case("all without tenants", all_dead=True, tenant="")
    yield case("all of a tenant that cannot be", "tenant", all_dead=True, tenant="Shop")
    yield case("nothing", "event_ids")
    yield case("too many", "event_ids", event_ids=["x"] * 101)
    yield case("both", "event_ids", event_ids=["x"], all_dead=True)
