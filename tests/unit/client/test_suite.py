"""What `bottega up` plans, and what it keeps in its state folder."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from click.testing import CliRunner

from bottega.client import Client
from bottega.client.cli import main
from bottega.client.instance import InstanceProcess, InstanceRecord, StateFolder
from bottega.client.suite.background import end_orphans
from bottega.client.suite.plan import PortTaken, SuiteOptions, free_ports, plan_suite
from bottega.client.suite.service_log import (
    LogFollower,
    ServiceLog,
    fields_of,
    last_lines,
    lines_of,
    services_with_logs,
)
from bottega.client.transport.connection import default_address, default_fleet_address
from bottega.errors import ConfigError
from bottega.miniature import MODELS, WEIGHTS
from bottega.model_files.folder_check import name_of


def record(*children: InstanceProcess, ready: bool = True) -> InstanceRecord:
    address, fleet = "127.0.0.1:8470", "127.0.0.1:5555"
    return InstanceRecord(pid=os.getpid(), address=address, fleet_address=fleet, ready=ready, children=children)


def held(folder: Path) -> StateFolder:
    """A state folder that was held once, and so has all its folders."""
    state = StateFolder(folder)
    with state.hold():
        return state


def test_workers_share_the_cores_and_all_services_find_their_gateway(tmp_path: Path) -> None:
    state = held(tmp_path)
    model, vae = str(Path("some/folder").resolve()), str(Path("some/vae").resolve())
    counts = {"workers": 2, "controlnet_servers": 2}
    plan = plan_suite(SuiteOptions(services=counts, port=0, models=(model,), vae=vae, dtype="bfloat16"), state)
    names = ["gateway", "loras", "cache", "activations", "worker-0", "worker-1", "controlnet-0", "controlnet-1", "http"]
    assert [process.name for process in plan.processes] == names
    assert all(process.environment["OMP_WAIT_POLICY"] == "PASSIVE" for process in plan.processes)
    configs = {name: yaml.safe_load((state.config / f"{name}.yaml").read_text()) for name in names}
    assert configs["gateway"]["server"]["listen"] == configs["http"]["gateway"] == plan.settings.address
    assert configs["gateway"]["fleet"]["listen"] == plan.settings.fleet_address
    assert {configs[name]["gateway"] for name in names[1:-1]} == {plan.settings.fleet_address}
    for name in ("loras", "cache", "activations"):
        assert configs[name]["folder"] == str(tmp_path / name)
    worker, net, other = (configs[name] for name in ("worker-1", "controlnet-0", "controlnet-1"))
    assert (worker["name"], worker["engine"]["model"], worker["engine"]["vae"]) == ("worker-1", model, {"folder": vae})
    assert worker["engine"]["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert (worker["engine"]["dtype"], net["engine"]["dtype"]) == ("bfloat16", "bfloat16")
    assert net["root"] == other["root"] == str(state.root / "controlnets")
    assert net["catalogue"] != other["catalogue"]


@pytest.mark.parametrize(
    ("folder", "given", "name"),
    [
        ("models--stabilityai--stable-diffusion-xl-base-1.0/snapshots/4621659", "", "stable-diffusion-xl-base-1.0"),
        ("models--stabilityai--sdxl-turbo/snapshots/4621659", "turbo", "turbo"),
        ("snapshots/4621659", "", "4621659"),
    ],
)
def test_a_model_is_served_by_its_folders_or_repositorys_name(
    folder: str, given: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)
    state = held(tmp_path / "state")
    plan = plan_suite(SuiteOptions(port=0, models=(str(path),), model_names=(given,)), state)
    assert [model.name for model in plan.settings.models] == [name]
    worker = yaml.safe_load((state.config / "worker-0.yaml").read_text())
    assert (worker["engine"]["model"], worker["engine"]["model_name"]) == (str(path), name)
    # As of a worker that is configured by hand.
    assert name_of(str(path), given) == name


def test_services_that_lack_packages_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = {"torch", "faiss-cpu"}
    monkeypatch.setattr(
        "bottega.client.suite.plan.missing_packages",
        lambda service: [name for name in service.requires if name in lacking],
    )
    with pytest.raises(ConfigError) as refusal:
        plan_suite(SuiteOptions(services={"controlnet_servers": 0}, port=0), held(tmp_path))
    assert refusal.value.message == (
        "the approximate cache needs faiss-cpu; the worker needs torch, not installed here: "
        "pip install 'bottega-services[cache]' 'bottega-services[worker]'"
    )


def test_what_lies_beside_a_model_is_served_from_the_start(tmp_path: Path) -> None:
    state = held(tmp_path)
    plan_suite(SuiteOptions(port=0), state)
    own = yaml.safe_load((state.config / "loras.yaml").read_text())["loras"]
    assert {path.name for path in (WEIGHTS / "loras").iterdir()} == set(own)
    model = tmp_path / "mine"
    (model / "loras" / "ink").mkdir(parents=True)
    (model / "controlnets" / "canny").mkdir(parents=True)
    (model / "cache_profile.json").touch()
    for name in ("loras/wash.safetensors", "loras/notes.txt", "loras/~.safetensors", "controlnets/depth.safetensors"):
        (model / name).touch()
    plan_suite(SuiteOptions(port=0, models=(str(model),)), state)
    config = yaml.safe_load((state.config / "loras.yaml").read_text())
    assert config["loras"] == {
        "ink": {"path": str(model / "loras" / "ink"), "base": "mine"},
        "wash": {"path": str(model / "loras" / "wash.safetensors"), "base": "mine"},
    }
    assert list(config["left_out"]) == ["~.safetensors"]
    nets = yaml.safe_load((state.config / "controlnet-0.yaml").read_text())
    assert nets["controlnets"] == {"canny": str(model / "controlnets" / "canny")}
    assert list(nets["left_out"]) == ["depth.safetensors"]
    cache = yaml.safe_load((state.config / "cache.yaml").read_text())
    assert cache["profiles"] == [str(model / "cache_profile.json")]


def test_several_models_have_their_workers_and_adapters_in_one_suite(tmp_path: Path) -> None:
    state, mine = held(tmp_path / "state"), tmp_path / "mine"
    for name in ("loras/ink", "loras/dusk", "controlnets/canny", "controlnets/edges"):
        (mine / name).mkdir(parents=True)
    (mine / "cache_profile.json").touch()
    options = SuiteOptions(port=0, models=("miniature", str(mine)), model_names=("", "ours"), services={"workers": 2})

    plan = plan_suite(options, state)

    configs = {one.name: yaml.safe_load((state.config / f"{one.name}.yaml").read_text()) for one in plan.processes}
    workers = [configs[f"worker-{number}"]["engine"] for number in range(4)]
    assert [engine["model_name"] for engine in workers] == ["miniature", "ours"] * 2
    assert [engine["model"] for engine in workers[:2]] == ["miniature", str(mine)]
    assert {engine["threads"] for engine in workers} == {max(1, len(os.sched_getaffinity(0)) // 4)}
    loras, nets = configs["loras"], configs["controlnet-0"]
    assert nets["engine"]["device_memory_share"] == 0.25
    assert {engine["device_memory_share"] for engine in workers} == {0.75 / 4}, "what the ControlNet server leaves"
    assert loras["bases"] == {"miniature": str(WEIGHTS), "ours": str(mine)}
    bases = dict.fromkeys(("checked", "dusk", "striped"), "miniature") | {"ink": "ours"}
    assert {name: own["base"] for name, own in loras["loras"].items()} == bases
    assert nets["controlnets"] == {
        "canny": str(mine / "controlnets" / "canny"),
        **{name: str(WEIGHTS / "controlnets" / name) for name in ("edges", "layout")},
    }
    taken = "the model miniature has an adapter of the same name; rename one of them"
    assert (loras["left_out"], nets["left_out"]) == ({"dusk": taken}, {"edges": taken})
    assert configs["cache"]["profiles"] == [str(WEIGHTS / "cache_profile.json"), str(mine / "cache_profile.json")]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model=miniature", "--model=miniature"], "two models have the name miniature"),
        (["--model=miniature", "--model-name=a", "--model-name=b"], "--model-name is given 2 times, for 1 models"),
        (["--model=miniature", "--model=other", "--vae=vae"], "--vae is for a suite of one model"),
        (["--model=miniature", "--parts=flux"], "--parts is for a suite of one model, which is a single file"),
        (["--model=miniature", "--model=absent"], "the embedded model absent is not installed"),
    ],
)
def test_models_that_one_suite_cannot_serve_are_refused(
    options: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "absent", tmp_path / "absent")

    result = CliRunner().invoke(main, ["up", "--port=0", f"--state={tmp_path / 'state'}", *options])

    assert (result.exit_code, reason in result.stderr) == (1, True), result.stderr
    assert not (tmp_path / "state").exists()


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTaken):
        plan_suite(SuiteOptions(port=taken.getsockname()[1]), held(tmp_path))
    assert list((tmp_path / "config").iterdir()) == []


def test_ports_of_a_suite_are_none_that_the_system_gives_somebody_else_before_its_gateway_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("32768 60999\n")
    monkeypatch.setattr("bottega.client.suite.plan._EPHEMERAL_RANGE", tmp_path / "range")
    plan = plan_suite(SuiteOptions(port=0), held(tmp_path))
    config = yaml.safe_load((tmp_path / "config" / "gateway.yaml").read_text())
    http = yaml.safe_load((tmp_path / "config" / "http.yaml").read_text())
    assert http["gateway"] == config["server"]["listen"]
    addresses = [config["server"]["listen"], config["server"]["metrics_listen"], config["fleet"]["listen"]]
    addresses.append(http["server"]["listen"])
    settings = plan.settings
    assert (addresses[0], *addresses[2:]) == (settings.address, settings.fleet_address, settings.http_address)
    chosen = [int(address.rpartition(":")[2]) for address in addresses]
    assert chosen == [chosen[0] + offset for offset in range(4)]
    assert 1024 <= chosen[0] <= chosen[3] < 32768


def test_ports_where_somebody_listens_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as taken:
        port = taken.getsockname()[1]
        tries = iter((port, port - 2, port + 1))
        monkeypatch.setattr(random, "randint", lambda first, last: next(tries))
        assert free_ports(3) == [port + 1, port + 2, port + 3]


def test_a_record_counts_only_while_its_instance_runs(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    with state.hold():
        assert state.running() is None
        state.write(record(InstanceProcess(name="gateway", pid=1, started_s=2.0)))
        assert state.running() == state.read()
    assert state.running() is None
    assert state.read() == record(InstanceProcess(name="gateway", pid=1, started_s=2.0))


def test_the_fleet_is_listed_where_one_says_else_where_the_suite_that_runs_here_has_it_else_beside_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_STATE", str(tmp_path))
    monkeypatch.delenv("BOTTEGA_FLEET", raising=False)
    assert default_fleet_address("127.0.0.1:8470") == "127.0.0.1:8472"
    assert default_fleet_address("drawing.example:443") == "drawing.example:8472"
    assert default_fleet_address("[::1]:8470") == "[::1]:8472"
    state = StateFolder(tmp_path)
    with state.hold():
        state.write(record())
        assert default_fleet_address("127.0.0.1:8470") == "127.0.0.1:5555"
        assert default_fleet_address("127.0.0.1:9000") == "127.0.0.1:8472", "that is another suite"
        monkeypatch.setenv("BOTTEGA_FLEET", "fleet.example:1")
        assert default_fleet_address("127.0.0.1:8470") == "fleet.example:1"
    monkeypatch.delenv("BOTTEGA_FLEET")
    assert default_fleet_address("127.0.0.1:8470") == "127.0.0.1:8472"


def test_the_sdk_finds_the_suite_that_the_command_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_STATE", str(tmp_path))
    monkeypatch.delenv("BOTTEGA_ADDRESS", raising=False)
    assert default_address() == "127.0.0.1:8470"
    state = StateFolder(tmp_path)
    with state.hold():
        state.write(dataclasses.replace(record(), address="127.0.0.1:9470"))
        with Client() as client:
            assert client.address == "127.0.0.1:9470"
        monkeypatch.setenv("BOTTEGA_ADDRESS", "drawing.example:443")
        assert default_address() == "drawing.example:443"


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [subprocess.Popen(argv, start_new_session=True) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_what_a_killed_instance_left_is_ended_and_nobody_elses_process(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    left, other = sleepers
    born_s = psutil.Process(left.pid).create_time()
    ended = end_orphans(
        record(
            InstanceProcess(name="worker-0", pid=left.pid, started_s=born_s),
            InstanceProcess(name="worker-1", pid=other.pid, started_s=born_s - 100),
        )
    )
    assert ended == ("worker-0",)
    assert not psutil.pid_exists(left.pid)
    assert psutil.pid_exists(other.pid)
    assert end_orphans(None) == ()


def test_a_log_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path, "gateway", size_bytes=1000)
    for number in range(200):
        log.write(f"line {number} with 100% of its text")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["gateway.log", "gateway.log.1"]
    assert sum(path.stat().st_size for path in files) <= 2000
    assert last_lines(tmp_path, ["gateway"], 1) == [("gateway", "line 199 with 100% of its text")]


def test_logs_are_merged_by_time_and_tracebacks_stay_in_place(tmp_path: Path) -> None:
    def line(moment: str, event: str) -> str:
        return json.dumps({"time": f"2026-01-01 {moment}", "event": event})

    (tmp_path / "gateway.log").write_text(line("10:00:01", "a") + "\n" + line("10:00:03", "c") + "\n")
    (tmp_path / "worker-0.log").write_text("Traceback\n" + line("10:00:02", "b") + "\n")
    assert services_with_logs(tmp_path) == ["gateway", "worker-0"]
    merged = last_lines(tmp_path, ["gateway", "worker-0"], 10)
    assert [fields_of(line)["event"] for _, line in merged] == ["a", "Traceback", "b", "c"]
    assert [name for name, _ in last_lines(tmp_path, ["gateway", "worker-0"], 2)] == ["worker-0", "gateway"]


def test_a_follower_sees_what_comes_also_after_a_rotation(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path, "gateway", size_bytes=50)
    log.write("old")
    follower = LogFollower(tmp_path / "gateway.log")
    assert follower.new_lines() == []
    log.write("new")
    assert follower.new_lines() == ["new"]
    log.write("x" * 60)
    log.write("after the rotation")
    assert "after the rotation" in follower.new_lines() + follower.new_lines()
    follower.close()
    log.close()


async def test_a_line_without_an_end_comes_in_pieces() -> None:
    stream = asyncio.StreamReader(limit=2**20)
    stream.feed_data(b"first\n" + b"x" * 300_000 + b"\nlast")
    stream.feed_eof()
    lines = [line async for line in lines_of(stream)]
    assert (lines[0], lines[-1]) == ("first", "last")
    assert max(map(len, lines)) <= 3 * 64 * 1024
    assert sum(map(len, lines[1:-1])) == 300_000
