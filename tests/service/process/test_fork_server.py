"""Processes that a fork server forks: each is what a new interpreter would be, and ends as one."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from bottega.process.fork_server import ForkedProcess, ForkOrder, ForkServer, fork_server
from tests.support import forked_services
from tests.support.waiting import eventually, wait_until

SERVE = """
import os, socket, sys
from bottega.process.fork_server import serve
os.umask(0o27)
serve(socket.socket(fileno=int(sys.argv[1])), "a fork server")
"""
TOY = """
import json, os, resource, signal, sys
def main():
    if sys.argv[1] == "tells":
        umask = os.umask(0)
        print(json.dumps({
            "name": __name__, "arguments": sys.argv[1:], "pid": os.getpid(), "session": os.getsid(0), "umask": umask,
            "folder": os.getcwd(), "environment": dict(os.environ), "read": sys.stdin.readline(),
            "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "shared": "shared" in sys.modules, "threads": len(os.listdir("/proc/self/task")),
        }))
        print("a warning", file=sys.stderr)
        sys.exit(3)
    elif sys.argv[1] == "fails":
        raise ValueError("no such thing")
    print("waits", flush=True)
    signal.pause()
if __name__ == "__main__":
    main()
"""
THREADS = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
COMMENT = "a long argument " * 20


@dataclass(frozen=True, slots=True)
class Forking:
    """A fork server, and what it needs to start the toy."""

    server: ForkServer
    process: subprocess.Popen[str]
    order: ForkOrder
    printed: Path

    async def start(self, *arguments: str, imports: str = "shared", text: bytes = b"") -> ForkedProcess:
        read_end, write_end = os.pipe()
        os.write(write_end, text)
        os.close(write_end)
        order = replace(self.order, arguments=arguments, imports=imports)
        with self.printed.open("wb") as output:
            try:
                return await self.server.start(order, stdin=read_end, output=output.fileno())
            finally:
                os.close(read_end)

    async def started(self) -> ForkedProcess:
        """Return a process that waits for signals."""
        process = await self.start("waits")
        await eventually(lambda: "waits" in self.printed.read_text())
        return process


@pytest.fixture
def forking(tmp_path: Path) -> Iterator[Forking]:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__main__.py").write_text(TOY)
    (tmp_path / "shared.py").write_text("import toy.__main__")
    (tmp_path / "threads.py").write_text(THREADS)
    folder = tmp_path / "folder"
    folder.mkdir()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "SERVER": "its own"},
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    order = ForkOrder(module="toy", arguments=(), environment={"SOME": "thing"}, folder=str(folder), imports="shared")
    with ours, process:
        yield Forking(ForkServer(ours), process, order, tmp_path / "printed")
        process.kill()


async def test_a_fork_is_what_a_new_interpreter_would_be(forking: Forking) -> None:
    process = await forking.start("tells", COMMENT, text=b"hello\n")
    assert await process.wait() == 3, forking.printed.read_text()
    said, warning = forking.printed.read_text().splitlines()
    assert json.loads(said) == {
        "name": "__main__",
        "arguments": ["tells", COMMENT],
        "pid": process.pid,
        "session": process.pid,
        "umask": 0o27,
        "folder": forking.order.folder,
        "environment": {"SOME": "thing"},
        "read": "hello\n",
        "files": [0, 1, 2],
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "interrupt": True,
        "shared": True,
        "threads": 1,
    }
    assert warning == "a warning"


async def test_tools_show_the_command_of_a_fork(forking: Forking) -> None:
    process = await forking.started()
    shown = psutil.Process(process.pid)
    assert [word for word in shown.cmdline() if word] == [sys.executable, "-m", "toy", "waits"]
    assert shown.name() == Path(sys.executable).name
    assert psutil.Process(forking.process.pid).cmdline()[0] == "a fork server"
    assert shown.ppid() == forking.process.pid
    process.terminate()
    await process.wait()


async def test_a_command_longer_than_its_memory_is_cut(forking: Forking) -> None:
    process = await forking.start("waits", *[COMMENT] * 200)
    await eventually(lambda: "waits" in forking.printed.read_text())
    command = f"{sys.executable} -m toy waits {COMMENT}"
    assert " ".join(psutil.Process(process.pid).cmdline()).startswith(command)
    process.terminate()
    await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_fork_that_a_signal_ends_says_so(forking: Forking, number: signal.Signals) -> None:
    first, second = await forking.started(), await forking.started()
    psutil.Process(first.pid).send_signal(number)
    assert await first.wait() == -number
    assert psutil.Process(second.pid).is_running()
    second.terminate()
    assert await second.wait() == -signal.SIGTERM


async def test_a_fork_that_fails_prints_its_traceback(forking: Forking) -> None:
    process = await forking.start("fails")
    assert await process.wait() == 1
    assert "ValueError: no such thing" in forking.printed.read_text()


async def test_forks_of_a_server_that_dies_are_killed(forking: Forking) -> None:
    process = await forking.started()
    forked = psutil.Process(process.pid)
    forking.process.kill()
    assert await process.wait() == -signal.SIGKILL
    await asyncio.to_thread(forked.wait, 10)
    with pytest.raises(BrokenPipeError):
        await forking.start("waits")


async def test_a_server_that_hangs_is_not_waited_for(forking: Forking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.process.fork_server._START_S", 0.1)
    forking.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        await forking.start("waits")
    with pytest.raises(ChildProcessError, match="hangs"):
        await forking.start("waits")


async def test_a_server_does_not_fork_beside_threads(forking: Forking) -> None:
    before = await forking.started()
    with pytest.raises(ChildProcessError):
        await forking.start("waits", imports="threads")
    before.terminate()
    assert await before.wait() == -signal.SIGTERM


async def test_a_server_ends_when_its_parent_does_and_its_forks_go_on(forking: Forking) -> None:
    process = await forking.started()
    forking.server._link.close()
    assert await asyncio.to_thread(forking.process.wait, 10) == 0
    assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
    assert await process.wait() == -signal.SIGKILL  # nobody knows how it ends


def test_the_service_of_a_test_is_a_fork_with_the_methods_of_popen(
    forking: Forking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_services, "_link", forking.server._link)
    order = replace(forking.order, arguments=("waits",))
    with forking.printed.open("wb") as output:
        service = forked_services.ForkedService(order, output)
    wait_until(lambda: "waits" in forking.printed.read_text(), "it to run")
    assert service.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        service.wait(0.01)
    service.terminate()
    assert service.wait(10) == service.returncode == -signal.SIGTERM
    service.kill()  # does nothing to a process that has ended


def test_a_process_with_threads_forks_no_server() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with fork_server() as server:
        assert server is None
    end.set()
    thread.join()
