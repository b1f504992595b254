"""Webhooks of a running gateway: signed, delivered at least once with one ID, fairly, and within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from dataclasses import replace
from functools import partial
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bottega import outside_address
from bottega.errors import ConfigError, InvalidRequest
from bottega.gateway.config import GatewayConfig, check_files
from bottega.gateway.webhooks import delivery
from bottega.rpc.security.tenant_file import TenantWebhooks, change_tenants, new_webhook_secret
from bottega.v1 import image_pb2, webhook_pb2, webhook_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import Webhook
from load.clients.receive import PrintingReceiver
from tests.support.certificates import self_signed
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually
from tests.support.webhook_receiver import SECRET, allowed, delivering, receiving


async def submit(house: Running, url: str, *events: str, **spec: Any) -> str:
    request = image_pb2.SubmitJobRequest(
        spec=GenerationSpec(prompt="a star", **spec), webhook=Webhook(url=url, events=events)
    )
    return (await house.images.SubmitJob(request, timeout=20)).job.job_id


async def listed(house: Running, **request: Any) -> list[webhook_pb2.WebhookEvent]:
    answer = await _operators(house).ListWebhookEvents(webhook_pb2.ListWebhookEventsRequest(**request), timeout=20)
    return list(answer.events)


async def replayed(house: Running, **request: Any) -> int:
    asked = webhook_pb2.ReplayWebhookEventsRequest(**request)
    return (await _operators(house).ReplayWebhookEvents(asked, timeout=20)).replayed


def _operators(house: Running) -> webhook_pb2_grpc.WebhookServiceAsyncStub:
    stub: webhook_pb2_grpc.WebhookServiceAsyncStub = webhook_pb2_grpc.WebhookServiceStub(house.fleet_channel)
    return stub


async def test_the_ends_of_jobs_are_announced_with_what_a_receiver_needs(tmp_path: Path) -> None:
    async with receiving(SECRET) as receiver, delivering(tmp_path, public_url="https://door.example/") as house:
        drawn = await submit(house, receiver.url, seed=7, num_images=2)
        await house.ended(drawn)
        house.workers[0].script.hold_at = 1
        cancelled = await submit(house, f"{receiver.url}?token=secret")
        assert (await house.job(cancelled)).webhook.url == receiver.url, "a query may have a secret"
        await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=cancelled))
        unwanted = await submit(house, receiver.url, "job.completed", "job.failed")
        await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=unwanted))
        await eventually(lambda: len(receiver.accepted) == 2)
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_waiting") == 0)
        job = await house.job(drawn)
    by_type = {delivery.type: delivery.data for delivery in receiver.accepted}
    assert set(by_type) == {"job.completed", "job.cancelled"}
    data = by_type["job.completed"]
    assert (data["job_id"], data["state"], data["error"]) == (drawn, "completed", None)
    assert [image["url"] for image in data["images"]] == [
        f"https://door.example/v1/jobs/{drawn}/images/{n}" for n in (0, 1)
    ]
    assert [(image["seed"], image["digest"], image["format"]) for image in data["images"]] == [
        (image.seed, image.digest, "png") for image in job.images
    ]
    assert data["created_at"] <= data["started_at"] <= data["ended_at"]
    assert by_type["job.cancelled"]["error"]["reason"] == "JOB_CANCELLED"
    assert receiver.refused == 0


async def test_a_delivery_that_fails_is_repeated_with_the_same_id_and_body(tmp_path: Path) -> None:
    statuses = iter([500, 503, 404, 413, 429, 302, 200])
    async with receiving(SECRET) as receiver, delivering(tmp_path) as house:
        receiver.answer = lambda _: next(statuses)
        receiver.headers = {"location": receiver.url + "/elsewhere"}
        job_id = await submit(house, receiver.url)
        await eventually(lambda: len(receiver.accepted) == 1)
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_waiting") == 0)
        assert await listed(house) == []
        counts = house.gateway.server.registry.get_sample_value
        assert counts("bottega_webhook_deliveries_total", {"outcome": "failed"}) == 6
        assert counts("bottega_webhook_deliveries_total", {"outcome": "delivered"}) == 1
    assert {delivery.event_id for delivery in receiver.deliveries} == {f"evt_{job_id}"}
    assert len(receiver.deliveries) == 7, "a redirect is not followed"
    assert len({delivery.headers["content-length"] for delivery in receiver.deliveries}) == 1


async def test_a_gateway_that_stops_between_end_and_delivery_delivers_after_its_start(tmp_path: Path) -> None:
    async with receiving(SECRET) as receiver:
        receiver.answer = lambda _: 503
        async with delivering(tmp_path, first_retry_s=60.0, max_retry_s=60.0) as house:
            job_id = await submit(house, receiver.url)
            await eventually(lambda: len(receiver.deliveries) == 1)
        receiver.answer = lambda _: 200
        async with delivering(tmp_path) as house:
            (waiting,) = await listed(house)
            assert (waiting.event_id, waiting.dead, waiting.error) == (f"evt_{job_id}", False, "HTTP 503")
            assert 0 < waiting.next_attempt_s <= 60
            assert await replayed(house, event_ids=[waiting.event_id]) == 1
            await eventually(lambda: len(receiver.accepted) == 1)


async def test_what_is_given_up_is_listed_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_REPLAYED_AT_ONCE", 2)
    async with receiving(SECRET) as receiver, delivering(tmp_path, give_up_s=0.2) as house:
        receiver.answer = lambda _: 500
        jobs = [await submit(house, f"{receiver.url}?token=secret") for _ in range(3)]
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_dead") == 3)
        dead = await listed(house, dead=True)
        assert {event.job_id for event in dead} == set(jobs)
        assert all(event.url == receiver.url and event.attempts for event in dead), "a query may have a secret"
        receiver.answer = lambda _: 410
        assert await replayed(house, event_ids=[dead[0].event_id, "evt_unknown"]) == 1
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_dead") == 3)
        (again,) = [event for event in await listed(house) if event.event_id == dead[0].event_id]
        assert (again.attempts, again.error) == (1, "HTTP 410"), "410 is final"
        receiver.answer = lambda _: 200
        await house.images.DeleteJob(image_pb2.DeleteJobRequest(job_id=jobs[0]))
        damaged = "UPDATE outbox SET url = 'https://evil.example/' WHERE job_id = ?"
        with contextlib.closing(sqlite3.connect(next((tmp_path / "state").rglob("jobs.sqlite")))) as store, store:
            store.execute(damaged, (jobs[1],))
        all_dead = webhook_pb2.ReplayWebhookEventsRequest(all_dead=True)
        answers = [await _operators(house).ReplayWebhookEvents(all_dead, timeout=20) for _ in range(2)]
        assert [answer.left for answer in answers] == [1, 0]
        assert [sum(answer.replayed for answer in answers), sum(answer.damaged for answer in answers)] == [2, 1]
        assert house.gateway.server.registry.get_sample_value("bottega_webhooks_dropped_total") == 1
        await eventually(lambda: set(receiver.counts()) == {f"evt_{jobs[0]}", f"evt_{jobs[2]}"})
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_waiting") == 0)
        assert await listed(house) == []


async def test_operators_list_events_by_pages(tmp_path: Path) -> None:
    async with receiving(SECRET) as receiver, delivering(tmp_path, first_retry_s=60.0, max_retry_s=60.0) as house:
        receiver.answer = lambda _: 500
        jobs = [await submit(house, receiver.url) for _ in range(3)]
        await eventually(lambda: len(receiver.deliveries) == 3)
        first = await _operators(house).ListWebhookEvents(webhook_pb2.ListWebhookEventsRequest(page_size=2))
        last = await _operators(house).ListWebhookEvents(
            webhook_pb2.ListWebhookEventsRequest(page_size=2, page_token=first.next_page_token)
        )
        assert {event.job_id for event in (*first.events, *last.events)} == set(jobs)
        assert (len(first.events), last.next_page_token) == (2, "")


async def test_webhooks_are_refused_unless_the_operator_allows_their_host(tmp_path: Path) -> None:
    async def refused(house: Running, url: str, *events: str) -> set[str]:
        error = await refusal(lambda: submit(house, url, *events), InvalidRequest)
        return {violation.field for violation in error.violations}

    async with running_gateway() as house:
        await house.worker()
        assert await refused(house, "https://example.com/") == {"webhook"}
    async with delivering(tmp_path) as house:
        assert await refused(house, "https://example.com/") == {"webhook.url"}
        assert await refused(house, "http://127.0.0.1:80@10.0.0.1/") == {"webhook.url"}
        assert await refused(house, "") == {"webhook.url"}
        assert await refused(house, "http://127.0.0.1:1/", "job.started") == {"webhook.events"}
        assert await refused(house, "http://127.0.0.1:1/", "job.failed", "job.failed") == {"webhook.events"}


async def test_a_receiver_that_drips_or_says_nothing_is_cut_in_time(tmp_path: Path) -> None:
    calls = 0
    open_calls: set[asyncio.Task[None]] = set()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        byte = b"H" if calls % 2 else b""
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(byte)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1 << 16), 0.01)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_calls.add(asyncio.create_task(drip(reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with delivering(tmp_path, delivery_s=0.1) as house:
            await submit(house, f"http://127.0.0.1:{port}/")
            await eventually(lambda: calls >= 3)
            (event,) = await listed(house)
            assert event.error == "no answer within 0.1 s"
        await asyncio.gather(*open_calls)


async def test_a_dead_receiver_of_one_tenant_does_not_delay_another(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    own = {name: new_webhook_secret() for name in ("slow", "quick")}
    async with receiving(own["slow"]) as stuck, receiving(own["quick"]) as receiver:
        stuck.hold = asyncio.Event()
        urls = {"slow": stuck.url, "quick": receiver.url}
        keys = {
            name: add_tenant(file, name, webhooks=TenantWebhooks(url=urls[name], secrets=(own[name],))) for name in own
        }
        limits = allowed(max_deliveries=4, max_deliveries_per_tenant=2, max_deliveries_per_host=4)
        async with running_gateway(tenants=str(file), webhooks=limits) as house:
            await house.worker()
            async with calling(house, keys["slow"]) as slow, calling(house, keys["quick"]) as quick:
                for _ in range(6):
                    await slow.submit(prompt="a star")
                await eventually(lambda: stuck.active == 2)
                for _ in range(6):
                    await quick.submit(prompt="a star")
                await eventually(lambda: len(receiver.accepted) == 6)
                assert stuck.most_active == 2
                events = await listed(house, tenant="slow")
                assert {event.tenant for event in events} == {"slow"}
            stuck.hold.set()
            await eventually(lambda: len(stuck.accepted) == 6)
    assert (stuck.refused, receiver.refused) == (0, 0)


async def test_during_a_rotation_the_old_and_the_new_secret_both_verify(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    old = TenantWebhooks(secrets=(SECRET,))
    both = old.rotated(keep_old=True)
    key = add_tenant(file, "shop", webhooks=both)
    async with (
        receiving(SECRET) as before,
        receiving(both.secrets[0]) as after,
        running_gateway(tenants=str(file), webhooks=allowed()) as house,
        calling(house, key) as shop,
    ):
        await house.worker()
        await submit(shop, before.url)
        await submit(shop, after.url)
        await eventually(lambda: len(before.accepted) == len(after.accepted) == 1)
        assert before.accepted[0].headers["webhook-signature"].count("v1,") == 2
        new = both.rotated(keep_old=False)
        after.secrets = list(new.secrets)
        change_tenants(file, lambda tenants: (replace(tenants[0], webhooks=new),))
        os.utime(file)
        await submit(shop, after.url)
        await eventually(lambda: len(after.accepted) == 2)
        assert after.accepted[1].headers["webhook-signature"].count("v1,") == 1


async def test_a_tenant_without_a_secret_cannot_name_a_webhook(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    key = add_tenant(file, "shop")
    async with running_gateway(tenants=str(file), webhooks=allowed()) as house, calling(house, key) as shop:
        await house.worker()
        error = await refusal(lambda: submit(shop, "http://127.0.0.1:1/"), InvalidRequest)
        assert "bottega tenants webhook" in error.message


async def test_events_beyond_the_bound_wait_for_room_and_the_oldest_is_dropped(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"max_waiting_per_tenant": 2, "max_dead": 2, "first_retry_s": 60.0, "max_retry_s": 60.0}
    async with receiving(SECRET) as receiver, delivering(tmp_path, **bounds) as house:
        receiver.answer = lambda _: 500
        count = house.gateway.server.registry.get_sample_value
        for number in range(1, 7):
            await house.ended(await submit(house, receiver.url))
            await eventually(partial(_knows, count, number))
        assert (count("bottega_webhooks_waiting"), count("bottega_webhooks_dead")) == (2, 2)
        dead = await listed(house, dead=True)
        assert {event.error for event in dead} == {"the outbox had no room for this event"}
        assert len(await listed(house)) == 4
        assert count("bottega_webhooks_given_up_total") == 4
        receiver.answer = lambda _: 200
        waiting = [event.event_id for event in await listed(house) if not event.dead]
        assert await replayed(house, event_ids=waiting) == 2
        await eventually(lambda: len(receiver.counts()) == 4)
        await eventually(lambda: _knows(count, 2))  # which were dropped


def _knows(count: Any, events: int) -> bool:
    names = ("bottega_webhooks_waiting", "bottega_webhooks_dead", "bottega_webhooks_dropped_total")
    return bool(sum(count(name) for name in names) == events)


async def test_a_name_that_leads_inside_is_not_called_and_the_operator_sees_why(tmp_path: Path) -> None:
    async with receiving(SECRET) as receiver, delivering(tmp_path, hosts=("localhost",), networks=()) as house:
        await submit(house, f"http://localhost:{receiver.port}/")

        async def is_told() -> bool:
            return [event.error for event in await listed(house)] == ["the host's address is not public"]

        await eventually(is_told)
        assert not receiver.deliveries


async def test_an_unexpected_error_is_a_failed_delivery_and_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_address, "resolve_name", lambda host: 1 / 0)
    async with delivering(tmp_path, hosts=("localhost",), give_up_s=0.2) as house:
        await submit(house, "http://localhost:1/")
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_dead") == 1)
        assert [event.error for event in await listed(house)] == ["the gateway failed: ZeroDivisionError"]


async def test_a_tenants_url_that_is_not_allowed_is_given_up_at_once(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    key = add_tenant(file, "shop", webhooks=TenantWebhooks(url="http://other.example/", secrets=(SECRET,)))
    with pytest.raises(ConfigError, match="the webhook of shop: the URL's host is not allowed here"):
        check_files(GatewayConfig(tenants=str(file), webhooks=allowed()))
    async with running_gateway(tenants=str(file), webhooks=allowed()) as house, calling(house, key) as shop:
        await house.worker()
        await shop.submit(prompt="a star")
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_dead") == 1)


async def test_the_example_of_a_receiver_accepts_a_webhook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", SECRET)
    with HTTPServer(("127.0.0.1", 0), PrintingReceiver) as server:
        server.timeout = 60.0
        serving = asyncio.create_task(asyncio.to_thread(server.handle_request))
        async with delivering(tmp_path) as house:
            job_id = await submit(house, f"http://127.0.0.1:{server.server_port}/")
            await serving
    assert f"job.completed {job_id}" in capsys.readouterr().out


async def test_a_receiver_that_asks_for_time_gets_it(tmp_path: Path) -> None:
    async with receiving(SECRET) as receiver, delivering(tmp_path, max_retry_s=60.0) as house:
        receiver.answer = lambda _: 429
        receiver.headers = {"retry-after": "3600"}
        await submit(house, receiver.url)

        async def waits_long() -> bool:
            return [event.next_attempt_s > 50 for event in await listed(house)] == [True]

        await eventually(waits_long)
        assert len(receiver.deliveries) == 1


async def test_a_receiver_with_a_certificate_of_the_company_is_verified_by_its_name(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path, "localhost")
    inside: dict[str, Any] = {"hosts": ("localhost",), "plain_http": False}
    async with receiving(SECRET, certificate=certificate) as receiver:
        url = f"https://localhost:{receiver.port}/"
        async with delivering(tmp_path, **inside) as house:
            await submit(house, url)

            async def is_refused() -> bool:
                return any("certificate verify failed" in event.error for event in await listed(house))

            await eventually(is_refused)
        async with delivering(tmp_path, authorities=str(certificate), **inside) as house:
            await eventually(lambda: len(receiver.accepted) == 1)
