"""What `bottega doctor` finds, on machines, folders and gateways that the tests make."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.client.checkup.gateway import check_gateway
from bottega.client.checkup.machine import (
    check_cores,
    check_disk,
    check_open_files,
    check_packages,
    check_python,
    pinned_versions,
)
from bottega.client.checkup.model import check_model
from bottega.client.types.checks import Level
from bottega.manifest import VARIABLE
from bottega.miniature import WEIGHTS

TESTED = {"bottega-libs": "0.1.0", "bottega-services": "0.1.0", "torch": "2.13.0+cpu"}
WEIGHTS_FILE = "unet/diffusion_pytorch_model.safetensors"
WORKER = dict.fromkeys(("accelerate", "diffusers", "numpy", "safetensors", "transformers"), "1.0")


@pytest.mark.parametrize(("version", "level"), [((3, 10), Level.FAIL), ((3, 11), Level.OK), ((3, 13), Level.FAIL)])
def test_python_must_be_one_that_the_suite_supports(version: tuple[int, int], level: Level) -> None:
    assert [finding.level for finding in check_python(version)] == [level]


def test_packages_at_tested_versions_are_well_whatever_build_of_torch() -> None:
    findings = list(check_packages({**WORKER, **TESTED}, {"torch": "2.13.0"}))
    assert [finding.level for finding in findings] == [Level.OK, Level.OK]


def test_packages_at_other_versions_are_named() -> None:
    *_, finding = check_packages({**WORKER, **TESTED, "grpcio": "1.0"}, {"grpcio": "1.85.1"})
    assert finding.level is Level.WARN
    assert "grpcio 1.0 instead of 1.85.1" in finding.what


def test_parts_of_different_releases_fail() -> None:
    assert next(check_packages({**TESTED, "bottega-protos": "0.2.0"}, {})).level is Level.FAIL


def test_a_machine_without_torch_is_told_which_services_cannot_run_there() -> None:
    _, *findings = check_packages({"bottega-libs": "0.1.0", "bottega-services": "0.1.0", "numpy": "2.0"}, {})
    assert {finding.level for finding in findings} == {Level.WARN}
    assert [finding.what.partition(" can run here")[0] for finding in findings] == ["no worker", "no ControlNet server"]
    assert all("torch" in finding.what for finding in findings)
    assert "bottega-services[worker]" in findings[0].todo


def test_a_manifest_that_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.txt"))
    _, finding, *_ = check_packages(TESTED, {})
    assert finding.level is Level.FAIL
    assert "none.txt" in finding.what


def test_pins_come_from_the_checkout() -> None:
    assert pinned_versions()["torch"] == "2.13.0"


def test_an_active_wait_policy_is_warned_of() -> None:
    assert [finding.level for finding in check_cores(2, "ACTIVE")] == [Level.WARN, Level.OK]
    assert [finding.level for finding in check_cores(2, "passive")] == [Level.OK]


def test_a_machine_that_lets_a_process_open_few_files_is_told_what_to_raise() -> None:
    (finding,) = check_open_files(1024)
    assert finding.level is Level.WARN
    assert "LimitNOFILE" in finding.todo
    assert [finding.level for limit in (65_536, -1) for finding in check_open_files(limit)] == [Level.OK, Level.OK]


def test_the_disk_of_a_state_folder_that_is_not_there_yet_is_looked_at(tmp_path: Path) -> None:
    (finding,) = check_disk(tmp_path / "not" / "yet")
    assert finding.level in (Level.OK, Level.WARN)
    assert not (tmp_path / "not").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_state_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert [finding.level for finding in check_disk(tmp_path / "state")] == [Level.FAIL]


def test_the_embedded_model_is_well() -> None:
    (finding,) = check_model("miniature")
    assert finding.level is Level.OK
    assert "4 files of weights" in finding.what


def test_a_folder_that_is_no_model_fails(tmp_path: Path) -> None:
    assert [finding.level for finding in check_model(str(tmp_path))] == [Level.FAIL]
    (tmp_path / "model_index.json").write_text("[]")
    assert [finding.level for finding in check_model(str(tmp_path))] == [Level.FAIL]


def cut(size_bytes: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:size_bytes])


def headed(header: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        pytest.param(cut(-1), WEIGHTS_FILE, id="cut off"),
        pytest.param(cut(4), WEIGHTS_FILE, id="tiny"),
        pytest.param(lambda path: path.write_bytes(b"\xff" * 100), WEIGHTS_FILE, id="endless header"),
        pytest.param(headed(b"no JSON"), WEIGHTS_FILE, id="no JSON"),
        pytest.param(headed(b"[]"), WEIGHTS_FILE, id="a list"),
        pytest.param(headed(b'{"a": {"shape": [1], "data_offsets": [0]}}'), WEIGHTS_FILE, id="no end"),
        pytest.param(lambda path: path.rename(path.with_suffix(".bin")), "pickled", id="pickled"),
        pytest.param(lambda path: shutil.rmtree(path.parent), "unet", id="missing"),
    ],
)
def test_a_model_of_which_a_part_cannot_be_used_fails(
    tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(WEIGHTS, model)
    damage(model / WEIGHTS_FILE)
    (finding,) = check_model(str(model))
    assert finding.level is Level.FAIL
    assert named in finding.what


def test_a_free_port_is_an_invitation_and_a_taken_one_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (finding,) = check_gateway(address, address)
        assert finding.level is Level.FAIL
        assert f"process {os.getpid()}" in finding.what
    (finding,) = check_gateway(address, address)
    assert finding.level is Level.WARN
    assert "bottega up" in finding.todo


@pytest.mark.parametrize(("offset", "whose"), [(1, "metrics"), (2, "fleet")])
def test_the_ports_of_metrics_and_fleet_must_be_free_as_well(offset: int, whose: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (finding,) = check_gateway(f"127.0.0.1:{port - offset}", "127.0.0.1:1")
    assert finding.level is Level.FAIL
    assert f"port {port}, for the gateway's {whose}, is taken" in finding.what
    assert f"process {os.getpid()}" in finding.what
