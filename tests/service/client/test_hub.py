"""`bottega controlnets add NAME hub:OWNER/NAME`: a hub of this machine's own, and what is said without one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.fakes.scripted_controlnet import hosted
from tests.support.full_disk import fill, small_disk
from tests.support.running_gateway import Running, running_gateway
from tests.support.terminal import NO_UNICODE, run_at

REVISION = "0" * 40
FILES = {
    "config.json": b"{}",
    "diffusion_pytorch_model.safetensors": b"weights",
    "diffusion_pytorch_model.fp16.safetensors": b"half of them",
    "diffusion_pytorch_model.bin": b"a pickle",
    "README.md": b"# A ControlNet",
}


@dataclass(slots=True, kw_only=True)
class Hub:
    """What it was asked for, and has: one repository, somebody/depth, at one revision."""

    address: str = ""
    asked: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=FILES.copy)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test knows what was asked."""

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            name, data = path.rpartition("/")[2], b""
            if path.startswith("/api/models/somebody/depth/tree/"):
                data = json.dumps([_entry(name, data) for name, data in hub.files.items()]).encode()
            elif path.startswith("/api/models/somebody/depth"):
                siblings = [{"rfilename": name} for name in hub.files]
                data = json.dumps({"id": "somebody/depth", "sha": REVISION, "siblings": siblings}).encode()
            elif path.startswith("/somebody/depth/resolve/") and name in hub.files:
                data = hub.files[name]
            self.send_response(200 if data else 404)
            self.send_header("X-Repo-Commit" if data else "X-Error-Code", REVISION if data else "RepoNotFound")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    yield hub
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Running]:
    """A gateway, and a ControlNet server that takes what lies below a folder of the test."""
    async with running_gateway() as running:
        server = await running.controlnets("s1", hosted("edges"))
        server.root = str(tmp_path / "root")
        (tmp_path / "root").mkdir()
        yield running


async def add(house: Running, *arguments: str, **environment: str) -> tuple[int, str]:
    """In a process of its own: the hub's client reads its environment when it is imported. The status, and all said."""
    words = [sys.executable, "-m", "bottega.client.cli", "controlnets", "add", *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    suite = {"BOTTEGA_ADDRESS": house.address, "BOTTEGA_FLEET": house.fleet_address}
    hub = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    process = await asyncio.create_subprocess_exec(
        *words, env={**inherited, **suite, **hub}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_what_a_server_needs_is_brought_below_its_root_and_hosted(
    house: Running, hub: Hub, tmp_path: Path
) -> None:
    status, said = await add(house, "depth", "hub:somebody/depth", HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path))
    assert status == 0, said
    folder = tmp_path / "root" / "hub--somebody--depth"
    assert house.servers[0].added == [("depth", str(folder))]
    brought = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert brought == {name: FILES[name] for name in ("config.json", "diffusion_pytorch_model.safetensors")}
    assert not [path for path in hub.asked if path.endswith((".bin", ".md"))], "nothing else is downloaded"


STEM = "diffusion_pytorch_model"
PUBLISHED: Mapping[str, tuple[list[str], list[str]]] = {
    "an fp16 variant alone": ([f"{STEM}.fp16.safetensors"], [f"{STEM}.bin"]),
    "shards": (
        [f"{STEM}.safetensors.index.json", f"{STEM}-00001-of-00002.safetensors", f"{STEM}-00002-of-00002.safetensors"],
        [f"{STEM}-00001-of-00001.fp16.safetensors", f"{STEM}.safetensors.index.fp16.json", "depth.safetensors"],
    ),
    "shards of a variant alone": (
        [f"{STEM}.safetensors.index.fp16.json", f"{STEM}.fp16-00001-of-00001.safetensors"],
        ["sample/diffusion_pytorch_model.safetensors"],
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
async def test_of_a_variant_and_of_shards_all_that_is_needed_is_brought(
    house: Running, hub: Hub, tmp_path: Path, case: str
) -> None:
    needed, others = PUBLISHED[case]
    hub.files = {name: name.encode() for name in ("config.json", *needed, *others)}
    status, said = await add(house, "depth", "hub:somebody/depth", HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path))
    assert status == 0, said
    folder = tmp_path / "root" / "hub--somebody--depth"
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"config.json", *needed}


async def test_what_cannot_be_brought_is_said_and_nothing_is_added(house: Running, hub: Hub, tmp_path: Path) -> None:
    hub.files = {name: FILES[name] for name in ("config.json", "diffusion_pytorch_model.bin")}
    depth = "hub:somebody/depth"
    for what, endpoint, expected in (
        (("hub:somebody/lines",), hub.address, "the hub has no somebody/lines"),
        ((depth, "--revision", NO_UNICODE), hub.address, r"somebody/depth has no revision a\udcff"),
        ((depth,), "http://127.0.0.1:9", "the hub does not answer"),
        ((depth,), hub.address, "only pickled weights"),
    ):
        status, said = await add(house, "depth", *what, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path))
        assert (status, expected in said, "Traceback" in said) == (1, True, False), said
        assert house.servers[0].added == []


async def test_what_needs_no_hub_to_be_refused_is_refused_without_one(house: Running, tmp_path: Path) -> None:
    """In this process, where HF_HUB_OFFLINE is set."""

    async def told(*arguments: str) -> tuple[int, str]:
        result = await run_at(house, "controlnets", "add", "depth", *arguments)
        return result.exit_code, result.stderr

    for name in ("some body/depth", "../../etc"):
        status, said = await told(f"hub:{name}")
        assert (status, "is not a name on the hub" in said) == (1, True)
    status, said = await told("hub:somebody/depth")
    assert (status, "HF_HUB_OFFLINE is set" in said) == (1, True)
    house.servers[0].root = str(tmp_path / "elsewhere")
    status, said = await told("hub:somebody/depth")
    assert (status, "cannot be written to from here" in said) == (1, True)
    house.servers[0].root = ""
    status, said = await told("hub:somebody/depth")
    assert (status, "no root is configured" in said) == (2, True)
    status, said = await told("somewhere", "--revision", "main")
    assert (status, "--revision needs hub:OWNER/NAME" in said) == (2, True)
    assert house.servers[0].added == []


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}


async def test_a_disk_that_is_full_is_not_taken_for_a_hub_that_is_not_there(
    house: Running, hub: Hub, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=64 << 10) as disk:
        house.servers[0].root = str(disk)
        fill(disk)
        status, said = await add(house, "depth", "hub:somebody/depth", HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path))
    assert (status, "is full" in said, "Free space there" in said) == (1, True, True), said
    assert "does not answer" not in said
    assert house.servers[0].added == []
