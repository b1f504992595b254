"""What does the HTTP API cost: in time over gRPC, and in memory for large pictures and quiet streams?

A gateway and an HTTP API as processes, and a scripted worker here that answers at once with tiny pictures, so that
nothing is measured but the way. Requests come at a steady rate over 64 connections, by turns over gRPC and HTTP. Then
clients do not read streams with pictures of 4 MiB, and many watch a job that does not go on.

A run takes 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil

from bottega.process import open_files
from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from load.bench.framework import PROMPT, Bench, Option, Sheet, percentile
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.services import FREE_PORTS, Service, Services, gateway_config

BENCH = Bench(
    __file__,
    __doc__,
    Option("--connections", 64, "at once", smallest=2),
    Option("--requests", 600, "in each round, for each side", smallest=4),
    Option("--rounds", 4, "of both sides", smallest=1),
    Option("--per-second", 30.0, "requests that begin"),
    Option("--large", 16, "streams with pictures of 4 MiB", smallest=2),
    Option("--quiet", 2000, "streams of a job's events", smallest=4),
)
PICTURE_BYTES = 4 << 20
_SETTLE_S = 1.0
_WAIT_S = 60.0
# A gateway behind one HTTP API, which is the only host that calls it.
_SERVER = {**FREE_PORTS, "peer_share": 1.0, "max_streams": 8192, "max_connections": 8192}
# Connections of the bench wait longer for their next request than the limits allow by default.
_HTTP = {**FREE_PORTS, "peer_share": 1.0, "head_wait_s": 120.0, "answer_wait_s": 120.0, "idle_s": 300.0}


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure the time over gRPC and HTTP, and the memory of the HTTP API."""
    open_files.raise_limit()
    with Services(folder) as services:
        gateway = services.start("gateway", gateway_config(server=_SERVER, max_queued=4096, max_jobs=1_000_000))
        # One for each question: what an earlier one has freed would hide what is taken.
        doors = [services.start("http", {"gateway": gateway.address, "fleet": "", "server": _HTTP}) for _ in range(3)]
        asyncio.run(_measure(options, gateway, doors, sheet))


async def _measure(options: argparse.Namespace, gateway: Service, doors: Sequence[Service], sheet: Sheet) -> None:
    worker = await ScriptedWorker("scripted", gateway.fleet).start()
    try:
        await _latency(options, gateway, doors[0], sheet)
        await _large(options, doors[1], worker, sheet)
        await _quiet(options, doors[2], worker, sheet)
    finally:
        await worker.die()


async def _latency(options: argparse.Namespace, gateway: Service, http: Service, sheet: Sheet) -> None:
    seeds = itertools.count(1)
    channels = [open_channel(gateway.address) for _ in range(options.connections)]
    stubs: list[image_pb2_grpc.ImageServiceAsyncStub] = [image_pb2_grpc.ImageServiceStub(each) for each in channels]
    clients = [await HttpClient.connect(http.address) for _ in range(options.connections)]

    async def over_grpc(connection: int) -> None:
        spec = GenerationSpec(prompt=PROMPT, seed=next(seeds), num_inference_steps=1)
        async for answer in stubs[connection].Generate(image_pb2.GenerateRequest(spec=spec), timeout=_WAIT_S):
            event = answer.event
        assert event.completed.images[0].data

    async def over_http(connection: int) -> None:
        body = {"prompt": PROMPT, "bottega": {"seed": next(seeds), "num_inference_steps": 1}}
        answer = await clients[connection].post("/v1/images/generations", body)
        assert b'"b64_json"' in answer

    sides = {"grpc": over_grpc, "http": over_http}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            seconds = await _paced(sides[name], options)
            found[name].extend(seconds if number else ())
    for client in clients:
        client.close()
    for channel in channels:
        await channel.close()
    for share, key, bar in ((0.5, "p50", "at most 5 ms"), (0.99, "p99", "at most 15 ms")):
        over = {name: percentile(seconds, share) * 1e3 for name, seconds in found.items()}
        sheet.figure(f"a request over gRPC, {key}", over["grpc"], "{:.1f} ms", key=f"grpc_{key}_ms")
        added = over["http"] - over["grpc"]
        sheet.figure(f"added by HTTP, {key}", added, "{:.1f} ms", key=f"added_{key}_ms", bar=bar)


