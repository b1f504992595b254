"""A real ControlNet server among strangers: what they bring costs it next to nothing, and is answered by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from bottega.errors import BottegaError, ControlNetExists, ControlNetUnusable, InvalidRequest
from bottega.rpc.status import from_rpc_error
from tests.samples.hostile_controlnets import CONFIG, HOSTILE, NO_JSON, REAL, hostile_folders, with_config
from tests.support.running_controlnets import SERVER, ControlNetServer
from tests.support.services import Service, Services

# Of front and engine, over all that is brought; what is read is kilobytes.
_MOST_GROWTH_BYTES = 32 << 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root").resolve()
    shutil.copytree(REAL, root / "good")
    hostile_folders(root)
    return root


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlNetServer]:
    with Services(tmp_path_factory.mktemp("server")) as services:
        yield ControlNetServer(_started(services, root), "server")


def _started(services: Services, root: Path, **controlnets: str) -> Service:
    config = {
        "name": "server",
        "gateway": "",
        "server": SERVER,
        "engine": {"threads": 1, "links_socket": None},
        "controlnets": {"edges": "miniature/edges", **controlnets},
        "root": str(root),
    }
    return services.start("controlnet", config, name="server")


def _refused(server: ControlNetServer, name: str, folder: str) -> BottegaError:
    with pytest.raises(grpc.RpcError) as refusal:
        server.add(name, folder)
    return from_rpc_error(refusal.value)


def _memory_bytes(server: ControlNetServer) -> dict[int, int]:
    pids = (server.service.process.pid, server.engine_pid)
    return {pid: psutil.Process(pid).memory_info().rss for pid in pids}


def test_hostile_configurations_are_refused_by_the_name_of_their_field_and_memory_stays_flat(
    server: ControlNetServer,
) -> None:
    server.add("good", "good")
    before = _memory_bytes(server)
    for number, (field, _) in enumerate(HOSTILE):
        error = _refused(server, "bad", f"hostile-{number}")
        assert isinstance(error, InvalidRequest), error.message
        assert f"config.json: {field}: " in error.message
        assert [violation.field for violation in error.violations] == ["folder"]
    for number, name in enumerate(NO_JSON):
        error = _refused(server, "bad", f"junk-{number}")
        assert isinstance(error, InvalidRequest), (name, error.message)
    after = _memory_bytes(server)
    assert max(after[pid] - before[pid] for pid in before) < _MOST_GROWTH_BYTES
    assert server.engines == 1
    assert "bad" not in server.hosted()


def test_weights_that_are_not_the_configurations_are_refused_before_they_are_hosted(
    server: ControlNetServer, root: Path
) -> None:
    with_config(root / "misfit", json.dumps({**CONFIG, "cross_attention_dim": 64}).encode())
    error = _refused(server, "misfit", "misfit")
    assert isinstance(error, ControlNetUnusable)
    assert "not those of its config.json" in error.message
    assert "misfit" not in server.hosted()


def test_a_name_of_the_configuration_is_refused_also_where_it_was_added_before(root: Path, tmp_path: Path) -> None:
    with Services(tmp_path) as services:
        first = ControlNetServer(_started(services, root), "server")
        error = _refused(first, "edges", "good")
        assert isinstance(error, ControlNetExists)
        assert "configuration has a ControlNet edges" in error.message
        (root / "other").mkdir()
        for file in REAL.iterdir():
            shutil.copy(file, root / "other")
        (root / "other" / "config.json").write_text(json.dumps({**CONFIG, "norm_eps": 1e-6}))
        added = first.add("layout", "other")
        assert first.add("layout", "other").digest == added.digest  # the same again is read anew
        first.service.stop()
        # The configuration has got that name meanwhile.
        second = ControlNetServer(_started(services, root, layout="miniature/layout"), "server")
        assert second.hosted()["layout"].digest != added.digest
        assert isinstance(_refused(second, "layout", "other"), ControlNetExists)
        second.service.stop()
        third = ControlNetServer(_started(services, root), "server")
        assert third.hosted()["layout"].digest == added.digest


def test_files_that_are_links_out_of_the_root_are_refused(server: ControlNetServer, root: Path) -> None:
    for number, file in enumerate(sorted(REAL.iterdir())):
        error = _refused(server, "linked", f"link-{number}")
        assert isinstance(error, InvalidRequest)
        assert f"{file.name} must be below" in error.message
    snapshot = root / "models--a--b" / "snapshots" / "1"
    blobs = root / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(REAL.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert server.add("snapshot", str(snapshot)).digest == server.hosted()["edges"].digest


def test_an_inspection_process_that_dies_is_the_fault_of_nobody_else(server: ControlNetServer) -> None:
    server.add("good", "good")
    for process in _inspections(server):
        process.kill()
        process.wait(10)
    assert server.add("good", "good").digest == server.hosted()["edges"].digest
    (process,) = _inspections(server)
    limit_bytes, _ = process.rlimit(psutil.RLIMIT_AS)
    assert limit_bytes <= process.memory_info().vms + (1 << 30)
    assert server.engines == 1


def _inspections(server: ControlNetServer) -> list[psutil.Process]:
    children = psutil.Process(server.service.process.pid).children()
    return [child for child in children if "bottega.controlnet.inspection_process" in child.cmdline()]
