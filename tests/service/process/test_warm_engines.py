"""Forks in place of the engine processes of tests: they end, stop and die with the process that stands for each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
SERVE = """
import socket, sys
from tests.support.warm_engines import Server
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("serves", flush=True)
    Server(listener).run()
"""
STAND = """
import sys
from tests.support.warm_start.sitecustomize import stand_for_a_fork
stand_for_a_fork(sys.argv[1], "engine", sys.argv[2:])
print("no fork", flush=True)
"""
ENGINE = """
import os, socket, sys
pipe = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
pipe.send(str(os.getpid()).encode())
sys.exit(int(pipe.recv(16) or 1))
"""
Start = Callable[..., tuple[subprocess.Popen[str], socket.socket]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that stands for a fork, and returns it with the pipe to the fork."""
    (tmp_path / "engine.py").write_text(ENGINE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path / "socket")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert server.stdout
    assert server.stdout.readline() == "serves\n"
    pipes: list[socket.socket] = []

    def start(**variables: str) -> tuple[subprocess.Popen[str], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(20.0)
        pipes.append(ours)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", STAND, str(tmp_path / "socket"), "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdout=subprocess.PIPE,
                text=True,
                env=environment | variables,
            )
        return process, ours

    yield start
    for pipe in pipes:
        pipe.close()
    server.communicate(timeout=20)


@pytest.mark.parametrize("status", [0, 7])
def test_it_ends_as_its_fork_ends(start: Start, status: int) -> None:
    process, pipe = start()
    assert int(pipe.recv(16)) != process.pid
    pipe.send(str(status).encode())
    assert process.communicate(timeout=20)[0] == ""
    assert process.returncode == status
    assert pipe.recv(1) == b""


def test_it_dies_as_its_fork_dies(start: Start) -> None:
    process, pipe = start()
    os.kill(int(pipe.recv(16)), signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL


def test_its_fork_is_killed_and_stopped_with_it(start: Start) -> None:
    process, pipe = start()
    fork = psutil.Process(int(pipe.recv(16)))
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: fork.status() == psutil.STATUS_STOPPED, "the fork to be stopped")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: fork.status() != psutil.STATUS_STOPPED, "the fork to go on")
    process.kill()
    process.communicate(timeout=20)
    assert pipe.recv(1) == b""


def test_a_process_that_a_fork_would_not_equal_goes_on_itself(start: Start) -> None:
    process, pipe = start(OMP_NUM_THREADS="3")
    assert process.communicate(timeout=20)[0] == "no fork\n"
    assert pipe.recv(1) == b""