async def _paced(ask: Callable[[int], Awaitable[None]], options: argparse.Namespace) -> list[float]:
    """Return the seconds of requests that begin at a steady rate, each on the connection that was free for longest."""
    free: asyncio.Queue[int] = asyncio.Queue()
    for connection in range(options.connections):
        free.put_nowait(connection)
    seconds: list[float] = []

    async def one(began: float) -> None:
        connection = await free.get()
        await ask(connection)
        free.put_nowait(connection)
        seconds.append(time.perf_counter() - began)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(options.requests):
            due = begin + number / options.per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(time.perf_counter()))
    return seconds


async def _large(options: argparse.Namespace, http: Service, worker: ScriptedWorker, sheet: Sheet) -> None:
    """Measure the memory of streams whose clients read nothing, when their pictures have come."""
    picture = os.urandom(PICTURE_BYTES)
    worker.script.picture = lambda _: picture
    process = psutil.Process(http.process.pid)
    small = await HttpClient.connect(http.address)
    await small.post("/v1/images/generations", {"prompt": PROMPT, "stream": True})  # what only the first one takes
    await asyncio.sleep(_SETTLE_S)
    before = process.memory_info().rss
    clients = [await HttpClient.connect(http.address, limit=4096) for _ in range(options.large)]
    for number, client in enumerate(clients):
        await client.send("POST", "/v1/images/generations", {"prompt": f"{PROMPT} {number}", "stream": True})
    most = 0
    finished_at = 0.0
    while not finished_at or time.monotonic() < finished_at + _SETTLE_S:
        await asyncio.sleep(0.01)
        most = max(most, process.memory_info().rss)
        if not finished_at and len(worker.finished) and all(client.has_body for client in clients):
            finished_at = time.monotonic()
    each = (most - before) / options.large / 2**20
    what, bar = "a stream with a picture of 4 MiB that is not read, at most", "at most 8 MiB"
    sheet.figure(what, each, "{:.1f} MiB", key="large_mib", bar=bar)
    for client in (small, *clients):
        client.close()


async def _quiet(options: argparse.Namespace, http: Service, worker: ScriptedWorker, sheet: Sheet) -> None:
    """Measure the memory of streams of a job that does not go on."""
    worker.script.hold_at = 1
    client = await HttpClient.connect(http.address)
    job = json.loads(await client.post("/v1/jobs", {"prompt": f"{PROMPT} in silence"}))
    await asyncio.sleep(_SETTLE_S)
    process = psutil.Process(http.process.pid)
    before = process.memory_info().rss
    watching = []
    for _ in range(options.quiet):
        watching.append(await HttpClient.connect(http.address))
        await watching[-1].send("GET", f"/v1/jobs/{job['id']}/events")
        await watching[-1].first_event()
    await asyncio.sleep(_SETTLE_S)
    grown = (process.memory_info().rss - before) / 2**20
    what, bar = f"{options.quiet} quiet streams of events", f"at most {200 * options.quiet / 2000:.0f} MiB"
    sheet.figure(what, grown, "{:.0f} MiB", key="quiet_mib", bar=bar)
    for watcher in (client, *watching):
        watcher.close()
    worker.script.release.set()


class HttpClient:
    """A connection that speaks just enough HTTP, so that the time of a client's library is not measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: str, *, limit: int = 1 << 16) -> HttpClient:
        """Connect. `limit` bounds what is read before anybody asks for it."""
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=limit))

    async def post(self, path: str, body: object) -> bytes:
        """Return the body of the answer."""
        await self.send("POST", path, body)
        return await self._answer()

    async def send(self, method: str, path: str, body: object = None) -> None:
        """Send a request without reading its answer."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await self._writer.drain()

    @property
    def has_body(self) -> bool:
        """Whether a part of an answer with a picture has come."""
        return len(self._reader._buffer) > 4096  # type: ignore[attr-defined]

    async def first_event(self) -> None:
        """Read the answer up to its first event."""
        await asyncio.wait_for(self._reader.readuntil(b"\n\n"), _WAIT_S)

    def close(self) -> None:
        """End the connection."""
        self._writer.close()

    async def _answer(self) -> bytes:
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), _WAIT_S)).lower()
        status = int(head.split()[1])
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        body = await self._reader.readexactly(int(length)) if length else await self._chunks()
        if status >= 300:
            raise RuntimeError(f"the HTTP API answered {status}: {body[:500]!r}")
        return body

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return b"".join(parts)


if __name__ == "__main__":
    sys.exit(BENCH.command())
