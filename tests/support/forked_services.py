"""Services and programs of tests that one process forks, as `bottega up` has its own forked: no new interpreters.

`make test` starts that process. Where there is none, or what a service is to have cannot be had by a fork, tests start
a new interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bottega.manifest import read_services
from bottega.process.fork_server import ForkOrder, ForkServer, give_up, serve
from tests.support.warm_start.sitecustomize import traits

FORK_SERVER = "TESTS_FORK_SERVER"
"""Environment variable with the file of the link to the server."""
# What a service imports is loaded with its first fork.
_START_S = 90.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Forking:
    """The environment and the open file with which a process's children use the server."""

    environment: Mapping[str, str]
    file: int
    """Must be inherited."""


@contextlib.contextmanager
def forked_services(environment: Mapping[str, str]) -> Iterator[Forking]:
    """Run the server. It ends when all processes with the file have."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.forked_services", str(theirs.fileno()), str(os.getpid())]
    with ours, theirs, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]) as server:
        theirs.close()
        try:
            yield Forking({**environment, FORK_SERVER: str(ours.fileno())}, ours.fileno())
        finally:
            ours.close()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


class ForkedService:
    """A fork with those methods of subprocess.Popen that tests use."""

    def __init__(self, order: ForkOrder, output: BinaryIO, stdin: BinaryIO | None = None) -> None:
        """Start a fork. Raise OSError if the server is gone, hangs or cannot fork."""
        server = _server()
        with Path(os.devnull).open("rb") as nothing:
            self._answers = server.send(order, stdin=(stdin or nothing).fileno(), output=output.fileno())
        self.args = (order.module, *order.arguments)
        self.returncode: int | None = None
        self._answers.settimeout(_START_S)
        try:
            kind, self.pid = self._answer()
            if kind != "started":
                raise ChildProcessError(f"{order.module} was not forked")
        except BaseException:
            give_up(self._answers)
            raise

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                kind, status = self._answer()
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._answers.close()
            self.returncode = status if kind == "ended" else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the server says so in a moment
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM if it runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it if it runs."""
        self.send_signal(signal.SIGKILL)

    def _answer(self) -> tuple[str, int]:
        try:
            kind, _, number = self._answers.recv(64).decode().partition(" ")
        except ConnectionResetError:  # the server is gone
            return "", 0
        return kind, int(number or 0)


def may_be_forked() -> bool:
    """Return whether there is a server, and a fork of it has what a child of this process would have."""
    return bool(os.environ.get(FORK_SERVER)) and _own_traits() == _AT_START


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A process of `python -m MODULE`, and pipes from its stdout and stderr and to its stdin."""

    process: subprocess.Popen[bytes] | ForkedService
    output: BinaryIO
    stdin: BinaryIO

    def kill(self) -> int:
        """Kill it, and return its exit status."""
        self.process.kill()
        return self.process.wait(_STOP_S)

    def close(self) -> None:
        """Kill it, and close the pipes."""
        self.kill()
        self.output.close()
        with contextlib.suppress(OSError):  # what it has not read
            self.stdin.close()


def start_program(module: str, *arguments: str, service: str) -> Program:
    """Start a program, as a fork if it may be one: with what forks of that kind of service have imported."""
    (its_stdin, stdin), (output, its_output) = os.pipe(), os.pipe()
    program = functools.partial(Program, output=os.fdopen(output, "rb"), stdin=os.fdopen(stdin, "wb"))
    with os.fdopen(its_stdin, "rb") as reading, os.fdopen(its_output, "wb") as writing:
        if not may_be_forked():
            command = [sys.executable, "-m", module, *arguments]
            return program(process=subprocess.Popen(command, stdin=reading, stdout=writing, stderr=writing))
        (imports,) = (found.fork_after_importing for found in read_services() if found.kind == service)
        folder, environment = str(Path.cwd()), os.environ.copy()
        order = ForkOrder(module=module, arguments=arguments, environment=environment, folder=folder, imports=imports)
        return program(process=ForkedService(order, writing, reading))


def _own_traits() -> Mapping[str, object]:
    python = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    umask = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")]
    return {**traits(), "python": python, "umask": umask}


def _server() -> ForkServer:
    global _link  # noqa: PLW0603 - the process has inherited it, once
    if _link is None:
        _link = socket.socket(fileno=int(os.environ[FORK_SERVER]))
        _link.set_inheritable(False)
    return ForkServer(_link)


_link: socket.socket | None = None
_AT_START = _own_traits()
"""Those of the server, too: both were started with the same environment."""

if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), "fork server of tests", parent=int(sys.argv[2]))
