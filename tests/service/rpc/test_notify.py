"""What systemd hears of a real gateway process: ready when it serves, alive while it lives, stopping when it drains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bottega.rpc.operation.sd_notify import SystemdNotifier
from tests.support.services import gateway_config

WATCHDOG_S = 0.4


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens as systemd does, and what NOTIFY_SOCKET says."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        path = str(tmp_path / "notify")
        listener.bind(path)
        listener.settimeout(20)
        yield listener, path


@contextlib.contextmanager
def gateway(address: str, folder: Path, first: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A gateway as systemd starts it, which logs into a pipe. first: what a shell does before."""
    config = folder / "gateway.yaml"
    config.write_text(json.dumps(gateway_config(codec_processes=1)))
    process = subprocess.Popen(
        ["bash", "-c", f'{first}exec "$0" -m bottega.gateway --config "$1"', sys.executable, str(config)],
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "NOTIFY_SOCKET": address,
            "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
            "BOTTEGA_STATE": str(folder / "state"),
        },
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def heard(listener: socket.socket) -> list[str]:
    return listener.recv(4096).decode().splitlines()


def heard_until(listener: socket.socket, line: str) -> None:
    while line not in heard(listener):
        pass


@pytest.mark.alone
def test_a_service_tells_systemd_when_it_is_ready_that_it_lives_and_when_it_stops(
    systemd: tuple[socket.socket, str], tmp_path: Path
) -> None:
    listener, address = systemd
    with gateway(address, tmp_path) as process:
        heard_until(listener, "READY=1")
        began = time.monotonic()
        for _ in range(4):
            assert heard(listener) == ["WATCHDOG=1"]
        assert time.monotonic() - began < 4 * WATCHDOG_S, "it tells too seldom that it lives"
        with grpc.insecure_channel(_served(process)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5)  # type: ignore[attr-defined]  # a gap in its types
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        heard_until(listener, "STOPPING=1")
        assert process.wait(20) == 0


def test_a_gateway_whose_disk_is_full_when_it_starts_counts_as_started_and_answers(
    systemd: tuple[socket.socket, str], tmp_path: Path
) -> None:
    listener, address = systemd
    with gateway(address, tmp_path, "ulimit -f 0; ") as process:
        while "READY=1" not in (lines := heard(listener)):
            pass
        assert lines[1].startswith("STATUS=answers calls, but is not ready")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        heard_until(listener, "STOPPING=1")
        assert process.wait(20) == 0


def test_a_socket_may_be_an_abstract_one() -> None:
    name = f"bottega-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(20)
        SystemdNotifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert heard(listener) == ["READY=1", "STATUS=serving"]


def test_a_long_start_asks_systemd_for_as_much_time_as_until_its_next_word(
    systemd: tuple[socket.socket, str],
) -> None:
    listener, address = systemd
    SystemdNotifier({"NOTIFY_SOCKET": address}).extend_start("loading unet, 3.1 of 5.1 GB", within_s=120.0)
    assert heard(listener) == ["EXTEND_TIMEOUT_USEC=180000000", "STATUS=loading unet, 3.1 of 5.1 GB"]


def test_a_process_that_the_watchdog_is_not_for_says_nothing(tmp_path: Path) -> None:
    for environment in ({}, {"WATCHDOG_USEC": "400000", "WATCHDOG_PID": str(os.getpid() + 1)}, {"WATCHDOG_USEC": "x"}):
        assert SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path), **environment})._watchdog_s is None


def test_a_manager_that_has_gone_is_logged_and_hurts_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert "systemd could not be notified" in caplog.text
    SystemdNotifier({}).ready()
    assert len(caplog.records) == 1


def _served(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr
    for line in process.stderr:
        if json.loads(line).get("event") == "serving":
            return str(json.loads(line)["address"])
    raise AssertionError("it never served")
