"""A ControlNet server and what its engine tells it: when it says that it serves, and when it has drained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bottega import kinds
from bottega.controlnet.catalogue import SCHEMA, ControlNetCatalogue, ProfileStore
from bottega.controlnet.config import ControlNetConfig, ControlNetEngineConfig
from bottega.controlnet.engine_client import ControlNetEngineClient, ControlNetInspector
from bottega.controlnet.metrics import ControlNetMetrics
from bottega.controlnet.server import ControlNetServer
from bottega.errors import BottegaError, ControlNetUnusable, EngineStarting, InternalError, Unavailable
from bottega.gateway.fleet.validation import check_load
from bottega.miniature import WEIGHTS
from bottega.model_files.control_layout import read_base_layout
from bottega.model_files.digest import controlnet_digest
from bottega.process.engine_supervisor import EngineTimeouts
from bottega.storage import SqliteDatabase
from bottega.v1.controlnet_engine_pb2 import ControlNetEngineBeat, ControlNetEngineEvent, ControlNetEngineReady
from bottega.v1.fleet_pb2 import Activity
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, HOSTED_STATE_ON_DISK, Hosted, HostedState
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from tests.fakes.listening import FakeListening
from tests.support.waiting import eventually


class Engine(ControlNetEngineClient):
    """Hosts while `lives`; there is no process. asked: for what was to be hosted."""

    def __init__(self) -> None:
        super().__init__(ControlNetEngineConfig(), timeouts=EngineTimeouts(start_stall_s=1, hang_s=1, stall_s=1))
        self.lives = asyncio.Event()
        self.asked: list[str] = []
        self.drains = 0
        self.watched = 0
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.age = 0.0
        self.refused: dict[str, str] = {}

    @property
    def age_s(self) -> float:
        return self.age

    async def host(self, name: str, folder: Path, root: Path | None = None) -> Hosted:
        self.asked.append(name)
        while not self.lives.is_set():
            if self._gone.done():
                raise Unavailable("there is no engine")
            await asyncio.sleep(0.001)
        if name in self.refused:
            raise ControlNetUnusable(self.refused[name])
        return Hosted(kind=kinds.CONTROLNET, name=name)

    async def watch(self, listener: object) -> None:
        self.watched += 1
        await asyncio.Event().wait()

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        return LinkOffer(link_id="one")

    async def stop(self) -> int | None:
        return None

    def fail_calls(self, error: BottegaError) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    def drain(self) -> None:
        self.drains += 1

    def prefetch(self, names: Sequence[str], *, unneeded: Sequence[str] = (), retry: bool = False) -> None:
        """Ignore it: tests report what is loaded."""

    def renew(self) -> None:
        """Another process, in place of the one that is gone."""
        self._gone = asyncio.get_running_loop().create_future()


async def test_an_engine_that_dies_while_it_is_told_what_to_host_is_not_said_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []

    async def set_serving(serving: bool) -> None:
        said.append(serving)

    engine = Engine()
    server = _server(engine, tmp_path, set_serving)
    await _serve(server, engine)
    assert engine.asked == ["edges", "depth"]
    engine.lives.clear()
    await server.on_engine_lost("killed")
    for _ in range(2):
        engine.renew()
        await server.on_engine_ready(ControlNetEngineReady())
        await asyncio.sleep(0.05)
        await server.on_engine_lost("killed again, while it was told")
        await asyncio.sleep(0.05)
    assert said == [False, False, False]
    engine.renew()
    await _serve(server, engine)
    await eventually(lambda: said[-1])


async def test_it_has_drained_when_a_beat_from_after_that_has_no_sessions(tmp_path: Path) -> None:
    engine = Engine()
    server = _server(engine, tmp_path)
    await _serve(server, engine)
    await server.on_engine_lost("killed before")  # which drains nothing of the next one
    engine.renew()
    await _serve(server, engine)
    await server.on_engine_event(_beat(sessions=0))
    draining = asyncio.create_task(server.drain())
    await asyncio.sleep(0.01)
    for beat in (_beat(sessions=0), _beat(sessions=1), _beat(sessions=1, draining=True)):
        await server.on_engine_event(beat)
        await asyncio.sleep(0.01)
        assert not draining.done()
    assert engine.drains == 1
    await server.on_engine_event(_beat(sessions=0, draining=True))
    async with asyncio.timeout(5):
        await draining


async def test_an_engine_that_dies_or_hosts_nothing_has_drained(tmp_path: Path) -> None:
    engine = Engine()
    server = _server(engine, tmp_path)
    await server.drain()  # nothing is hosted yet
    await _serve(server, engine)
    draining = asyncio.create_task(server.drain())
    await asyncio.sleep(0.01)
    assert not draining.done()
    await server.on_engine_lost("killed")
    async with asyncio.timeout(5):
        await draining


async def test_the_fleet_is_told_of_the_engines_rows_forwards_and_hits(tmp_path: Path) -> None:
    server = _server(Engine(), tmp_path)
    beat = ControlNetEngineBeat(turns=5, rows=12, hits=3, misses=1)
    await server.on_engine_event(ControlNetEngineEvent(beat=beat))
    assert server.load().activity == Activity(turns=5, steps=12, hits=3, lookups=4)


async def test_the_fleet_is_told_how_long_it_took_until_all_was_hosted(tmp_path: Path) -> None:
    engine = Engine()
    server = _server(engine, tmp_path)
    engine.age = 1.0
    await server.on_engine_ready(ControlNetEngineReady())
    await asyncio.sleep(0.01)
    assert server.load().start_s == 0, "nothing is hosted yet"
    engine.age = 40.0
    engine.lives.set()
    await eventually(lambda: server.load().start_s == 40)
    engine.age = 1000.0
    assert server.load().start_s == 40


async def test_the_fleet_is_told_which_controlnets_are_left_out_and_why(tmp_path: Path) -> None:
    engine = Engine()
    engine.refused["depth"] = "ControlNet depth cannot be used: " + "x" * 600
    server = _server(engine, tmp_path, left_out={"pose.safetensors": "is a single file"})
    await _serve(server, engine)
    assert [net.name for net in server.load().hosted] == ["edges"]
    assert [(item.kind, item.name, item.reason[:33]) for item in server.load().left_out] == [
        ("controlnet", "depth", "ControlNet depth cannot be used: "),
        ("controlnet", "pose.safetensors", "is a single file"),
    ]
    assert list(check_load(server.load())) == []
    await server.on_engine_lost("killed")
    engine.renew()
    engine.refused.clear()  # somebody has mended it meanwhile
    await _serve(server, engine)
    assert [item.name for item in server.load().left_out] == ["pose.safetensors"]


async def test_a_replica_that_somebody_else_asks_for_is_one_no_more(tmp_path: Path) -> None:
    engine = Engine()
    server = _server(engine, tmp_path)
    await _serve(server, engine)

    async def report(state: HostedState.ValueType, **facts: Any) -> None:
        net = Hosted(kind=kinds.CONTROLNET, name="edges", state=state, **facts)
        await server.on_engine_event(ControlNetEngineEvent(beat=ControlNetEngineBeat(controlnets=[net])))

    def copied() -> bool:
        return server.hosted[0].copied

    await report(HOSTED_STATE_ON_DISK)
    server.prefetch(["edges"], copies=True)
    await report(HOSTED_STATE_LOADED)
    assert copied()
    server.prefetch(["edges"], copies=True)
    assert copied()
    server.prefetch(["edges"])
    assert not copied()
    await report(HOSTED_STATE_ON_DISK)
    server.prefetch(["edges"], copies=True)
    await report(HOSTED_STATE_ON_DISK, load_error="damaged", failed_loads=1)
    await report(HOSTED_STATE_LOADED)  # for a job
    assert not copied()


async def test_an_engine_on_demand_is_started_by_the_first_link_and_what_it_hosts_is_told(
    tmp_path: Path,
) -> None:
    engine = Engine()
    folder = WEIGHTS / "controlnets/edges"
    nets = {"edges": str(folder), "none": str(tmp_path)}
    server = _server(engine, tmp_path, controlnets=nets, engine_on_demand=True)
    await server.start()
    (net,) = server.hosted
    assert (net.name, net.digest, net.state) == ("edges", controlnet_digest(folder), HOSTED_STATE_ON_DISK)
    assert net.base == read_base_layout(WEIGHTS).base
    assert net.size_bytes == pytest.approx((folder / "diffusion_pytorch_model.safetensors").stat().st_size, rel=0.02)
    assert [item.name for item in server.load().left_out] == ["none"]
    assert engine.watched == 0
    for _ in range(2):
        with pytest.raises(EngineStarting) as starting:
            await server.open_link(OpenLinkRequest(), caller="")
    assert starting.value.retry_after_s
    await eventually(lambda: engine.watched == 1)
    await server.on_engine_event(_beat(sessions=0))  # before it hosts all
    assert server.hosted[0].digest == net.digest
    await _serve(server, engine)
    assert (await server.open_link(OpenLinkRequest(), caller="")).link_id == "one"
    assert engine.watched == 1
    await server.stop()


async def test_links_wait_for_the_next_engine_where_the_first_one_on_demand_was_lost(tmp_path: Path) -> None:
    engine = Engine()
    server = _server(engine, tmp_path, controlnets={}, engine_on_demand=True)
    await server.start()
    with pytest.raises(EngineStarting):
        await server.open_link(OpenLinkRequest(), caller="")
    await server.on_engine_lost("killed")
    with pytest.raises(EngineStarting):
        await server.open_link(OpenLinkRequest(), caller="")
    engine.renew()
    await _serve(server, engine)
    assert (await server.open_link(OpenLinkRequest(), caller="")).link_id == "one"
    await server.stop()


async def test_an_engine_on_demand_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    engine = Engine()
    server = _server(engine, tmp_path, controlnets={}, engine_on_demand=True)
    await server.start()
    assert server.prefetch(["edges"]) == []
    assert not server.failed.done()

    async def fail(listener: object) -> None:
        raise InternalError("it could not be started 3 times")

    engine.watch = fail  # type: ignore[method-assign]
    with pytest.raises(EngineStarting):
        await server.open_link(OpenLinkRequest(), caller="")
    async with asyncio.timeout(5):
        assert "3 times" in (await server.failed).message
    await server.stop()


def _beat(*, sessions: int, draining: bool = False) -> ControlNetEngineEvent:
    nets = [Hosted(kind=kinds.CONTROLNET, name="edges", sessions=sessions)]
    return ControlNetEngineEvent(beat=ControlNetEngineBeat(controlnets=nets, draining=draining))


async def _serve(server: ControlNetServer, engine: Engine) -> None:
    """The engine is ready, and has been told what to host when this ends."""
    engine.lives.set()
    await server.on_engine_ready(ControlNetEngineReady())
    names = server._catalogue.folders
    await eventually(lambda: server._first_hosting.done() and len(server.hosted) + len(server._refused) == len(names))


async def _nobody_asks(_: bool) -> None:
    """Whether it serves."""


def _server(
    engine: Engine,
    folder: Path,
    set_serving: Callable[[bool], Awaitable[None]] = _nobody_asks,
    **said: Any,
) -> ControlNetServer:
    config = ControlNetConfig(**{"gateway": "", "controlnets": {"edges": "a", "depth": "b"}, **said})
    database = SqliteDatabase(folder / "catalogue.db", SCHEMA)
    return ControlNetServer(
        config,
        catalogue=ControlNetCatalogue(database, root=None, fixed=config.controlnets),
        profiles=ProfileStore(database),
        engine=engine,
        inspector=ControlNetInspector(),
        metrics=ControlNetMetrics(CollectorRegistry()),
        server=FakeListening(tell_health=set_serving),
    )
