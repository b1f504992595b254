"""ControlNet servers that share a catalogue in PostgreSQL: each hosts what a caller has added at another one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry

from bottega import kinds
from bottega.controlnet import shared_catalogue, shared_files
from bottega.controlnet.catalogue import open_catalogue
from bottega.controlnet.config import ControlNetConfig, ControlNetEngineConfig
from bottega.controlnet.engine_client import ControlNetEngineClient, ControlNetInspector
from bottega.controlnet.metrics import ControlNetMetrics
from bottega.controlnet.server import ControlNetServer
from bottega.controlnet.service import ControlNetService
from bottega.controlnet.shared_catalogue import CatalogueFollower, SharedControlNetCatalogue
from bottega.controlnet.shared_files import SharedFiles
from bottega.errors import ConfigError, EngineStarting, StorageUnavailable, TooLarge
from bottega.model_files.digest import controlnet_digest
from bottega.process.engine_supervisor import EngineListener, EngineTimeouts
from bottega.v1 import controlnet_pb2
from bottega.v1.controlnet_engine_pb2 import ControlNetEngineEvent, ControlNetEngineReady
from bottega.v1.hosted_pb2 import Hosted, ResidualProfile
from tests.fakes.listening import FakeListening
from tests.support.postgresql import new_database, shared_server
from tests.support.s3 import S3Server
from tests.support.waiting import EVENTUALLY_S, eventually


class _Engine(ControlNetEngineClient):
    """An engine that hosts everything, without a process."""

    def __init__(self) -> None:
        super().__init__(ControlNetEngineConfig(), timeouts=EngineTimeouts(start_stall_s=1, hang_s=1, stall_s=1))
        self.serves: set[str] = set()

    async def host(self, name: str, folder: Path, root: Path | None = None) -> Hosted:
        self.serves.add(name)
        return Hosted(kind=kinds.CONTROLNET, name=name, digest=controlnet_digest(folder, root))

    async def watch(self, listener: EngineListener[ControlNetEngineReady, ControlNetEngineEvent]) -> None:
        await listener.on_engine_ready(ControlNetEngineReady())
        await asyncio.Event().wait()

    async def stop(self) -> int | None:
        return None


class _Inspector(ControlNetInspector):
    async def inspect(self, name: str, folder: Path, root: Path | None) -> None:
        """Find nothing wrong."""


@pytest.fixture
def url() -> Iterator[str]:
    with new_database() as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("edges", "depth"):
        _write(tmp_path / "root" / name, name)
    return tmp_path / "root"


def _write(folder: Path, content: str) -> str:
    """Write files of a ControlNet and return their digest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.safetensors").write_text(content)
    return controlnet_digest(folder)


@contextlib.asynccontextmanager
async def _serving(name: str, url: str, root: Path, **config: object) -> AsyncIterator[ControlNetServer]:
    settings = ControlNetConfig(
        gateway="",
        name=name,
        root=str(root),
        database=url,
        catalogue=str(root.parent / f"{name}.db"),
        **config,  # type: ignore[arg-type]
    )
    catalogue, profiles = open_catalogue(settings, root.parent)
    server = ControlNetServer(
        settings,
        catalogue=catalogue,
        profiles=profiles,
        engine=_Engine(),
        inspector=_Inspector(),
        metrics=ControlNetMetrics(CollectorRegistry()),
        server=FakeListening(),
    )
    await server.start()
    follower = None
    if catalogue.shared is not None:
        follower = CatalogueFollower(catalogue, catalogue.shared, server)
        follower.start()
    try:
        yield server
    finally:
        if follower is not None:
            await follower.stop()
        await server.stop()


@contextlib.asynccontextmanager
async def _closing(shared: SharedControlNetCatalogue) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await shared.close()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hosted(server: ControlNetServer) -> dict[str, str]:
    return {net.name: net.digest for net in server.hosted}


def _served(server: ControlNetServer) -> set[str]:
    """Return the names of the ControlNets that the server's engine has been told to host."""
    assert isinstance(server._engine, _Engine)
    return server._engine.serves


