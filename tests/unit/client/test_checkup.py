"""What `bottega doctor` finds, on machines, folders and gateways that the tests make."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from bottega.client.addons.addon import Level
from bottega.client.checkup.gateway import check_gateway
from bottega.client.cli import main
from bottega.client.cli.doctor import (
    check_cores,
    check_model,
    check_open_files,
    check_own_controlnets,
    check_packages,
    check_python,
)
from bottega.errors import ConfigError
from bottega.manifest import VARIABLE
from bottega.miniature import WEIGHTS
from bottega.worker.config import EngineConfig, WorkerConfig
from bottega.worker.config import check_model as check_worker_model
from tests.samples.hostile_controlnets import CONFIG, with_config
from tests.samples.wrong_folders import WRONG_FOLDERS

TESTED = {"bottega-libs": "0.1.0", "bottega-services": "0.1.0", "torch": "2.13.0+cpu"}
_HTTP = ("httpx", "python-multipart", "sse-starlette", "standardwebhooks", "starlette", "uvicorn")
_NAMES = ("accelerate", "diffusers", "faiss-cpu", "numpy", "safetensors", "scikit-learn", "transformers", *_HTTP)
NEEDED = dict.fromkeys(_NAMES, "1.0")


def test_python_must_be_one_that_the_suite_supports() -> None:
    for minor, level in ((10, Level.FAIL), (11, Level.OK), (13, Level.OK), (14, Level.FAIL)):
        assert [result.level for result in check_python((3, minor))] == [level]


@pytest.mark.parametrize(
    ("installed", "pinned", "levels", "said"),
    [
        (
            {**NEEDED, **TESTED},
            {"torch": "2.13.0"},
            [Level.OK, Level.OK],
            "1 packages have the versions that Bottega was tested with",
        ),
        (
            {**NEEDED, **TESTED, "grpcio": "1.0"},
            {"grpcio": "1.85.1"},
            [Level.OK, Level.WARN],
            "grpcio 1.0 instead of",
        ),
        ({**NEEDED, **TESTED, "bottega-protos": "0.2.0"}, {}, [Level.FAIL], "parts are of different versions"),
    ],
    ids=["as tested, whatever build of torch", "others", "parts of different releases"],
)
def test_versions_are_looked_at(
    installed: dict[str, str], pinned: dict[str, str], levels: list[Level], said: str
) -> None:
    results = list(check_packages(installed, pinned))
    assert [result.level for result in results] == levels
    assert said in results[-1].what


def test_a_machine_without_torch_is_told_which_services_cannot_run_there() -> None:
    _, *results = check_packages({"bottega-libs": "0.1.0", "bottega-services": "0.1.0", "numpy": "2.0"}, {})
    assert {result.level for result in results} == {Level.WARN}
    cache, *others = results
    assert cache.what == "no approximate cache can run here: faiss-cpu, scikit-learn not installed"
    assert "bottega-services[cache]" in cache.todo
    assert [result.what.partition(" can run here")[0] for result in others] == [
        "no worker",
        "no ControlNet server",
        "no HTTP API",
    ]
    assert all("torch" in result.what for result in others[:2])
    assert "bottega-services[worker]" in others[0].todo


def test_a_manifest_that_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.txt"))
    _, result, *_ = check_packages(TESTED, {})
    assert result.level is Level.FAIL
    assert "none.txt" in result.what


def test_what_slows_or_limits_a_machine_is_warned_of() -> None:
    assert [result.level for result in check_cores(2, "ACTIVE")] == [Level.WARN, Level.OK]
    assert [result.level for result in check_cores(2, "passive")] == [Level.OK]
    (few,) = check_open_files(1024)
    assert (few.level, "LimitNOFILE" in few.todo) == (Level.WARN, True)
    assert [result.level for limit in (65_536, -1) for result in check_open_files(limit)] == [Level.OK, Level.OK]


# The others' sentences are those of the checker, which tests/unit/model_files/test_folder_check.py has all of.
def test_doctor_and_up_say_of_a_wrong_folder_what_workers_say(tmp_path: Path) -> None:
    given, sentence = WRONG_FOLDERS[0].make_at(tmp_path / "model")
    up = CliRunner().invoke(main, ["up", "--model", str(given), "--state", str(tmp_path / "state")])
    assert (up.exit_code, type(up.exception)) == (1, SystemExit)
    assert sentence in up.output
    assert not (tmp_path / "state").exists()
    (result,) = check_model(str(given))
    assert (result.level, result.what) == (Level.FAIL, f"model {given}: {sentence}")
    with pytest.raises(ConfigError) as refused:
        check_worker_model(WorkerConfig(engine=EngineConfig(model=str(given))))
    assert refused.value.message == f"the model {given} cannot be served: {sentence}"


@pytest.fixture
def first_port() -> int:
    """Of four side by side that are free; where there are any, not of those that the kernel gives to others."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    ports = random.sample(range(2000, 65534), 2000)
    for port in sorted(ports, key=lambda port: first - 4 < port <= last):
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError):
            for each in range(port, port + 4):
                taken.enter_context(socket.create_server(("127.0.0.1", each)))
            return port
    raise AssertionError("no four ports side by side are free")


def test_a_free_port_is_an_invitation_and_a_taken_one_a_failure(first_port: int) -> None:
    address = f"127.0.0.1:{first_port}"
    with socket.create_server(("127.0.0.1", first_port)):
        (result,) = check_gateway(address, address)
        assert result.level is Level.FAIL
        assert f"process {os.getpid()}" in result.what
    (result,) = check_gateway(address, address)
    assert result.level is Level.WARN
    assert "bottega up" in result.todo
    assert "systemctl start bottega-gateway" in result.todo


def test_the_ports_of_metrics_fleet_and_http_must_be_free_as_well(first_port: int) -> None:
    for offset, whose in ((1, "the gateway's metrics"), (2, "the gateway's fleet"), (3, "HTTP")):
        port = first_port + offset
        with socket.create_server(("127.0.0.1", port)):
            (result,) = check_gateway(f"127.0.0.1:{first_port}", "127.0.0.1:1")
        assert result.level is Level.FAIL
        assert f"port {port}, for {whose}, is taken" in result.what
        assert f"process {os.getpid()}" in result.what


def test_a_controlnet_of_a_model_that_cannot_be_used_is_named_with_its_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for part in ("unet", "vae"):
        (model / part).mkdir(parents=True)
        shutil.copy(WEIGHTS / part / "config.json", model / part)
    nets = model / "controlnets"
    with_config(nets / "good", json.dumps(dict(CONFIG)).encode())
    with_config(nets / "labels", json.dumps({**CONFIG, "num_class_embeds": 7}).encode())
    with_config(nets / "sd15", json.dumps({**CONFIG, "cross_attention_dim": 768}).encode())
    with_config(nets / "shallow", json.dumps({**CONFIG, "use_linear_projection": False}).encode())
    (nets / "empty").mkdir()
    (nets / "depth.safetensors").touch()
    results = list(check_own_controlnets(str(model)))
    assert [result.level for result in results] == [Level.WARN] * 5 + [Level.OK]
    said = (
        "empty.*config.json",
        "num_class_embeds",
        "cross_attention_dim",
        "not those of its config.json",
        "single file",
    )
    assert all(re.search(pattern, result.what) for pattern, result in zip(said, results[:5], strict=True))
    assert results[-1].what.endswith("good")
