"""Processes that a fork server forks: each is what a new interpreter would be, and ends as one."""

from __future__ import annotations

import asyncio
import contextlib
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

from bottega.process.fork_server import ForkedProcess, ForkOrder, ForkServer, _show_command, fork_server
from tests.support.services import runs
from tests.support.waiting import EVENTUALLY_S, eventually, wait_until

SERVE = """
import os, socket, sys
from bottega.process.fork_server import serve
os.umask(0o27)
serve(socket.socket(fileno=int(sys.argv[1])), "a fork server", parent=os.getppid())
"""
TOY = """
import atexit, json, os, resource, signal, sys
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
        atexit.register(print, "an exit function ran")
        sys.exit(3)
    elif sys.argv[1] == "fails":
        atexit.register(print, "an exit function ran")
        raise ValueError("no such thing")
    print("waits", flush=True)
    signal.pause()
if __name__ == "__main__":
    main()
"""
PARENT = """
import signal
from bottega.process.fork_server import fork_server
with fork_server():
    print(flush=True)
    signal.pause()
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

    async def started(self, *more: str) -> ForkedProcess:
        """Return a process that waits for signals. more: arguments that it does not read."""
        process = await self.start("waits", *more)
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
        try:
            yield Forking(ForkServer(ours), process, order, tmp_path / "printed")
        finally:
            process.kill()
            for fork in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if fork.cwd() == str(folder):
                        fork.kill()


async def test_a_fork_is_what_a_new_interpreter_would_be(forking: Forking) -> None:
    process = await forking.start("tells", COMMENT, text=b"hello\n")
    assert await process.wait() == 3, forking.printed.read_text()
    said, warning, last_line = forking.printed.read_text().splitlines()
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
    assert last_line == "an exit function ran"


async def test_tools_show_the_command_of_a_fork(forking: Forking) -> None:
    process = await forking.started()
    shown = psutil.Process(process.pid)
    assert [word for word in shown.cmdline() if word] == [sys.executable, "-m", "toy", "waits"]
    long = await forking.started(*[COMMENT] * 200)
    command = f"{sys.executable} -m toy waits {COMMENT}"
    assert " ".join(psutil.Process(long.pid).cmdline()).startswith(command), "what is longer than its memory is cut"
    assert shown.name() == Path(sys.executable).name
    assert psutil.Process(forking.process.pid).cmdline()[0] == "a fork server"
    assert shown.ppid() == forking.process.pid
    for each in (process, long):
        each.terminate()
        await each.wait()


async def test_a_fork_that_a_signal_ends_says_so(forking: Forking) -> None:
    first, second = await forking.started(), await forking.started()
    psutil.Process(first.pid).kill()
    assert await first.wait() == -signal.SIGKILL
    assert psutil.Process(second.pid).is_running()
    second.terminate()
    assert await second.wait() == -signal.SIGTERM


async def test_a_fork_that_fails_prints_its_traceback(forking: Forking) -> None:
    process = await forking.start("fails")
    assert await process.wait() == 1
    *_, error, last_line = forking.printed.read_text().splitlines()
    assert error == "ValueError: no such thing"
    assert last_line == "an exit function ran"


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


async def test_a_fork_whose_start_is_not_awaited_any_more_is_killed(forking: Forking) -> None:
    start = asyncio.create_task(forking.start("waits"))
    await asyncio.sleep(0)
    wait_until(lambda: forking.printed.exists() and "waits" in forking.printed.read_text(), "it to run, unnoticed")
    (fork,) = psutil.Process(forking.process.pid).children()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await eventually(lambda: not fork.is_running())


async def test_a_fork_whose_folder_is_gone_does_not_start(forking: Forking) -> None:
    gone = replace(forking.order, folder="/no/such/folder")
    with pytest.raises(ChildProcessError):
        await replace(forking, order=gone).start("waits")
    assert "FileNotFoundError" in forking.printed.read_text()


def test_a_server_that_fails_prints_its_traceback(forking: Forking) -> None:
    forking.server._link.send(b"no order")
    _, printed = forking.process.communicate(timeout=EVENTUALLY_S)
    assert "JSONDecodeError" in printed


def test_a_server_that_hangs_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (server,) = psutil.Process(parent.pid).children()
        wait_until(lambda: "bottega fork server" in " ".join(server.cmdline()), "the server to watch its parent")
        server.suspend()
        parent.kill()
    try:
        wait_until(lambda: not runs(server), "the server to end")
    finally:
        if server.is_running():
            server.kill()


def test_a_command_whose_memory_the_kernel_hides_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(f"1 (name) S {'0 ' * 49}")
    monkeypatch.setattr("bottega.process.fork_server._PROCESS", tmp_path)
    _show_command("another", "command")  # writing to address 0 would end this process
    assert (tmp_path / "comm").read_text() == Path(sys.executable).name


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
    await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    assert await process.wait() == -signal.SIGKILL  # nobody knows how it ends


def test_a_process_with_threads_forks_no_server() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with fork_server() as server:
        assert server is None
    end.set()
    thread.join()
