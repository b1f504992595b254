"""A process that forks services, which share the memory of the modules that it has imported.

A light service is little more than its imports: they are 37 of its 40 MiB, and take most of the half second until it
serves. A fork has them from the start, and shares their pages until it writes to them.

Only a process with a single thread may fork without executing a program, because a lock that another thread holds would
stay locked in the fork. So `bottega up` forks the server before it starts threads or gRPC's core, and the server only
imports, forks and waits. A fork is otherwise what `python -m MODULE` would be: it has a session, standard files,
environment variables and a command line of its own, and it ends as an interpreter does. The exit functions that the
parent registered before it forked the server run in the forks, too.

The server ends when its parent ends. If it dies earlier, its forks are killed, and the supervisor restarts them as
new interpreters.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

# Seconds until a fork says that it has started: many times what the imports before it take on a busy machine.
_START_S = 30.0
_MAX_ORDER_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 32
_PROCESS = Path("/proc/self")
# <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
# Fields of /proc/PID/stat after the name, which may contain anything: from arg_start to env_end, see proc(5).
_MEMORY_OF_COMMAND = slice(45, 49)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """A process to fork, which becomes `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """All of its environment variables."""
    folder: str
    """Its working directory."""
    imports: str
    """Module that the server imports before it forks. Importing it must not start threads."""


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer | None]:
    """Fork a server from this process for the `with` block. Yield None if this process has other threads."""
    if not _has_one_thread():
        yield None
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        serve(theirs, f"bottega fork server of process {parent}", parent=parent)
    theirs.close()
    ours.setblocking(False)
    try:
        yield ForkServer(ours)
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)  # it may hang
        os.waitpid(pid, 0)


class ForkServer:
    """A link from a process to its fork server."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._hangs = False

    async def start(self, order: ForkOrder, *, stdin: int, output: int) -> ForkedProcess:
        """Start a process, with `output` as stdout and stderr.

        Raises OSError if the server is gone, hangs or cannot fork. After a time-out, every further call raises at once.
        """
        if self._hangs:
            raise ChildProcessError("the server hangs")
        answers = self.send(order, stdin=stdin, output=output)
        try:
            answers.setblocking(False)
            async with asyncio.timeout(_START_S):
                kind, _, pid = (await _answer(answers)).partition(" ")
            if kind != "started":
                raise ChildProcessError("the server did not start the process")
        except BaseException as error:
            self._hangs |= isinstance(error, TimeoutError)
            give_up(answers)
            raise
        return ForkedProcess(int(pid), answers)

    def send(self, order: ForkOrder, *, stdin: int, output: int) -> socket.socket:
        """Send an order, and return a socket with the answers: "started PID", "ended STATUS".

        The socket ends without a status if the server dies, or if it cannot fork. Raises OSError if it is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(self._link, [json.dumps(asdict(order)).encode()], [stdin, output, theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours


class ForkedProcess:
    """A process that the server has forked, with those methods of asyncio's `Process` that a supervisor needs."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The exit status, negative for a signal; None while the process runs."""
        self._answers = answers

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status. Kill it if the server is gone."""
        if self.returncode is None:
            _, _, status = (await _answer(self._answers)).partition(" ")
            self._answers.close()
            if not status:
                self._signal(signal.SIGKILL)
            self.returncode = int(status or -signal.SIGKILL)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the process if it runs."""
        if self.returncode is None:
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


async def _answer(answers: socket.socket) -> str:
    """Return the next answer to an order; empty if there is none. It is not lost if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(answers, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(answers)
    try:
        return answers.recv(_MAX_ANSWER_BYTES).decode()
    except ConnectionResetError:
        return ""


def give_up(answers: socket.socket) -> None:
    """Close the socket with the answers to an order, and kill the process if it has started."""
    with answers, contextlib.suppress(OSError):
        answers.shutdown(socket.SHUT_RD)  # a fork that comes later cannot report its start, and ends
        kind, _, pid = answers.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT).decode().partition(" ")
        if kind == "started":
            os.killpg(int(pid), signal.SIGKILL)


def serve(link: socket.socket, title: str, *, parent: int) -> NoReturn:
    """Be a fork server until the other end of the link is closed, or the parent has ended.

    Args:
        title: The command line of this process, as `ps` shows it.
        parent: PID of the parent.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a server that hangs ends, too
        if os.getppid() != parent:
            os._exit(0)
        os.setsid()  # Ctrl-C in a terminal does not reach it
        _close_other_files(link.fileno())
        _show_command(title)
        gc.disable()  # a collection would write to the pages of all objects
        _Server(link).run()
    except BaseException:  # noqa: BLE001 - it must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(1)


class _Server:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._forks: dict[int, tuple[int, socket.socket]] = {}
        """PIDs of running forks and their sockets for answers, by PID file descriptor."""

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while True:
            for file, _ in poll.poll():
                if file != self._link.fileno():
                    poll.unregister(file)
                    self._reap(file)
                elif (ended := self._next()) is not None:
                    poll.register(ended, select.POLLIN)

    def _next(self) -> int | None:
        """Execute the next order, and return the PID file descriptor of the fork; None if there is no fork."""
        message, files, *_ = socket.recv_fds(self._link, _MAX_ORDER_BYTES, 3)
        if not message:
            os._exit(0)
        order = ForkOrder(**json.loads(message))
        stdin, output, answers_file = files
        answers = socket.socket(fileno=answers_file)
        with contextlib.suppress(Exception):  # the fork fails in the same way, and its log says why
            importlib.import_module(order.imports)
        try:
            if not _has_one_thread():
                raise ChildProcessError(f"{order.imports} starts threads when it is imported")
            gc.freeze()
            if (pid := os.fork()) == 0:
                _become(order, stdin, output, answers)
        except OSError as error:
            print(f"bottega fork server: {error}", file=sys.stderr)
            answers.close()
            return None
        finally:
            os.close(stdin)
            os.close(output)
        ended = os.pidfd_open(pid)
        self._forks[ended] = pid, answers
        return ended

    def _reap(self, ended: int) -> None:
        pid, answers = self._forks.pop(ended)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        with answers, contextlib.suppress(OSError):  # the one who asked may be gone
            answers.send(f"ended {os.waitstatus_to_exitcode(status)}".encode())


def _become(order: ForkOrder, stdin: int, output: int, answers: socket.socket) -> NoReturn:
    """Be the process, in a fork, and end as an interpreter does."""
    status = 1
    try:
        try:
            _run(order, stdin, output, answers)
            status = 0
        except SystemExit as end:
            status = _exit_status(end)
        except BaseException:  # noqa: BLE001 - a fork must not go on as the server
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are not daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _exit_status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _run(order: ForkOrder, stdin: int, output: int, answers: socket.socket) -> None:
    os.setsid()
    for number, file in enumerate((stdin, output, output)):
        os.dup2(file, number)
    os.chdir(order.folder)
    answers.send(f"started {os.getpid()}".encode())
    _close_other_files()
    sys.stdin = os.fdopen(0, closefd=False)  # the parent may have read more from its own than it has used
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.module, *order.arguments]
    _show_command(sys.executable, "-m", order.module, *order.arguments, over_environment=True)
    gc.enable()
    sys.modules.pop(f"{order.module}.__main__", None)  # runpy warns of a module that was imported before it runs
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def _has_one_thread() -> bool:
    return len(list((_PROCESS / "task").iterdir())) == 1


def _close_other_files(kept: int = 2) -> None:
    """Close all files but the standard ones and `kept`. Objects of closed files are never used again."""
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _show_command(*words: str, over_environment: bool = False) -> None:
    """Show `words` as the command of this process, in `ps` and similar tools.

    The command of a fork is that of its parent. It stands in the memory in which the kernel passed it, and the kernel
    shows what is there.

    Args:
        over_environment: Whether a longer command may continue in the memory after it, which held the environment
            variables with which the program was started. The kernel then shows it as one word with spaces.
    """
    (_PROCESS / "comm").write_text(Path(sys.executable).name, encoding="utf-8")
    fields = (_PROCESS / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end, _, end_of_environment = map(int, fields[_MEMORY_OF_COMMAND])
    if start == 0:  # the kernel does not tell
        return
    text = b"\0".join(os.fsencode(word) for word in words)
    if len(text) >= end - start:
        last = end_of_environment if over_environment else end
        text = text.replace(b"\0", b" ")[: last - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text + b"\0", len(text) + 1)
