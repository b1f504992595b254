"""Calls that a gateway passes on to the scheduler: whose they are, and which limits hold for them."""

from __future__ import annotations

import contextvars
from pathlib import Path
from typing import Any

import grpc
import pytest

from bottega.errors import Draining, Forbidden, JobNotFound, MethodNotServed, QuotaExceeded
from bottega.gateway.api.scheduler_calls import SchedulerCalls
from bottega.gateway.scheduler_role import SchedulerRole
from bottega.rpc.channel import PLAINTEXT, Target
from bottega.rpc.security.caller import CALLER_HOST_KEY, CALLER_KEY, Caller, Role, bind_caller
from bottega.rpc.security.tenant_file import Quotas
from bottega.v1 import fleet_pb2, image_pb2, image_pb2_grpc, webhook_pb2, webhook_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.certificates import Authority
from tests.support.postgresql import execute, new_database
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.sharing_gateways import sharing_gateways
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually


async def _submit(images: Any, *, metadata: tuple[tuple[str, str], ...] = ()) -> str:
    request = image_pb2.SubmitJobRequest(spec=GenerationSpec(prompt="a star"))
    return str((await images.SubmitJob(request, timeout=20, metadata=metadata)).job.job_id)


async def _listed(images: Any, *, metadata: tuple[tuple[str, str], ...] = ()) -> list[str]:
    answer = await images.ListJobs(image_pb2.ListJobsRequest(), timeout=20, metadata=metadata)
    return [job.job_id for job in answer.jobs]


async def test_a_tenant_by_certificate_keeps_its_jobs_at_every_gateway(tmp_path: Path, pictures: str) -> None:
    authority = Authority(tmp_path / "certs")
    tls = authority.issue("gateway/main")
    with_tls: dict[str, Any] = {"tls": tls, "channels": authority.channels("operator/anna")}
    worker = {"tls": authority.issue("worker/w1")}
    async with sharing_gateways(worker=worker, objects=pictures, **with_tls) as both:
        scheduler, follower = both.scheduler, both.follower
        opened: list[grpc.aio.Channel] = []

        def images(name: str, house: Running) -> Any:
            target = Target(address=house.address, role=Role.GATEWAY)
            opened.append(authority.channels(name).open(target))
            return image_pb2_grpc.ImageServiceStub(opened[-1])

        shop, bank = images("tenant/shop", follower), images("tenant/bank", scheduler)
        job = await _submit(shop)
        assert await _listed(shop) == await _listed(images("tenant/shop", scheduler)) == [job]
        # A name that a caller gives itself counts at no gateway, unless the caller is a gateway.
        as_shop = ((CALLER_KEY, "tenant/shop"),)
        assert await _listed(bank, metadata=as_shop) == []
        assert await _listed(images("tenant/bank", follower), metadata=as_shop) == []
        assert await _listed(images("gateway/other", scheduler), metadata=as_shop) == [job]
        for name in ("worker/w1", "gateway/none", ""):
            gateway = images("gateway/other", scheduler)
            metadata = ((CALLER_KEY, name),)
            await refusal(lambda gateway=gateway, metadata=metadata: _listed(gateway, metadata=metadata), Forbidden)  # type: ignore[misc]
        for channel in opened:
            await channel.close()


