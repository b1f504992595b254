"""The fixed corpus of webhooks: those of requests, and what operators ask of those that are not delivered."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from bottega.rpc.security.tenant_file import WEBHOOK_EVENTS, new_webhook_secret
from bottega.v1 import image_pb2, webhook_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fuzz.case import INVALID, LEAST_INT32, MIB_TEXT, MOST_INT32, OK, Case, asking, case_of, limits

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
    MIB_TEXT,
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
    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, **webhook: Any) -> Case:
        request = submission()
        request.webhook.CopyFrom(image_pb2.Webhook(**{"url": _URL, **webhook}))
        return case_of("SubmitJob", f"webhook {name}", request, code, *fields)

    yield from limits(case, "url", (_URL,), _BAD_URLS, within="webhook.")
    wrong = (["job.started"], [""], ["job.failed"] * 2, [MIB_TEXT], ["job.failed"] * 1000)
    yield from limits(case, "events", (WEBHOOK_EVENTS,), wrong, within="webhook.")


def _listed() -> Iterator[Case]:
    case = asking("ListWebhookEvents", webhook_pb2.ListWebhookEventsRequest)
    yield from limits(case, "page_size", (0, 1, 100), (-1, 101, MOST_INT32, LEAST_INT32))
    tokens = ("x", "-1", "9" * 19, "\u0661", "\0", MIB_TEXT)
    yield from limits(case, "page_token", ("0", "9" * 18), tokens)
    yield from limits(case, "tenant", ("", "shop", "x" * 63), dead=True)
    yield from limits(case, "tenant", (), ("Shop", "x" * 64, "\0", "../up"))


def _replayed() -> Iterator[Case]:
    case = asking("ReplayWebhookEvents", webhook_pb2.ReplayWebhookEventsRequest)
    yield case("events that nobody has", event_ids=[_EVENT, "", "\u00fc", MIB_TEXT, *["x"] * 96])
    yield from limits(case, "tenant", ("shop", ""), ("Shop",), all_dead=True)
    yield case("nothing", INVALID, "event_ids")
    yield case("too many", INVALID, "event_ids", event_ids=["x"] * 101)
    yield case("an ID with a NUL byte", INVALID, "event_ids", event_ids=["a\0b"])
    yield case("both", INVALID, "event_ids", event_ids=["x"], all_dead=True)
