"""Metrics of a real server, asked by those who never finish, who do not read, and by one who scrapes."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections.abc import AsyncIterator

import psutil
import pytest

from bottega.rpc.operation import metrics
from bottega.rpc.server import Server
from tests.fakes.scripted_images import scripted_images
from tests.support.crowds import alive, connections
from tests.support.waiting import eventually

HALF = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
CROWD = 200
SCRAPES = 3


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with scripted_images() as (server, _, _):
        yield server


async def scraped(server: Server, *, timeout_s: float = 5.0) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=timeout_s) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


def _threads() -> set[int | None]:
    """Without those that stores and links of other tests' suites begin in the background."""
    own = ("asyncio", "metrics", "Thread")
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith(own)}


async def test_half_requests_hold_no_threads_and_a_scrape_is_answered_beside_them(server: Server) -> None:
    assert "bottega_rpc_in_flight" in await scraped(server)
    threads, files = _threads(), psutil.Process().num_fds()
    with connections(server.metrics_address, CROWD, says=HALF) as crowd:
        for _ in range(SCRAPES):
            assert "bottega_rpc_in_flight" in await scraped(server)
        assert alive(crowd) <= metrics.MAX_CONNECTIONS
        assert len(_threads() - threads) <= 1 + SCRAPES  # each of this test's own scrapes may begin a thread
        assert psutil.Process().num_fds() <= files + CROWD + 2 * metrics.MAX_CONNECTIONS
    assert "bottega_rpc_in_flight" in await scraped(server)


async def test_who_sends_byte_by_byte_or_does_not_read_is_not_waited_for_without_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_S", 0.5)
    with connections(server.metrics_address, 1, says=HALF) as crowd:
        began = time.monotonic()
        while alive(crowd) and time.monotonic() - began < 10:
            crowd[0].send(b"X")
            await asyncio.sleep(0.1)
        assert not alive(crowd)
    files = psutil.Process().num_fds()
    with connections(server.metrics_address, 20, says=HALF + b"\r\n"):
        await asyncio.sleep(1.5)  # each is accepted by then, and most of them are given up
        await eventually(
            lambda: psutil.Process().num_fds() <= files + 20, "the last of them to be given up", within_s=10
        )
    assert await scraped(server)


@pytest.mark.parametrize("head", [b"\0\xff\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000, b"GET / HTTP/9.9\r\n\r\n"])
async def test_what_is_no_request_is_sent_away(server: Server, head: bytes) -> None:
    with connections(server.metrics_address, 1, says=head) as crowd:
        crowd[0].settimeout(5)
        await asyncio.to_thread(_read_out, crowd[0])
    assert "bottega_rpc_in_flight" in await scraped(server)


def _read_out(connection: object) -> None:
    try:
        while connection.recv(4096):  # type: ignore[attr-defined]
            pass
    except ConnectionError:
        return


async def test_a_server_that_stops_ends_those_who_have_not_asked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_S", 600.0)
    async with scripted_images() as (server, _, _):
        with connections(server.metrics_address, 10, says=HALF) as crowd:
            await scraped(server)
            await asyncio.wait_for(server.stop(), 60)
            await eventually(lambda: not alive(crowd))
