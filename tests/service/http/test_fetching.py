"""Input images by URL: fetched from allowed hosts alone, within a size and a time, and never from inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.requests import Request

from bottega.codec.structure import MAX_IMAGE_BYTES
from bottega.errors import InvalidRequest
from bottega.http.config import FetchConfig
from bottega.http.fetching import ImageFetcher
from bottega.http.input_images import RemoteImage
from bottega.http.reading import BodyReader
from bottega.rpc.server_config import HttpServerConfig
from tests.fakes.scripted_controlnet import hosted
from tests.fakes.scripted_worker import ScriptedWorker
from tests.service.http.test_edits import _png
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import Door, running_http
from tests.support.tenants import add_tenant
from tests.unit.base.test_outside_address import HOSTILE

pytestmark = pytest.mark.asyncio(loop_scope="module")

_LOOPBACK = FetchConfig(hosts=("127.0.0.1",), networks=("127.0.0.0/8",), ports=(), plain_http=True, timeout_s=20.0)


def _answer(body: bytes, *, length: int | None = None, head: str = "") -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n{head}\r\n".encode() + body


def _redirect(location: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


Write = Callable[[asyncio.StreamWriter], Any]


@asynccontextmanager
async def _images(pages: Mapping[str, bytes | Write]) -> AsyncIterator[tuple[str, list[str]]]:
    """Serves raw answers by path. Yields its URL and the paths that were asked for."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head.split()[1].decode())
            page = pages.get(asked[-1], b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            if isinstance(page, bytes):
                writer.write(page)
                await writer.drain()
            else:
                await page(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def _endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def _drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[Running]:
    """A gateway that inspects images."""
    async with running_gateway(codec_processes=1) as running:
        yield running


async def _fetch(url: str, config: FetchConfig = _LOOPBACK, **options: Any) -> bytes:
    fetcher = ImageFetcher(config, BodyReader(HttpServerConfig()), peer_share=1.0, **options)
    try:
        request = Request({"type": "http", "client": ("127.0.0.1", 1)})
        return (await fetcher.fetch(request, {"image": RemoteImage(url)}))["image"]
    finally:
        await fetcher.close()


async def test_images_by_url_reach_the_worker_in_json_and_in_forms(house: Running, worker: ScriptedWorker) -> None:
    await house.controlnets("s1", hosted("edges"))
    pages = {"/a.png": _redirect("/b.png"), "/b.png": _answer(_png()), "/mask.png": _answer(_png("RGBA"))}
    async with running_http(house.address, fetch=_LOOPBACK) as door, _images(pages) as (url, asked):
        nets = [{"name": "edges", "image": f"{url}/b.png"}]
        body = {"prompt": "a star", "image": f"{url}/a.png", "mask": f"{url}/mask.png"}
        job = await door.http.post("/v1/jobs", json={**body, "bottega": {"controlnets": nets}})
        assert job.status_code == 202, job.text
        await house.ended(job.json()["id"])
        spec = worker.requests[0].spec
        assert (spec.image, spec.mask_image, spec.controlnets[0].image) == (_png(), _png("RGBA"), _png())
        form = {"prompt": "a star", "image": f"{url}/a.png", "mask": f"{url}/mask.png"}
        edit = await door.http.post("/v1/images/edits", data=form, files={"mask": ("m.png", _png("RGBA"))})
        assert (edit.status_code, edit.json()["error"]["param"]) == (400, "mask"), "it is given twice"
        del form["mask"]
        edit = await door.http.post("/v1/images/edits", data=form, files={"mask": ("m.png", _png("RGBA"))})
        assert edit.status_code == 200, edit.text
        assert worker.requests[1].spec.image == _png()
        hostile = await door.http.post("/v1/jobs", json={"prompt": "a", "image": f"{url}/none"})
        assert hostile.status_code == 400
        (violation,) = hostile.json()["error"]["bottega"]["violations"]
        assert violation == {"field": "image", "description": "cannot be fetched: its server answers with status 404"}
    assert asked.count("/a.png") == 2


async def test_without_allowed_hosts_nothing_is_fetched(door: Door, worker: ScriptedWorker) -> None:
    async with _images({}) as (url, asked):
        answer = await door.http.post("/v1/jobs", json={"prompt": "a", "image": f"{url}/a.png"})
        assert answer.status_code == 400
        assert "this service fetches none" in answer.json()["error"]["message"]
    assert not asked


async def test_nothing_is_fetched_for_a_caller_without_a_key(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    key = add_tenant(file, "ours")
    pages = {"/": _answer(_png())}
    async with running_gateway(tenants=str(file), codec_processes=1) as house, _images(pages) as (url, asked):
        await house.worker()
        async with running_http(house.address, fetch=_LOOPBACK) as door:
            for header, status in (("Bearer none", 401), (f"Bearer {key}", 202)):
                body = {"prompt": "a", "image": f"{url}/"}
                answer = await door.http.post("/v1/jobs", json=body, headers={"authorization": header})
                assert answer.status_code == status, answer.text
                assert len(asked) == (status == 202)


async def test_hostile_urls_are_refused_by_field_without_a_connection(house: Running) -> None:
    urls = [url for url in HOSTILE if url.lower().startswith("http")][::10]  # the others: tests/unit/base
    assert len(urls) >= 4
    async with running_http(house.address, fetch=FetchConfig(hosts=("*",))) as door:
        for url in urls:
            answer = await door.http.post("/v1/jobs", json={"prompt": "a", "image": url})
            (violation,) = answer.json()["error"]["bottega"]["violations"]
            assert (answer.status_code, violation["field"]) == (400, "image"), url
            assert "127.0.0.1" not in violation["description"] or "127.0.0.1" in url


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (_redirect("http://169.254.169.254/latest"), "must not be called"),
        (_redirect("http://localhost/"), "must not be called"),
        (_redirect("https://"), "must not be called|cannot be reached"),
        (_redirect("file:///etc/passwd"), "must not be called"),
        (_redirect("/loop"), "redirects more than 3 times"),
        (_answer(b"x" * (MAX_IMAGE_BYTES + 1)), "more than 8388608 bytes"),
        (_endless, "more than 8388608 bytes"),
        (_answer(b"x", length=100), "ends the connection"),
        (_answer(b"x", length=1 << 40), "ends the connection"),
        (_answer(b"\x1f\x8b", head="content-encoding: gzip\r\n"), "compresses it"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "ends the connection"),
        (b"", "ends the connection"),
    ],
)
async def test_what_a_hostile_server_sends_is_refused_within_bounds(page: bytes | Write, text: str) -> None:
    async with _images({"/loop": page}) as (url, asked):
        with pytest.raises(InvalidRequest, match=text):
            await _fetch(f"{url}/loop")
    assert len(asked) <= 4


async def test_images_count_as_the_body_of_their_request(house: Running) -> None:
    few = FetchConfig(
        hosts=("127.0.0.1",), networks=("127.0.0.0/8",), ports=(), plain_http=True, timeout_s=60.0, max_at_once=2
    )
    server = {"max_bodies_mib": 1, "peer_share": 1.0}
    page = _answer(bytes(1 << 20))
    async with running_http(house.address, server=server, fetch=few) as door, _images({"/": page}) as (url, _):
        nets = [{"name": "edges", "image": f"{url}/"}] * 3
        for body in ({"image": f"{url}/"}, {"bottega": {"controlnets": nets}}):
            answer = await door.http.post("/v1/jobs", json={"prompt": "a", **body})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), answer.text


