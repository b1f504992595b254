"""The HTTP server: hosts and origins, limits, slow clients, health, metrics, TLS, tenants, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from bottega.client.suite.plan import free_ports
from bottega.errors import ConfigError, Unavailable
from bottega.http.config import HttpConfig
from bottega.http.server import ConnectionLimits, HttpServer, LimitedProtocol
from bottega.rpc.operation.metrics import MetricsEndpoint
from bottega.rpc.security.api_keys import new_key
from bottega.rpc.server_config import HttpsConfig, HttpServerConfig
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.certificates import Authority
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import Door, running_http
from tests.support.tenants import add_tenant
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_only_names_of_this_host_are_served(house: Running) -> None:
    async with running_http(house.address, hosts=["door.example"]) as door:
        for host in ("localhost:1", "127.0.0.1:8473", "[::1]:8473", "10.0.0.7", "door.example:443"):
            assert (await door.http.get("/healthz", headers={"host": host})).status_code == 200
        for host in ("evil.example", "evil.example:8473", "localhost.evil.example", "", "127.0.0.1.nip.io"):
            answer = await door.http.get("/v1/models", headers={"host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host"), host


async def test_pages_of_other_origins_are_refused_unless_they_are_allowed(house: Running) -> None:
    async with running_http(house.address) as door:
        assert (await door.http.get("/v1/models", headers={"origin": door.url})).status_code == 200
        for origin in ("https://evil.example", "null"):
            answer = await door.http.post("/v1/jobs", json={"prompt": "a"}, headers={"origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_origin")
            assert "access-control-allow-origin" not in answer.headers
    async with running_http(house.address, origins=["https://app.example"]) as door:
        answer = await door.http.get("/v1/models", headers={"origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert (await door.http.get("/v1/models", headers={"origin": "https://evil.example"})).status_code == 403


async def test_preflights_of_allowed_pages_need_no_key_and_pages_read_refusals(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    add_tenant(file, "ours")
    page = {"origin": "https://app.example"}
    server = {"listen": "0.0.0.0:0", "https": _https(tmp_path)}
    async with (
        running_gateway(tenants=str(file)) as house,
        running_http(house.address, server=server, origins=[page["origin"]]) as door,
        _caller(door) as client,
    ):
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-stainless-os"}
        preflight = await client.options("/v1/images/generations", headers={**page, **asked})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, page["origin"])
        assert preflight.headers["access-control-allow-headers"] == "x-stainless-os"
        refused = await client.get("/v1/models", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page["origin"])
        assert "retry-after" in refused.headers["access-control-expose-headers"]
        other = {**asked, "origin": "https://evil.example"}
        assert "access-control-allow-origin" not in (await client.options("/v1/models", headers=other)).headers


def _caller(door: Door, **options: Any) -> httpx.AsyncClient:
    """Return a client of a door whose certificate it does not check."""
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{_port(door)}", verify=_unchecked(), **options)


def _port(door: Door) -> int:
    return int(door.server.address.rpartition(":")[2])


def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def test_a_key_that_the_gateway_refuses_is_refused_before_the_body_comes(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    key = add_tenant(file, "ours")
    server = {"listen": "0.0.0.0:0", "https": _https(tmp_path), "body_wait_s": 0.2}
    async with running_gateway(tenants=str(file)) as house, running_http(house.address, server=server) as door:
        for shown, status in ((new_key()[0], b"401"), (key, b"408"), (key, b"408")):
            head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shown}\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(door), ssl=_unchecked())
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
            async with asyncio.timeout(10):
                assert status in await reader.readline()
            writer.close()


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(house: Running) -> None:
    async with running_http(house.address, server={"max_body_mib": 1}) as door:
        for body in (b"x" * (1 << 20) + b"x", _chunks()):
            answer = await door.http.post(
                "/v1/jobs",
                content=body,
                headers={"content-type": "application/json"},
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


async def _chunks() -> AsyncIterator[bytes]:
    for _ in range(40):
        yield b"x" * (64 << 10)


async def test_a_wrong_type_path_or_method_has_its_status_and_is_counted(house: Running) -> None:
    async with running_http(house.address) as door:
        text = {"content-type": "text/plain"}
        assert (await door.http.post("/v1/jobs", content=b"{}", headers=text)).status_code == 415
        assert (await door.http.get("/v1/unknown")).json()["error"]["code"] == "not_found"
        assert (await door.http.get("/v1/images/generations")).json()["error"]["code"] == "method_not_allowed"
        await door.http.get("/v1/jobs/unknown")
        metrics = await door.metrics()
        assert 'bottega_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="404"} 1.0' in metrics
        assert 'bottega_http_requests_total{method="GET",route="other",status="404"} 1.0' in metrics


async def test_requests_beyond_the_limit_are_told_to_retry(house: Running, worker: ScriptedWorker) -> None:
    worker.script.hold_at = 1
    async with running_http(house.address, server={"max_requests": 2, "peer_share": 1.0}) as door:
        calls = [asyncio.create_task(door.http.post("/v1/images/generations", json={"prompt": "a"})) for _ in range(2)]
        await eventually(lambda: _has(door, "bottega_http_in_flight 2.0"))
        answer = await door.http.get("/v1/models")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _has(door: Door, text: str) -> bool:
    return text in await door.metrics()


async def test_a_client_that_sends_no_head_is_cut(house: Running) -> None:
    async with running_http(house.address, server={"head_wait_s": 0.2}) as door:
        for count, sent in enumerate((b"", b"GET /v1/models HTTP/1.1\r\nHost:"), 1):
            reader, writer = await asyncio.open_connection(*door.server.address.split(":"))
            writer.write(sent)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            assert await _has(door, f'bottega_http_connections_cut_total{{limit="head"}} {count}.0')
            writer.close()


async def test_a_client_that_does_not_read_its_answer_is_cut(house: Running, worker: ScriptedWorker) -> None:
    worker.script.picture = lambda _: b"x" * (8 << 20)
    async with running_http(house.address, server={"answer_wait_s": 0.3}) as door:
        made = await door.http.post("/v1/jobs", json={"prompt": "a"})
        await house.ended(made.json()["id"])
        with socket.socket() as quiet:
            quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            quiet.setblocking(False)
            host, port = door.server.address.split(":")
            await asyncio.get_running_loop().sock_connect(quiet, (host, int(port)))
            path = f"/v1/jobs/{made.json()['id']}/images/0"
            quiet.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await eventually(lambda: _has(door, 'bottega_http_connections_cut_total{limit="answer"} 1.0'))


async def test_connections_beyond_a_hosts_share_are_closed(house: Running) -> None:
    async with running_http(house.address, server={"max_connections": 4}) as door:
        address = door.server.address.split(":")
        first = [await asyncio.open_connection(*address) for _ in range(2)]
        reader, writer = await asyncio.open_connection(*address)
        async with asyncio.timeout(10):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        for _, other in (*first, (reader, writer)):
            other.close()


async def test_connections_in_their_handshake_count(house: Running, tmp_path: Path) -> None:
    limits = {"max_connections": 4, "peer_share": 1.0, "https": _https(tmp_path)}
    async with running_http(house.address, server=limits) as door:
        address = door.server.address.split(":")
        silent = [await asyncio.open_connection(*address) for _ in range(6)]
        await eventually(lambda: _has(door, 'bottega_http_connections_cut_total{limit="max_connections"} 2.0'))
        for _, writer in silent[:2]:
            writer.close()
        await eventually(lambda: _has(door, "bottega_http_connections 2.0"))
        async with _caller(door) as client:
            assert (await client.get("/healthz")).status_code == 200
        await door.server.stop()
        async with asyncio.timeout(5):
            assert [await _is_ended(reader) for reader, _ in silent] == [True] * 6
        for _, writer in silent:
            writer.close()


async def _is_ended(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await reader.read(1) == b""
    return True


async def test_an_idle_client_that_does_not_read_the_rest_is_cut() -> None:
    limits = ConnectionLimits(HttpServerConfig(answer_wait_s=0.05), MetricsEndpoint("127.0.0.1:0"))
    connection = LimitedProtocol(uvicorn.Config(lambda: None), ServerState(), limits, None)
    transport = _FullTransport()
    connection.connection_made(transport)
    connection.timeout_keep_alive_handler()
    await asyncio.wait_for(transport.aborted.wait(), 10)
    connection.connection_lost(None)


class _FullTransport(asyncio.Transport):
    """A transport whose client reads nothing, so that closing it does not end."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()
        self.close_called = False

    def close(self) -> None:
        self.close_called = True

    def is_closing(self) -> bool:
        return self.close_called

    def abort(self) -> None:
        self.aborted.set()


