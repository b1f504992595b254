"""A ControlNet server and what its engine tells it: when it says that it serves, and when it has drained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bottega import kinds
from bottega.controlnet.catalogue import ControlNetCatalogue
from bottega.controlnet.catalogue_schema import SCHEMA
from bottega.controlnet.config import ControlNetConfig, ControlNetEngineConfig
from bottega.controlnet.engine_client import ControlNetEngineClient
from bottega.controlnet.inspector import ControlNetInspector
from bottega.controlnet.metrics import ControlNetMetrics
from bottega.controlnet.profiles import ProfileStore
from bottega.controlnet.server import ControlNetServer
from bottega.errors import BottegaError, ControlNetUnusable, Unavailable
from bottega.gateway.fleet.validation import check_load
from bottega.process import EngineTimeouts
from bottega.storage import SqliteDatabase
from bottega.v1.controlnet_engine_pb2 import ControlNetEngineBeat, ControlNetEngineEvent, ControlNetEngineReady
from bottega.v1.fleet_pb2 import Activity
from bottega.v1.hosted_pb2 import Hosted
from tests.fakes.listening import FakeListening


class Engine(ControlNetEngineClient):
    """Hosts while `lives`; there is no process. asked: for what was to be hosted."""

    def __init__(self) -> None:
        super().__init__(ControlNetEngineConfig(), timeouts=EngineTimeouts(start_stall_s=1, hang_s=1, stall_s=1))
        self.lives = asyncio.Event()
        self.asked: list[str] = []
        self.drains = 0
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
        await asyncio.Event().wait()

    def fail_calls(self, error: BottegaError) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    def drain(self) -> None:
        self.drains += 1

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
    assert said[-1]


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
    await asyncio.sleep(0.05)
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


def _beat(*, sessions: int, draining: bool = False) -> ControlNetEngineEvent:
    nets = [Hosted(kind=kinds.CONTROLNET, name="edges", sessions=sessions)]
    return ControlNetEngineEvent(beat=ControlNetEngineBeat(controlnets=nets, draining=draining))


async def _serve(server: ControlNetServer, engine: Engine) -> None:
    """The engine is ready, and has been told what to host when this ends."""
    engine.lives.set()
    await server.on_engine_ready(ControlNetEngineReady())
    await asyncio.sleep(0.05)


async def _nobody_asks(_: bool) -> None:
    """Whether it serves."""


def _server(
    engine: Engine,
    folder: Path,
    set_serving: Callable[[bool], Awaitable[None]] = _nobody_asks,
    left_out: dict[str, str] | None = None,
) -> ControlNetServer:
    config = ControlNetConfig(gateway="", controlnets={"edges": "a", "depth": "b"}, left_out=left_out or {})
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