async def test_limits_by_host_count_the_host_of_the_first_caller(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certs")
    with_tls: dict[str, Any] = {
        "tls": authority.issue("gateway/main"),
        "channels": authority.channels("operator/anna"),
        "max_streams": 8,
    }
    with new_database() as url:
        async with running_gateway(jobs=url, **with_tls) as house:
            joined = ScriptedWorker("w1", house.fleet_address, tls=authority.issue("worker/w1"))
            await joined.start()
            house.workers.append(joined)
            joined.script.hold_at = 1

            async def watch(name: str, host: str) -> grpc.aio.UnaryStreamCall[Any, Any]:
                channel = authority.channels(name).open(Target(address=house.address, role=Role.GATEWAY))
                images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
                request = image_pb2.GenerateRequest(spec=GenerationSpec(prompt="a star"))
                metadata = ((CALLER_KEY, "operator/anna"), (CALLER_HOST_KEY, host))
                call = images.Generate(request, timeout=60, metadata=metadata)
                await call.initial_metadata()
                await call.read()
                return call

            # A gateway's word counts, and an operator's own does not.
            watches = [await watch("gateway/other", f"10.0.0.{number}") for number in range(5)]
            watches.append(await watch("operator/anna", "10.0.0.9"))
            peers = execute(url, "SELECT peer FROM jobs ORDER BY sequence")
            assert [peer for (peer,) in peers] == [*(f"10.0.0.{number}" for number in range(5)), "127.0.0.1"]
            for call in watches:
                call.cancel()


def test_a_forwarded_call_names_the_host_of_its_caller() -> None:
    class Context:
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ((CALLER_HOST_KEY, "10.0.0.1"), ("authorization", "Bearer x"))

    def passed_on() -> dict[str, object]:
        bind_caller(Caller(role=Role.OPERATOR, name="anna"), host="10.0.0.2")
        calls = SchedulerCalls(SchedulerRole(), PLAINTEXT, max_message_mib=1)
        return dict(calls._metadata(Context()))  # type: ignore[arg-type]

    named = contextvars.copy_context().run(passed_on)
    assert (named[CALLER_HOST_KEY], named[CALLER_KEY]) == ("10.0.0.2", "operator/anna")


async def test_a_quota_counts_the_jobs_of_all_gateways_and_schedulers(tmp_path: Path, pictures: str) -> None:
    tenants = tmp_path / "tenants.yaml"
    key = add_tenant(tenants, "shop", quotas=Quotas(per_minute=2))
    async with (
        sharing_gateways(objects=pictures, tenants=str(tenants)) as both,
        calling(both.scheduler, key) as at_scheduler,
        calling(both.follower, key) as at_follower,
    ):
        await _submit(at_follower.images)
        await _submit(at_scheduler.images)
        for images in (at_follower.images, at_scheduler.images):
            refused = await refusal(lambda images=images: _submit(images), QuotaExceeded)  # type: ignore[misc]
            assert refused.metadata["quota"] == "per_minute"
        assert await _listed(at_follower.images) == await _listed(at_scheduler.images)
        await both.scheduler.stop_early()
        await eventually(lambda: both.follower.gateway._role.serves)
        refused = await refusal(lambda: _submit(at_follower.images), QuotaExceeded)
        assert refused.metadata["quota"] == "per_minute", "the next scheduler knows what was accepted before"


async def test_previews_pictures_and_refusals_come_through_another_gateway(pictures: str) -> None:
    async with sharing_gateways(objects=pictures) as both:
        both.worker.script.preview, both.worker.script.pace_s = b"preview", 0.02
        answers = [answer.event async for answer in both.follower.generate(prompt="a star", preview=True)]
        assert any(event.progress.previews for event in answers)
        assert answers[-1].completed.images[0].data == b"picture 0"
        assert await both.follower.image(answers[-1].job_id) == b"picture 0"
        unknown = image_pb2.GetImageRequest(job_id="unknown", index=7)
        await refusal(lambda: both.follower.images.GetImage(unknown, timeout=20), JobNotFound)
        passed_on = (("x-bottega-forwarded", "1"),)
        await refusal(lambda: _listed(both.follower.images, metadata=passed_on), Draining)  # it is passed on once


async def test_the_queue_and_the_webhooks_of_the_scheduler_are_listed_everywhere(pictures: str) -> None:
    async with sharing_gateways(objects=pictures, hold_at=1) as both:
        for _ in range(4):
            await _submit(both.follower.images)
        for house in (both.scheduler, both.follower):
            await eventually(lambda house=house: _has_queued(house, 3))  # type: ignore[misc]
            webhooks: webhook_pb2_grpc.WebhookServiceAsyncStub = webhook_pb2_grpc.WebhookServiceStub(
                house.fleet_channel
            )
            assert not (await webhooks.ListWebhookEvents(webhook_pb2.ListWebhookEventsRequest(), timeout=20)).events
            await refusal(lambda webhooks=webhooks: _replay(webhooks), MethodNotServed)  # type: ignore[misc]


async def _replay(webhooks: webhook_pb2_grpc.WebhookServiceAsyncStub) -> None:
    """The scheduler refuses it, because it delivers no webhooks."""
    await webhooks.ReplayWebhookEvents(webhook_pb2.ReplayWebhookEventsRequest(all_dead=True), timeout=20)


async def _has_queued(house: Running, number: int) -> bool:
    listed = await house.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=20)
    return listed.queued == number and listed.longest_wait_s > 0 and len(listed.members) == 2


async def test_a_gateway_that_cannot_reach_the_scheduler_refuses_calls(
    pictures: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bottega.gateway.api.scheduler_calls._WAIT_S", 2.0)
    with new_database() as url:
        async with (
            running_gateway(jobs=url, name="first", objects=pictures, advertised="127.0.0.1:1") as scheduler,
            running_gateway(jobs=url, name="second", objects=pictures) as follower,
        ):
            live = image_pb2.ListJobsRequest(states=[image_pb2.JOB_STATE_QUEUED])
            waiting = follower.images.ListJobs(live, timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await waiting
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "cannot reach" in str(refused.value.details())
            await follower.until_serving(False)
            (line,) = [line for line in caplog.records if "scheduler cannot be reached" in line.message]
            assert line.__dict__["addresses"] == ["127.0.0.1:1"]
            await scheduler.stop_early()
            await follower.until_serving()
            assert await _listed(follower.images) == []


async def test_a_scheduler_that_does_not_know_its_loss_accepts_nothing() -> None:
    with new_database() as url:
        async with running_gateway(jobs=url) as house:
            await house.worker()
            accepted = (await house.submit(prompt="before")).job_id
            await house.ended(accepted)
            # As another gateway does. This one looks again in .7 s.
            execute(
                url,
                "UPDATE scheduler_lease SET generation = generation + 1, name = 'other', address = '127.0.0.1:1',"
                " expires_at = clock_timestamp() + interval '1 hour'",
            )
            await refusal(lambda: house.submit(prompt="after"), Draining)
        assert execute(url, "SELECT job_id FROM jobs") == [(accepted,)]