async def _has_all_files(server: ControlNetServer) -> bool:
    shared = server._catalogue.shared
    assert shared is not None
    return all(net.files for net in await shared.read())


def _left_out(server: ControlNetServer) -> dict[str, str]:
    return {item.name: item.reason for item in server.load().left_out}


async def test_all_servers_host_what_is_added_at_one_and_so_do_later_ones(url: str, root: Path) -> None:
    async with _serving("one", url, root) as one, _serving("two", url, root) as two:
        first = (await one.add("edges", "edges")).digest
        await eventually(lambda: _hosted(two) == {"edges": first})
        second = _write(root / "edges", "another version")
        await two.add("edges", str(root / "edges"))
        await two.add("depth@shop", "depth")
        await eventually(lambda: _hosted(one) == _hosted(two))
        assert _hosted(one)["edges"] == second != first
        profile = ResidualProfile(model_hash="ab", num_inference_steps=20, similarity=0.995)
        await one.set_profile("edges", second, profile)
        await eventually(lambda: [list(net.profiles) for net in two.hosted] == [[], [profile]])
    async with _serving("three", url, root) as three:
        await eventually(lambda: set(_hosted(three)) == {"edges", "depth@shop"})
        await eventually(lambda: [list(net.profiles) for net in three.hosted] == [[], [profile]])