async def test_health_and_readiness() -> None:
    async with running_gateway() as house, running_http(house.address) as door:
        assert (await door.http.get("/healthz")).text == "ok\n"
        assert (await door.http.get("/readyz")).status_code == 200
        await house.gateway.server.set_serving(False)
        assert (await door.http.get("/readyz")).status_code == 503
        assert (await door.http.get("/healthz")).status_code == 200
    async with running_http("127.0.0.1:1", gateway_wait_s=0.1) as door:
        assert (await door.http.get("/readyz")).status_code == 503
        answer = await door.http.get("/v1/models")
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
        assert "127.0.0.1" not in answer.text, "the gateway's address is not for strangers"


async def test_tenants_see_their_own_jobs_and_urls_of_pictures_need_no_key(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    ours, theirs = ({"authorization": f"Bearer {add_tenant(file, name)}"} for name in ("ours", "theirs"))
    server = {"listen": "0.0.0.0:0", "https": _https(tmp_path)}
    async with (
        running_gateway(tenants=str(file)) as house,
        running_http(house.address, server=server) as door,
        _caller(door) as client,
    ):
        await house.worker()
        assert (await client.get("/healthz")).status_code == 200
        for key in ("none", "btg_0123456789abcdef_" + "0" * 64):
            shown = {"authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=shown)).status_code == 401
        job_id = (await client.post("/v1/jobs", json={"prompt": "a"}, headers=ours)).json()["id"]
        assert (await client.get(f"/v1/jobs/{job_id}", headers=ours)).status_code == 200
        assert (await client.get(f"/v1/jobs/{job_id}", headers=theirs)).status_code == 404
        body = {"prompt": "a star", "response_format": "url"}
        drawn = (await client.post("/v1/images/generations", json=body, headers=ours)).json()
        assert (await client.get(drawn["data"][0]["url"])).content == b"picture 0"


async def test_a_port_that_the_network_reaches_needs_https_and_keys(house: Running, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        async with running_http(house.address, server={"listen": "0.0.0.0:0"}):
            pass
    https = _https(tmp_path)
    with pytest.raises(ConfigError, match="asks its callers for no API key"):
        async with running_http(house.address, server={"listen": "0.0.0.0:0", "https": https}):
            pass


def _https(folder: Path) -> HttpsConfig:
    files = Authority(folder).issue("http/door")
    return HttpsConfig(certificate=files.certificate, key=files.key)


async def test_a_gateway_that_asks_for_no_keys_and_came_later_is_not_reached(tmp_path: Path) -> None:
    server = {"listen": "0.0.0.0:0", "https": _https(tmp_path)}
    (port,) = free_ports(1)
    async with running_http(f"127.0.0.1:{port}", server=server, gateway_wait_s=0.1) as door:
        shown = {"authorization": f"Bearer {new_key()[0]}"}
        async with _caller(door, headers=shown) as client:
            assert (await client.get("/v1/models")).json()["error"]["code"] == "unavailable"
            async with running_gateway(listen=f"127.0.0.1:{port}") as house:
                await house.until_serving()

                async def is_closed() -> bool:
                    answer = await client.get("/v1/models")
                    assert answer.status_code == 503
                    return bool(answer.json()["error"]["code"] == "open_gateway")

                await eventually(is_closed)


async def test_bodies_that_are_being_processed_have_a_bound_together(house: Running, worker: ScriptedWorker) -> None:
    worker.script.hold_at = 1
    limits = {"max_body_mib": 1, "max_bodies_mib": 1, "peer_share": 1.0}
    async with running_http(house.address, server=limits) as door:
        body = {"prompt": "a star", "user": "x" * 700_000}
        drawing = asyncio.create_task(door.http.post("/v1/images/generations", json=body))
        await worker.arrived.wait()
        refused = await door.http.post("/v1/images/generations", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        worker.script.release.set()
        assert (await drawing).status_code == 200
        assert (await door.http.post("/v1/images/generations", json=body)).status_code == 200


async def test_a_port_that_is_taken_is_named(door: Door) -> None:
    second = HttpServer(HttpConfig(server=HttpServerConfig(listen=door.server.address)))
    with pytest.raises(Unavailable, match=f"server.listen {door.server.address} cannot be used"):
        await second.start()
    await second.stop()
    await second.close()


async def test_a_drain_lets_pictures_finish_and_ends_streams_of_events(house: Running, worker: ScriptedWorker) -> None:
    worker.script.hold_at = 1
    async with running_http(house.address) as door:
        await _drain(door, worker)


async def _drain(door: Door, worker: ScriptedWorker) -> None:
    drawing = asyncio.create_task(door.http.post("/v1/images/generations", json={"prompt": "a"}))
    await worker.arrived.wait()
    watched = (await door.http.post("/v1/jobs", json={"prompt": "b"})).json()["id"]
    async with door.http.stream("GET", f"/v1/jobs/{watched}/events") as events, asyncio.timeout(20):
        lines = events.aiter_lines()
        assert (await anext(lines)).startswith("id: ")
        draining = asyncio.create_task(door.server.drain())
        async for line in lines:
            assert not line.startswith("event: job.completed")
    assert not drawing.done()
    worker.script.release.set()
    assert (await drawing).status_code == 200
    await draining


async def test_requests_that_are_cancelled_at_the_end_get_503(
    house: Running, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.script.hold_at = 1
    async with running_http(house.address, server={"drain_grace_s": 0.1}) as door:
        drawing = asyncio.create_task(door.http.post("/v1/images/generations", json={"prompt": "a"}))
        await worker.arrived.wait()
        await door.server.drain()
        answer = await drawing
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "stopping"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_keys_that_strangers_invent_do_not_ban_the_door_from_the_gateway(tmp_path: Path) -> None:
    file, authority = tmp_path / "tenants.json", Authority(tmp_path / "certificates")
    add_tenant(file, "ours")
    door_files, gateway_files = authority.issue("http/door"), authority.issue("gateway/main")
    channels = authority.channels("operator/test")
    async with (
        running_gateway(tenants=str(file), tls=gateway_files, channels=channels) as house,
        running_http(house.address, server={"tls": door_files}) as door,
        _caller(door, headers={"authorization": f"Bearer {new_key()[0]}"}) as client,
    ):
        assert (await client.get("/v1/models")).status_code == 401
        ledger = house.gateway.server._connections._ledger
        assert ledger.knows("127.0.0.1")
        assert not ledger._refused
