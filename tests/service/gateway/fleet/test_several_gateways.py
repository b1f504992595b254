"""Services join each of several gateways, and follow the one that schedules."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from bottega import errors, kinds
from bottega.rpc import fleet_membership, gateway_membership
from bottega.rpc.fleet_membership import FleetMembership, SchedulerFence
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2
from tests.fakes.fake_time import FakeTime
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_front import CONFIG, request, running_workers
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.waiting import eventually


def registration(name: str = "w1") -> fleet_pb2.Registration:
    return fleet_pb2.Registration(kind=kinds.CACHE, name=name, address="127.0.0.1:9", version="test")


async def reported(memory_bytes: int, *gateways: Running) -> bool:
    """Whether a member has reported this at each of the gateways."""
    answers = [await gateway.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=60) for gateway in gateways]
    loads = [[member.load for member in answer.members if member.registration.name == "w1"] for answer in answers]
    return all(found == [fleet_pb2.Load(memory_bytes=memory_bytes)] for found in loads)


def joins(caplog: pytest.LogCaptureFixture, gateway: str) -> int:
    """How often members have joined the gateway at this address."""
    found = [vars(record) for record in caplog.records if record.message == "joined the fleet"]
    return sum(record["gateway"] == gateway for record in found)


async def test_each_gateway_gets_every_report_and_a_lost_one_gets_them_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "bottega.rpc")
    monkeypatch.setattr(gateway_membership, "_MIN_REPORT_INTERVAL_S", 600.0)  # only changes are reported
    async with running_gateway(lease_s=600.0) as first:
        memory_bytes = 1
        async with running_gateway(lease_s=600.0) as second:
            lost = second.fleet_address
            member = FleetMembership(
                f"{first.fleet_address},{lost}",
                registration(),
                load=lambda: fleet_pb2.Load(memory_bytes=memory_bytes),
            )
            member.start()
            await eventually(lambda: reported(1, first, second))
            memory_bytes = 2
            member.report_soon()
            await eventually(lambda: reported(2, first, second))
        try:
            await eventually(lambda: member.gateways == (first.fleet_address,))
            assert member.joined.is_set()
            memory_bytes = 3
            member.report_soon()
            await eventually(lambda: reported(3, first))
            async with running_gateway(fleet={"listen": lost}) as again:
                await eventually(lambda: reported(3, again))
                assert (joins(caplog, first.fleet_address), joins(caplog, lost)) == (1, 2)
                await member.stop()
        finally:
            await member.stop()


async def test_a_worker_says_that_gateways_do_not_share_their_jobs(caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway() as first, running_gateway() as second:
        worker = await ScriptedWorker("w1", f"{first.fleet_address},{second.fleet_address}").start()
        first.workers.append(worker)
        await eventually(
            lambda: any("share a worker and not their jobs" in record.message for record in caplog.records)
        )
    (record,) = [record for record in caplog.records if "share a worker" in record.message]
    assert first.fleet_address in vars(record)["gateways"]
    assert second.fleet_address in vars(record)["gateways"]
    assert "jobs: postgresql" in vars(record)["todo"]


async def test_a_gateway_that_refuses_disturbs_no_other() -> None:
    async with running_gateway() as first, running_gateway(max_members=1) as second:
        other = ScriptedWorker("other", second.fleet_address)
        await other.start()
        member = FleetMembership(f"{first.fleet_address},{second.fleet_address}", registration(), load=fleet_pb2.Load)
        member.start()
        try:
            await eventually(lambda: member.gateways == (first.fleet_address,))
            await other.die()
            await eventually(lambda: len(member.gateways) == 2)
        finally:
            await member.stop()


async def test_members_know_services_that_only_one_gateway_knows_yet() -> None:
    known: list[str] = []
    async with running_gateway() as first, running_gateway() as second:
        user = registration("user")
        user.uses.append(kinds.CACHE)
        members = [
            FleetMembership(first.fleet_address, registration("a"), load=fleet_pb2.Load),
            FleetMembership(second.fleet_address, registration("b"), load=fleet_pb2.Load),
            FleetMembership(
                f"{first.fleet_address},{second.fleet_address}",
                user,
                load=fleet_pb2.Load,
                on_services=lambda services: known.__setitem__(slice(None), [service.name for service in services]),
            ),
        ]
        for member in members:
            member.start()
        try:
            await eventually(lambda: known == ["a", "b", "user"])
        finally:
            for member in members:
                await member.stop()


class Dns:
    """Answers for the name gateways.test, in place of the system's resolver; loopback addresses stand for machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ips: str) -> None:
        self.ips = ips
        self.first: list[tuple[str, ...] | None] = []
        """The next answers, before those with `ips`; None for a failure."""
        self.asked = 0
        system = socket.getaddrinfo

        def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if host != "gateways.test":
                return system(host, port, *args, **kwargs)
            ips = self.first.pop(0) if self.first else self.ips
            self.asked += 1
            if ips is None:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            ends = [(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip) for ip in ips]
            return [(family, socket.SOCK_STREAM, 6, "", (ip, port)) for family, ip in ends]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(fleet_membership, "_RESOLVE_INTERVAL_S", 0.05)

    async def answer(self, *answers: tuple[str, ...] | None) -> None:
        """Give these answers one after the other, and wait until they have been followed."""
        until = self.asked + len(answers) + 2
        self.first = list(answers)
        await eventually(lambda: self.asked >= until)