async def test_other_files_than_those_that_were_added_are_not_hosted(
    url: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "root"
    _write(other / "edges", "something else")
    fixed = {"depth": str(root / "depth")}
    async with _serving("one", url, root) as one, _serving("two", url, other, controlnets=fixed) as two:
        edges, depth = (await one.add("edges", "edges")).digest, (await one.add("z", "depth")).digest
        await one.add("depth", "edges")
        await eventually(lambda: set(_left_out(two)) == {"edges", "depth", "z"})
        assert "are not those that were added as edges; copy them to this machine" in _left_out(two)["edges"]
        assert "there is no such folder" in _left_out(two)["z"]
        assert "the server's configuration has a ControlNet depth" in _left_out(two)["depth"]
        assert _hosted(two) == {"depth": depth}
        shutil.rmtree(other)
        shutil.copytree(root, other)
        monkeypatch.setattr(shared_catalogue, "_SYNC_S", 0.05)
        await one.add("more", "depth")  # so that it looks, and then again: the others failed a short while ago
        await eventually(lambda: set(_hosted(two)) == {"depth", "more"})
        monkeypatch.setattr(shared_catalogue, "_RETRY_S", 0.0)
        await eventually(lambda: _hosted(two) == {"edges": edges, "depth": depth, "more": depth, "z": depth})
        assert set(_left_out(two)) == {"depth"}


async def test_servers_without_a_common_folder_get_the_files_from_s3(
    url: str, root: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.bucket()
    objects, other = f"s3://{bucket}/nets", tmp_path / "other" / "root"
    other.mkdir(parents=True)
    (root / "edges" / "deep").mkdir()
    (root / "edges" / "deep" / "more.safetensors").write_text("more")
    async with _serving("one", url, root, objects=objects) as one:
        async with _serving("two", url, other, objects=objects) as two:
            first = (await one.add("edges", "edges")).digest
            await eventually(lambda: _hosted(two) == {"edges": first})
            assert (other / "shared" / first / "deep" / "more.safetensors").read_text() == "more"
            _write(root / "edges", "another version")
            second = (await one.add("edges", "edges")).digest
            await eventually(lambda: _hosted(two) == {"edges": second})
            await eventually(lambda: [path.name for path in (other / "shared").iterdir()] == [second])
        depth = (await one.add("depth", "depth")).digest
        monkeypatch.setattr(shared_files, "_UNUSED_S", -1.0)
        await one.add("pose", "depth")
        await eventually(lambda: _has_all_files(one))
        await eventually(lambda: len(s3_server.keys(bucket)) == 4)  # the configurations are equal
        (key,) = [key for key in s3_server.keys(bucket) if key.endswith(_sha256(b"depth"))]
        s3_server.put(bucket, key, b"dePth")
    async with _serving("two", url, other, objects=objects) as two:
        assert _hosted(two) == {"edges": second}, "its copy"
        await eventually(lambda: "the object of weights.safetensors in S3 is damaged" in str(_left_out(two)))
        assert not list((other / "shared").glob(f"*{depth}*"))


async def test_an_addition_does_not_wait_for_the_upload_of_its_files(
    url: str, root: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_upload, upload = threading.Event(), SharedFiles.upload

    def late(self: SharedFiles, folder: str) -> str:
        assert may_upload.wait(EVENTUALLY_S)
        return upload(self, folder)

    monkeypatch.setattr(SharedFiles, "upload", late)
    objects, other = f"s3://{s3_server.bucket()}/nets", tmp_path / "other" / "root"
    other.mkdir(parents=True)
    config = {"objects": objects}
    async with _serving("one", url, root, **config) as one, _serving("two", url, other, **config) as two:
        edges = (await one.add("edges", "edges")).digest
        await eventually(lambda: "its files are not in S3 yet" in _left_out(two).get("edges", ""))
        may_upload.set()
        await eventually(lambda: _hosted(two) == {"edges": edges})
        assert not _left_out(two)
    (other / "shared" / edges / "weights.safetensors").write_text("damaged")
    async with _serving("two", url, other, **config) as two:
        await eventually(lambda: _hosted(two) == {"edges": edges}, "a repaired copy")


async def test_files_of_a_controlnet_that_is_added_during_a_sweep_stay(
    url: str, root: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "_UNUSED_S", -1.0)
    bucket = s3_server.bucket()
    files = SharedFiles(f"s3://{bucket}/nets", root)
    shared = SharedControlNetCatalogue(url, files)
    async with _closing(shared):
        for name in ("edges", "depth"):
            await asyncio.to_thread(files.upload, name)
        await shared.add("edges", folder="edges", digest="1")
        await shared.upload("edges", folder="edges", digest="1")
        listed, may_sweep, find = threading.Event(), threading.Event(), files.unused_for_long

        def slowly() -> Sequence[str]:
            found = find()
            listed.set()
            assert may_sweep.wait(EVENTUALLY_S)
            return found

        monkeypatch.setattr(files, "unused_for_long", slowly)
        sweep = asyncio.create_task(shared.sweep(()))
        assert await asyncio.to_thread(listed.wait, EVENTUALLY_S)
        await shared.add("depth", folder="depth", digest="2")
        may_sweep.set()
        await sweep
        assert len(s3_server.keys(bucket)) == 3, "its upload may have begun"
        await shared.upload("depth", folder="depth", digest="2")
        await shared.sweep(())
        assert len(s3_server.keys(bucket)) == 3
        await shared.add("edges", folder="depth", digest="2")
        await shared.upload("edges", folder="depth", digest="2")
        await shared.sweep(())
        assert len(s3_server.keys(bucket)) == 2


async def test_without_the_database_a_server_hosts_its_copy_and_adds_nothing(
    url: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(shared_catalogue, "_SYNC_S", 0.05)
    async with _serving("one", url, root) as one:
        edges = (await one.add("edges", "edges")).digest
    server, database = shared_server(), urlsplit(url).path[1:]
    server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
    server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
    async with _serving("one", url, root) as one:
        assert _hosted(one) == {"edges": edges}
        with pytest.raises(StorageUnavailable):
            await one.add("depth", "depth")
        assert _served(one) == {"edges"}, "what is not stored is not hosted"
        await eventually(lambda: "goes on with its own copy" in caplog.text)
        server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        await eventually(lambda: "can be followed again" in caplog.text)
        await one.add("depth", "depth")
    async with _serving("two", url, root) as two:
        await eventually(lambda: set(_hosted(two)) == {"edges", "depth"})


async def test_what_was_added_before_there_was_a_database_or_s3_is_shared(
    url: str, root: Path, tmp_path: Path, s3_server: S3Server
) -> None:
    async with _serving("one", "", root) as one:
        edges = (await one.add("edges", "edges")).digest
    async with _serving("one", url, root), _serving("two", url, root) as two:
        await eventually(lambda: _hosted(two) == {"edges": edges})
    objects, other = f"s3://{s3_server.bucket()}/nets", tmp_path / "other" / "root"
    other.mkdir(parents=True)
    async with _serving("one", url, root, objects=objects), _serving("three", url, other, objects=objects) as three:
        await eventually(lambda: _hosted(three) == {"edges": edges})


async def test_one_that_cannot_be_shared_does_not_keep_a_server_from_following(
    url: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_catalogue, "MAX_CONTROLNETS", 1)
    async with _serving("one", "", root) as one:
        await one.add("depth", "depth")
    async with _serving("two", url, root) as two:
        edges = (await two.add("edges", "edges")).digest
        profile = ResidualProfile(model_hash="ab", num_inference_steps=20, similarity=0.995)
        await two.set_profile("edges", edges, profile)
    async with _serving("one", url, root) as one:
        await eventually(
            lambda: {net.name: list(net.profiles) for net in one.hosted} == {"depth": [], "edges": [profile]}
        )
        why = "other servers cannot get it: the shared catalogue has"
        await eventually(lambda: why in _left_out(one).get("depth", ""))


async def test_only_what_the_server_itself_lacks_is_tried_again_at_once(
    url: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    async def add(self: ControlNetServer, name: str, folder: str, *, digest: str = "") -> Hosted:
        tries.append(name)
        raise EngineStarting("it starts") if name == "edges" else StorageUnavailable("the disk is full")

    monkeypatch.setattr(shared_catalogue, "_SYNC_S", 0.01)
    async with _serving("one", url, root) as one:
        await one.add("edges", "edges")
        await one.add("depth", "depth")
    monkeypatch.setattr(ControlNetServer, "add", add)
    async with _serving("two", url, root):
        await eventually(lambda: tries.count("edges") >= 3)
    assert tries.count("depth") == 1


async def test_only_servers_of_one_database_name_the_same_catalogue(url: str, root: Path) -> None:
    async def named(server: str) -> str:
        request, context = controlnet_pb2.ListControlNetsRequest(), AsyncMock()
        async with _serving(server, url, root) as one:
            await eventually(lambda: bool(one.shared_catalogue and one.shared_catalogue.identity))
            return (await ControlNetService(one).ListControlNets(request, context)).catalogue

    database = urlsplit(url).path[1:]
    first = await named("one")
    assert first.startswith(f"{database}/")
    assert await named("two") == first
    for statement in (f"DROP DATABASE {database} WITH (FORCE)", f"CREATE DATABASE {database} TEMPLATE template0"):
        shared_server().execute(statement)
    assert await named("three") != first, "another database with the same host, port and name"


async def test_a_shared_catalogue_has_bounds_and_needs_a_root(
    url: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="set root"):
        open_catalogue(ControlNetConfig(database=url), root)
    with pytest.raises(ConfigError, match="set database"):
        open_catalogue(ControlNetConfig(objects="s3://bucket", root=str(root)), root)
    monkeypatch.setattr(shared_catalogue, "MAX_CONTROLNETS", 1)
    monkeypatch.setattr(shared_catalogue, "MAX_PROFILED", 2)
    async with _serving("one", url, root) as one:
        edges = (await one.add("edges", "edges")).digest
        with pytest.raises(TooLarge, match="the shared catalogue has"):
            await one.add("depth", "depth")
        assert _served(one) == {"edges"}, "what is not stored is not hosted"
        assert (await one.add("edges", "edges")).digest == edges, "it replaces itself"
        shared = one._catalogue.shared
        assert shared is not None
        for number in range(4):
            profile = ResidualProfile(model_hash=str(number), num_inference_steps=20, similarity=0.9)
            await shared.set_profile(edges, profile)
            await shared.set_profile(edges, profile)
        kept = await shared.profiles_of([edges])
        assert [profile.model_hash for profile in kept[edges]] == ["2", "3"]