async def test_a_server_that_drips_is_cut_off() -> None:
    config = FetchConfig(hosts=("127.0.0.1",), networks=("127.0.0.0/8",), ports=(), plain_http=True, timeout_s=0.3)
    async with _images({"/": _drip}) as (url, _):
        with pytest.raises(InvalidRequest, match=r"did not come within 0\.3 s"):
            await _fetch(f"{url}/", config)


async def test_a_name_that_changes_to_an_address_inside_is_not_called() -> None:
    config = FetchConfig(hosts=("*.example",), ports=(), plain_http=True)
    async with _images({"/": _answer(_png())}) as (url, asked):
        port = httpx.URL(url).port
        with pytest.raises(InvalidRequest, match="must not be called") as refused:
            await _fetch(f"http://a.example:{port}/", config, resolve=lambda host: ["127.0.0.1"])
        assert "127.0.0.1" not in refused.value.message, "callers do not learn what names resolve to inside"
        answers = iter([["127.0.0.1"], ["10.0.0.1"]])
        inside = FetchConfig(hosts=("*.example",), networks=("127.0.0.0/8",), ports=(), plain_http=True)
        data = await _fetch(f"http://a.example:{port}/", inside, resolve=lambda host: next(answers))
        assert (data, next(answers)) == (_png(), ["10.0.0.1"]), "the name is resolved once"
    assert asked == ["/"]