async def test_a_name_is_a_gateway_at_each_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bottega.rpc")
    dns = Dns(monkeypatch, "127.0.0.1", "127.0.0.2")
    async with running_gateway() as first:
        port = first.fleet_address.rpartition(":")[2]
        async with running_gateway(fleet={"listen": f"127.0.0.2:{port}"}) as second:
            member = FleetMembership(f"gateways.test:{port}", registration(), load=fleet_pb2.Load)
            member.start()
            try:
                await eventually(lambda: reported(0, first, second))
                async with running_gateway(fleet={"listen": f"127.0.0.3:{port}"}) as third:
                    dns.ips = ("127.0.0.1", "127.0.0.3")
                    await eventually(lambda: reported(0, third))
                    both = [f"127.0.0.1:{port}", f"127.0.0.3:{port}"]
                    await eventually(lambda: sorted(member.gateways) == both)
                    assert joins(caplog, first.fleet_address) == 1
                    await member.stop()
            finally:
                await member.stop()


async def test_a_failed_look_up_or_a_short_answer_ends_no_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bottega.rpc")
    dns = Dns(monkeypatch, "127.0.0.1")
    async with running_gateway() as first:
        port = first.fleet_address.rpartition(":")[2]
        async with running_gateway(fleet={"listen": f"127.0.0.2:{port}"}) as second:
            member = FleetMembership(f"gateways.test:{port}", registration(), load=fleet_pb2.Load)
            member.start()
            try:
                await eventually(lambda: member.gateways == (first.fleet_address,))
                dns.ips = both = ("127.0.0.1", "127.0.0.2")
                await eventually(lambda: len(member.gateways) == 2)
                await dns.answer(*[None] * 5, ("127.0.0.2",), ("127.0.0.2",), both, (), ("127.0.0.1",), ("::1",))
                assert len(member.gateways) == 2
                assert joins(caplog, first.fleet_address) == joins(caplog, second.fleet_address) == 1
                dns.ips = ("127.0.0.1",)
                await eventually(lambda: member.gateways == (first.fleet_address,))
                dns.ips = ("::1",)
                await eventually(lambda: list(member._members) == [f"[::1]:{port}"])
                await member.stop()
            finally:
                await member.stop()
    (told,) = [vars(record) for record in caplog.records if "is not resolved" in record.message]
    assert told["gateway"] == f"gateways.test:{port}"


def test_a_fence_refuses_older_generations_until_they_are_doubted_for_long() -> None:
    time = FakeTime()
    fence = SchedulerFence(time.monotonic)
    fence.check(0)
    fence.note(3)
    fence.check(4)  # a new scheduler whose word is on its way
    fence.check(3)
    fence.note(2)
    for older in (0, 2):
        with pytest.raises(errors.StaleScheduler, match="follows 3"):
            fence.check(older)
    fence.note(3)
    time.now += 100.0
    with pytest.raises(errors.StaleScheduler):
        fence.check(2)
    fence.note(1)  # the database was made anew
    time.now += 59.0
    with pytest.raises(errors.StaleScheduler):
        fence.check(1)
    time.now += 1.0
    fence.check(1)
    with pytest.raises(errors.StaleScheduler, match="follows 1"):
        fence.check(0)


class NamingFleet(fleet_pb2_grpc.FleetServiceServicer):
    """The fleet listener of a gateway, on a real server: it lets everyone in, and names the scheduler."""

    def __init__(self) -> None:
        self.generations: asyncio.Queue[int] = asyncio.Queue()
        self._server = Server("fleet", ServerConfig())
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server.grpc)

    async def Join(
        self, requests: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        while True:
            scheduler = fleet_pb2.SchedulerLease(generation=await self.generations.get())
            yield fleet_pb2.JoinResponse(scheduler=scheduler)

    async def __aenter__(self) -> NamingFleet:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()

    @property
    def address(self) -> str:
        return self._server.address


async def test_an_attempt_goes_on_for_a_new_scheduler_and_not_for_the_old_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = NamingFleet(), NamingFleet()  # type: ignore[abstract]
    async with first, second, running_workers() as start:
        worker = await start(replace(CONFIG, gateway=f"{first.address},{second.address}"))
        first.generations.put_nowait(1)
        job = request("slow", job_id="moved")
        job.attempt.generation = 1
        await worker.events(job, until="progress")
        second.generations.put_nowait(2)  # the first gateway, whose lease has ended, does not know it
        job.attempt.generation = 2
        await worker.events(job, until="progress")
        (attempt,) = worker.worker.attempts
        old = worker_pb2.AttemptId(job_id="moved", number=1, generation=1)
        preview = worker_pb2.PreviewAttemptRequest(attempt=old)

        async def refuses() -> bool:
            try:
                await worker.stub.PreviewAttempt(preview, timeout=60)
            except grpc.aio.AioRpcError as error:
                return isinstance(from_rpc_error(error), errors.StaleScheduler)
            return False

        await eventually(refuses)
        stale = worker_pb2.RunAttemptRequest(attempt=old, spec=job.spec)
        for call in (
            worker.stub.RunAttempt(stale, timeout=60),
            worker.stub.CancelAttempt(worker_pb2.CancelAttemptRequest(attempt=old), timeout=60),
        ):
            error = await refusal(lambda call=call: call, errors.StaleScheduler)  # type: ignore[misc]
            assert error.message == "the gateway with generation 1 is not the scheduler; the worker follows 2"
        assert list(worker.worker.attempts) == [attempt]
        assert [event.WhichOneof("event") for event in await worker.events(job)][-1] == "completed"
    assert "share a worker" not in caplog.text, "these gateways name a scheduler, so they share their jobs"
