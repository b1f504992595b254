"""Processes in network namespaces of their own: two hosts, and between them a third through which all of theirs goes.

Or hosts at a switch, which can be unplugged. The namespaces have no names and end with the processes in them; nothing
of the machine's own network is read or changed. Addresses are those that are
kept for documentation (RFC 5737), and exist in the namespaces alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEAR, FAR = "192.0.2.2", "198.51.100.2"
SWITCH = "203.0.113.1"
"""Address of the process that has made the switch."""
_NEAR_ROUTER, _FAR_ROUTER = "192.0.2.1", "198.51.100.1"
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
# Of the routes by which the one in between takes for its own what is meant for the far host.
_TABLE = 100
# A command of a process that takes longer than this ends the process.
COMMAND_S = 60
_END_S = 10.0


def why_none() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root alone"
    missing = [name for name in ("unshare", "ip") if _find(name) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)} (util-linux, iproute2), not installed here"
    commands = "link add one type veth peer name other\nrule add iif one lookup 100\n"
    trial = [_tool("unshare"), "--net", _tool("ip"), "-batch", "-"]
    tried = subprocess.run(trial, input=commands, text=True, capture_output=True, timeout=_END_S, check=False)
    return f"network namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def configure(commands: str) -> None:
    """Has ip change the network of this process's namespace. commands: as of ip(8), one a line."""
    subprocess.run([_tool("ip"), "-batch", "-"], input=commands, text=True, timeout=_END_S, check=True)


class NamespaceProcess:
    """A process of a module that serves commands (`serve`), alone in a namespace. One command at a time. It ends with
    its stdin, so with this process, however that ends.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [_tool("unshare"), "--net", sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """By which others move devices into its namespace: once it has answered a command, it has one."""
        return self._process.pid

    def start(self, do: str, **arguments: object) -> None:
        """Sends a command, whose answer `result` returns."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """What the last command returned. Raises AssertionError where the process ended instead."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"{self._module} ended in the middle of a command"
        return json.loads(line)

    def call(self, do: str, **arguments: object) -> Any:
        self.start(do, **arguments)
        return self.result()

    def stop(self) -> None:
        """Ends the process, and with it the namespace."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """near, far: hosts, which reach each other at NEAR and FAR. between: answers whatever near sends to FAR."""

    near: NamespaceProcess
    far: NamespaceProcess
    between: NamespaceProcess


@contextlib.contextmanager
def network(*, host: str, between: str) -> Iterator[Network]:
    """Three namespaces, for as long as the block lasts. host, between: modules of the processes in them, whose commands
    include `configure`.
    """
    with contextlib.ExitStack() as stack:

        def started(module: str) -> NamespaceProcess:
            process = NamespaceProcess(module)
            stack.callback(process.stop)
            return process

        made = Network(near=started(host), far=started(host), between=started(between))
        for process in (made.near, made.far, made.between):
            process.call("configure", commands="link set lo up")
        made.between.call(
            "configure",
            commands=(
                f"link add near type veth peer name net0 netns {made.near.pid}\n"
                f"link add far type veth peer name net0 netns {made.far.pid}\n"
                f"address add {_NEAR_ROUTER}/24 dev near\naddress add {_FAR_ROUTER}/24 dev far\n"
                "link set near up\nlink set far up\n"
                f"rule add iif near lookup {_TABLE}\nroute add local {FAR}/32 dev lo table {_TABLE}\n"
            ),
        )
        for process, address, router in ((made.near, NEAR, _NEAR_ROUTER), (made.far, FAR, _FAR_ROUTER)):
            commands = f"address add {address}/24 dev net0\nlink set net0 up\nroute add default via {router}\n"
            process.call("configure", commands=commands)
        yield made


def enter_own(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by one that runs a module in a namespace of its own, where it can `make_switch`."""
    command = (_tool("unshare"), "--net", sys.executable, "-m", module, *arguments)
    os.execv(command[0], command)


def make_switch() -> None:
    """Make the switch of this process's namespace, to which `SwitchedHost`s are plugged."""
    configure(f"link add switch type bridge\naddress add {SWITCH}/24 dev switch\nlink set switch up\n")


class SwitchedHost:
    """A namespace at the switch: processes that `run_by` starts in it have an address of their own.

    Args:
        number: From 2 to 254; the last part of the address.
    """

    def __init__(self, number: int) -> None:
        self.address = f"{SWITCH.rpartition('.')[0]}.{number}"
        self._port = f"port{number}"
        self._process = NamespaceProcess(__name__)
        self._process.call("configure", commands="link set lo up")
        configure(f"link add {self._port} type veth peer name net0 netns {self._process.pid}\n")
        configure(f"link set {self._port} master switch up\n")
        self._process.call("configure", commands=f"address add {self.address}/24 dev net0\nlink set net0 up\n")

    @property
    def run_by(self) -> Sequence[str]:
        """The beginning of a command that runs on this host."""
        return (_tool("nsenter"), f"--net=/proc/{self._process.pid}/ns/net")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Nothing comes to the host or from it in the block, and neither end of a connection is told."""
        configure(f"link set {self._port} down\n")
        try:
            yield
        finally:
            configure(f"link set {self._port} up\n")

    def stop(self) -> None:
        """End the namespace; the processes in it must have ended."""
        self._process.stop()


def serve(commands: Mapping[str, Callable[..., object]]) -> None:
    """Obeys the lines of stdin, {"do": NAME, ...}, and answers each with one line, until there are no more."""
    for line in sys.stdin:
        signal.alarm(COMMAND_S)
        arguments = json.loads(line)
        print(json.dumps(commands[arguments.pop("do")](**arguments)), flush=True)
        signal.alarm(0)


def _find(name: str) -> str | None:
    return shutil.which(name, path=_PATH)


def _tool(name: str) -> str:
    found = _find(name)
    assert found, "see why_none"
    return found


if __name__ == "__main__":
    serve({"configure": configure})
