"""The SDK, the command and the HTTP API with several gateways: calls go round, and go on when a gateway dies."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bottega.client.addons.addon import Level
from bottega.client.checkup.gateway import check_gateway
from bottega.client.cli.fleet import fleet_table
from bottega.client.sdk.clients import AsyncClient, Client
from bottega.client.transport.credentials import Tls
from bottega.client.types.fleet import merge_fleets
from bottega.client.types.jobs import Completed, Interrupted, Progress
from bottega.config import parse
from bottega.errors import ConfigError, InvalidRequest
from bottega.http.config import HttpConfig
from bottega.rpc import channel
from bottega.rpc.server_config import MemberConfig
from bottega.v1.fleet_pb2 import ListMembersRequest, ListMembersResponse, Member, Registration, SchedulerLease
from tests.fakes.scripted_gateway import ScriptedGateway, completed, progress, serving
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.certificates import Authority
from tests.support.cut_cable import laid
from tests.support.name_server import name_server
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import running_http
from tests.support.terminal import run
from tests.support.waiting import eventually


@contextlib.asynccontextmanager
async def gateway_with(workers: int, **config: Any) -> AsyncIterator[Running]:
    """A gateway that is told from another one by the number of its workers."""
    async with running_gateway(**config) as running:
        for number in range(workers):
            await running.worker(f"w{number}")
        yield running


async def answering(client: AsyncClient, *, calls: int = 8) -> set[int]:
    """Numbers of workers at the gateways that answer a few calls."""
    return {(await client.models())[0].workers for _ in range(calls)}


async def test_calls_go_round_the_gateways_that_serve() -> None:
    async with (
        gateway_with(1) as first,
        gateway_with(2) as second,
        AsyncClient([first.address, second.address]) as client,
    ):
        assert client.address == f"{first.address},{second.address}"
        await eventually(lambda: both(client))
        await second.gateway.server.set_serving(False)
        await eventually(lambda: only(client, 1))
        await second.gateway.server.set_serving(True)
        await eventually(lambda: both(client))
        await first.gateway.server.stop()
        assert await answering(client) == {2}


async def test_a_gateway_that_falls_silent_is_left_and_its_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [(name, 300 if "timeout" in name else value) for name, value in channel._BALANCING_OPTIONS]
    monkeypatch.setattr(channel, "_BALANCING_OPTIONS", options)
    async with (
        gateway_with(1) as first,
        gateway_with(2) as second,
        laid(second.address) as cable,
        AsyncClient([first.address, cable.address]) as client,
    ):
        await eventually(lambda: both(client))
        cable.go_dead()
        assert await answering(client) == {1}


async def both(client: AsyncClient) -> bool:
    return await answering(client) == {1, 2}


async def only(client: AsyncClient, workers: int) -> bool:
    return await answering(client) == {workers}


async def test_a_drawing_goes_on_at_another_gateway_when_its_own_dies() -> None:
    async with running_gateway() as first, running_gateway() as second:
        workers = {house.address: await house.worker("w", hold_at=3) for house in (first, second)}
        async with AsyncClient(f"{first.address},{second.address}") as client:
            stream = client.stream("a star")
            assert any([isinstance(event, Progress) async for event in until_progress(stream)])
            died, other = (first, second) if workers[first.address].requests else (second, first)
            workers[other.address].script.release.set()
            await died.gateway.server.stop()
            events = [event async for event in stream]
        assert any(isinstance(event, Interrupted) for event in events)
        assert isinstance(events[-1], Completed)
        (lost,), (drawn,) = workers[died.address].requests, workers[other.address].requests
        assert lost.request_id == drawn.request_id


async def until_progress(stream: AsyncIterator[object]) -> AsyncIterator[object]:
    async for event in stream:
        yield event
        if isinstance(event, Progress) and event.steps_done:
            return


def test_a_watched_job_is_watched_at_another_gateway() -> None:
    gateways = [ScriptedGateway(scripts=[[progress(1), threading.Event()], [completed()]]) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        servers = [contextlib.ExitStack() for _ in gateways]
        addresses = [server.enter_context(serving(gateway)) for server, gateway in zip(servers, gateways, strict=True)]
        client = stack.enter_context(Client(addresses))
        events = client.job("job-1").stream()
        assert isinstance(next(events), Progress)
        index = next(index for index, gateway in enumerate(gateways) if len(gateway.scripts) == 1)
        gateways[1 - index].scripts.pop(0)
        servers[index].close()
        stack.callback(servers[1 - index].close)
        assert isinstance(next(events), Interrupted)
        assert isinstance(next(events), Completed)
        assert (next(events, None), gateways[1 - index].scripts) == (None, [])


async def test_a_name_in_dns_is_all_gateways_at_its_addresses() -> None:
    async with name_server("127.0.0.1", "127.0.0.2") as (names, scheme), gateway_with(1) as first:
        port = first.address.rpartition(":")[2]
        async with (
            gateway_with(2, listen=f"127.0.0.2:{port}") as second,
            AsyncClient(f"{scheme}gateways.test:{port}") as client,
        ):
            await eventually(lambda: both(client))
            names.addresses = ["127.0.0.1", "127.0.0.3"]
            async with gateway_with(3, listen=f"127.0.0.3:{port}"):
                await second.gateway.server.stop()
                await eventually(lambda: has_found(client, 3))
                assert await answering(client) == {1, 3}


async def has_found(client: AsyncClient, workers: int) -> bool:
    return workers in await answering(client)


async def test_the_certificate_of_each_gateway_is_checked(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    shown = authority.issue("operator/anna")
    tls = Tls(authority=shown.authority, certificate=shown.certificate, key=shown.key)
    async with (
        running_gateway(tls=authority.issue("gateway/a")) as first,
        running_gateway(tls=authority.issue("gateway/b")) as second,
        running_gateway(tls=authority.issue("worker/w1")) as other_role,
        running_gateway(tls=stranger.issue("gateway/a")) as unknown,
        AsyncClient([house.address for house in (first, second, other_role, unknown)], tls=tls) as client,
    ):
        await first.worker("w1", tls=authority.issue("worker/w1"))
        for name in ("w1", "w2"):
            await second.worker(name, tls=authority.issue(f"worker/{name}"))
        await eventually(lambda: both(client))
        assert await answering(client, calls=20) == {1, 2}, "the others have no workers"


async def test_the_http_api_serves_while_a_gateway_is_away() -> None:
    async with gateway_with(1) as first, gateway_with(1) as second:
        fleet = [first.fleet_address, second.fleet_address]
        config = parse(HttpConfig, {"gateway": [first.address, second.address], "fleet": fleet}, source="test")
        async with running_http(config.gateway, fleet=config.fleet, name="door") as door:
            for house in (first, second):
                await eventually(lambda house=house: knows(house, "door"))  # type: ignore[misc]
            await first.gateway.server.stop()
            for _ in range(4):
                drawn = await door.openai.images.generate(prompt="a star", model="miniature", size="64x64")
                assert drawn.data
            assert (await door.http.get("/readyz")).status_code == 200
            assert (await door.http.get("/v1/fleet")).status_code == 200


async def test_the_fleet_is_shown_with_all_gateways_and_those_that_are_silent() -> None:
    async with running_gateway(name="east") as east, running_gateway(name="west") as west:
        houses, nobody = (east, west), "127.0.0.1:1"
        fleet = ",".join([*(house.fleet_address for house in houses), nobody])
        worker = await ScriptedWorker("w1", ",".join(house.fleet_address for house in houses)).start()
        east.workers.append(worker)
        await eventually(lambda: knows(east, "w1"))
        await eventually(lambda: knows(west, "w1"))
        addresses = ",".join(house.address for house in houses)
        shown = await asyncio.to_thread(run, "fleet", "--once", address=addresses, fleet=fleet)
        assert [line.split()[0] for line in shown.stdout.splitlines()[3:6]] == ["east", "west", "w1"], shown.output
        assert f"no gateway answers at {nobody}" in shown.stdout
        found = await asyncio.to_thread(lambda: list(check_gateway(f"{addresses},{nobody}", fleet)))
        assert [(check.level, check.what) for check in found[:4]] == [
            (Level.OK, f"the gateway at {east.address} serves"),
            (Level.OK, f"the gateway at {west.address} serves"),
            (Level.FAIL, f"no gateway answers at {nobody}"),
            (Level.FAIL, f"the gateway does not list its fleet at {nobody}"),
        ]
        assert (Level.OK, "1 worker joined, for miniature") in [(check.level, check.what) for check in found]


async def knows(house: Running, name: str) -> bool:
    answer = await house.fleet.ListMembers(ListMembersRequest(), timeout=5)
    return any(member.registration.name == name and member.HasField("load") for member in answer.members)


def test_the_scheduler_speaks_for_the_fleet() -> None:
    def listed(name: str, *others: str, generation: int, scheduler: str, queued: int) -> ListMembersResponse:
        members = [Member(registration=Registration(kind="gateway", name=name))]
        members += [Member(registration=Registration(kind="worker", name=other)) for other in others]
        lease = SchedulerLease(generation=generation, name=scheduler)
        return ListMembersResponse(members=members, queued=queued, scheduler=lease)

    fleet = merge_fleets(
        {
            "a:1": listed("a", "w1", generation=4, scheduler="a", queued=9),  # it has lost its lease
            "b:1": listed("b", "w1", "w2", generation=5, scheduler="b", queued=3),
            "c:1": None,
        }
    )
    assert (fleet.scheduler, fleet.queued, fleet.silent) == ("b", 3, ("c:1",))
    assert [member.name for member in fleet.members] == ["b", "a", "w1", "w2"]
    assert "b schedules" in str(fleet_table(fleet).table.caption)


@pytest.mark.usefixtures("own_folder")
def test_the_command_goes_on_with_the_gateway_that_is_there(
    gateway: ScriptedGateway, address: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.scripts = [[completed()]]
    result = run("generate", "a star", "-o", "star.png", address=f"127.0.0.1:1,{address}")
    assert (result.exit_code, (own_folder / "star.png").exists()) == (0, True), result.output
    monkeypatch.setattr("bottega.client.cli.options._REACH_S", 0.3)
    nobody = run("models", address="127.0.0.1:1,127.0.0.2:1")
    assert (nobody.exit_code, "no gateway answers at 127.0.0.1:1,127.0.0.2:1" in nobody.stderr) == (1, True)
    wrong = run("models", address="127.0.0.1:1,127.0.0.1:1")
    assert (wrong.exit_code, "127.0.0.1:1 is in the list of addresses twice" in wrong.stderr) == (2, True), wrong.stderr


async def test_a_wrong_list_of_gateways_is_refused_with_the_reason() -> None:
    cases: tuple[tuple[Any, str], ...] = (
        ([], "the list of addresses is empty"),
        ("127.0.0.1:1,", "'' is not an address"),
        (["127.0.0.1:8470", "localhost:8470"], "localhost:8470 is in the list of addresses twice"),
        ("10.0.0.1:0,10.0.0.2:1", "'10.0.0.1:0' has port 0"),
        ("ipv4:10.0.0.1:1,dns:///gateways:1", "'dns:///gateways:1' has a scheme"),
        (["10.0.0.1:1", "[::1]:1"], "mixes addresses of IPv4 and IPv6"),
        (["a.test:1", "b.test:1"], "a.test:1, b.test:1: a list has IP addresses only"),
    )
    for wrong, reason in cases:
        for field in ("address", "fleet_address"):
            with pytest.raises(InvalidRequest, match=f"{field}: .*{re.escape(reason)}"):
                AsyncClient(**{field: wrong})
        for key in ("gateway", "fleet"):
            with pytest.raises(ConfigError, match=f"  {key}: .*{re.escape(reason)}"):
                parse(HttpConfig, {key: wrong}, source="http.yaml")


def test_a_member_may_list_names_and_keeps_a_single_address() -> None:
    listed = parse(MemberConfig, {"gateway": ["a.test:8472", "b.test:8472"]}, source="loras.yaml")
    assert listed.gateway == "a.test:8472,b.test:8472"
    assert parse(MemberConfig, {"gateway": "a.test:8472"}, source="loras.yaml").gateway == "a.test:8472"
    assert parse(MemberConfig, {"gateway": ""}, source="loras.yaml").gateway == ""
    for wrong in ([], ["a.test:8472", 7], "a.test", None):
        with pytest.raises(ConfigError, match="gateway: "):
            parse(MemberConfig, {"gateway": wrong}, source="loras.yaml")
