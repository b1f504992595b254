"""Hosts at a switch, which can be unplugged: processes in network namespaces of their own.

The namespaces have no names and end with the processes in them; nothing of the machine's own network is read or
changed. Addresses are those that are kept for documentation (RFC 5737), and exist in the namespaces alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

SWITCH = "203.0.113.1"
"""Address of the process that has made the switch."""
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
# A command of a process that takes longer than this ends the process.
_COMMAND_S = 60
_END_S = 10.0


def why_none() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root alone"
    missing = [name for name in ("unshare", "ip") if _find(name) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)} (util-linux, iproute2), not installed here"
    commands = "link add one type veth peer name other\n"
    trial = [_tool("unshare"), "--net", _tool("ip"), "-batch", "-"]
    tried = subprocess.run(trial, input=commands, text=True, capture_output=True, timeout=_END_S, check=False)
    return f"network namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def configure(commands: str) -> None:
    """Has ip change the network of this process's namespace. commands: as of ip(8), one a line."""
    subprocess.run([_tool("ip"), "-batch", "-"], input=commands, text=True, timeout=_END_S, check=True)


class NamespaceProcess:
    """A process alone in a namespace. It ends with its stdin, so with this process, however that ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [_tool("unshare"), "--net", sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """By which others move devices into its namespace: once it has been configured, it has one."""
        return self._process.pid

    def configure(self, commands: str) -> None:
        """Has `configure` run in the namespace."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(commands) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline(), "it ended in the middle of a command"

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
        self._process = NamespaceProcess()
        self._process.configure("link set lo up")
        configure(f"link add {self._port} type veth peer name net0 netns {self._process.pid}\n")
        configure(f"link set {self._port} master switch up\n")
        self._process.configure(f"address add {self.address}/24 dev net0\nlink set net0 up\n")

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


def _serve() -> None:
    """Runs the commands of stdin, a line each, until there are no more."""
    for line in sys.stdin:
        signal.alarm(_COMMAND_S)
        configure(json.loads(line))
        print(flush=True)
        signal.alarm(0)


def _find(name: str) -> str | None:
    return shutil.which(name, path=_PATH)


def _tool(name: str) -> str:
    found = _find(name)
    assert found, "see why_none"
    return found


if __name__ == "__main__":
    _serve()
