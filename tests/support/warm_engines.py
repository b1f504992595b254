"""A process that has imported what engines import, and forks engine processes for the tests of a run.

`python -m tests.support.warm_engines SOCKET` serves until its stdin ends. It has one thread, which forking needs.
`tests.support.warm_start.sitecustomize` is the other end: what an engine process does when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bottega.device.engine_start import lean_imports
from bottega.manifest import load_object, read_services
from bottega.process.engine_supervisor import engine_environment
from tests.support.init_keys import remember_init_keys
from tests.support.warm_start.sitecustomize import CONVERSION, CORE_LIMIT, FORKED, INSPECTION, SERVER, traits

_STOP_S = 10.0
_MAX_ORDER_BYTES = 1 << 20
# How often it looks whether a process that stands for an engine was stopped (SIGSTOP) or goes on.
_LOOK_S = 0.05
# <sys/prctl.h>
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def warm_engines(environment: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Run the process; yield the environment of processes whose engines it shall fork."""
    starts = str(Path(__file__).parent / "warm_start")
    path = os.pathsep.join([starts, *filter(None, [environment.get("PYTHONPATH")])])
    warm = {**environment, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        socket_path = f"{folder}/engines"
        command = [sys.executable, "-m", "tests.support.warm_engines", socket_path]
        engines = {**warm, "TRANSFORMERS_VERBOSITY": "error", **engine_environment(exclusive_cores=False)}
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=engines, start_new_session=True) as server:
            try:
                yield {**warm, SERVER: socket_path}
            finally:
                assert server.stdin is not None
                server.stdin.close()
                try:
                    server.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    server.kill()


@dataclass(slots=True, kw_only=True)
class _Fork:
    """A fork, and the process that stands for it."""

    pid: int
    ended: int
    """A file that is readable when the fork has ended."""
    stands_for_it: int
    """Process id of the other one."""
    stopped: bool = False


class Server:
    """Forks engines.

    A fork is killed or stopped when the process that stands for it is, and that process hears how the fork ended.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._traits = traits()
        self._selector = selectors.DefaultSelector()
        self._forks: dict[socket.socket, _Fork] = {}
        """By the link to the process that stands for it."""
        self._forked = 0
        self._refused: list[str] = []

    def run(self) -> None:
        """Serve until stdin ends."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_LOOK_S if self._forks else None):
                if key.fileobj is sys.stdin:
                    return self._end()
                if key.fileobj is self._listener:
                    self._answer(self._listener.accept()[0])
                elif isinstance(key.fileobj, socket.socket):  # the process that stands for a fork has ended
                    if key.fileobj in self._forks:
                        self._bury(key.fileobj, kill=True)
                elif key.data in self._forks:
                    self._bury(key.data, kill=False)
            self._stop_with_the_others()

    def _answer(self, link: socket.socket) -> None:
        message, files, *_ = socket.recv_fds(link, _MAX_ORDER_BYTES, 4)
        refusal = self._refusal(json.loads(message)) if message else ""
        if not message or refusal:
            self._refused += [refusal] if refusal else []
            link.close()
        elif (pid := os.fork()) == 0:
            _become(json.loads(message), files)
        else:
            self._forked += 1
            ended = os.pidfd_open(pid)
            self._forks[link] = _Fork(pid=pid, ended=ended, stands_for_it=json.loads(message)["process"])
            self._selector.register(link, selectors.EVENT_READ)
            self._selector.register(ended, selectors.EVENT_READ, link)
            with contextlib.suppress(OSError):  # the other process was killed meanwhile, as the link will say
                link.send(FORKED)
        for file in files:
            os.close(file)

    def _refusal(self, order: Mapping[str, Any]) -> str:
        """Return why a fork would not be what the process is; empty if it would."""
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return f"other threads: {threading.enumerate()}"
        asked, given = json.loads(json.dumps(self._traits)), order["traits"]
        if order["module"] in (CONVERSION, INSPECTION):
            # How threads wait, memory is had and crashes are dumped is of no matter to their results.
            for each in (asked, given):
                for name in ("GLIBC_TUNABLES", "GOMP_SPINCOUNT", "MKL_NUM_THREADS"):
                    each["environment"].pop(name, None)
                del each["limits"][CORE_LIMIT]
        return "; ".join(f"{name}: {given[name]}" for name in asked if asked[name] != given[name])

    def _bury(self, link: socket.socket, *, kill: bool) -> None:
        fork = self._forks.pop(link)
        if kill:
            os.kill(fork.pid, signal.SIGKILL)
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):
            link.send(str(os.waitstatus_to_exitcode(status)).encode())
        for file in (link, fork.ended):
            self._selector.unregister(file)
        link.close()
        os.close(fork.ended)

    def _stop_with_the_others(self) -> None:
        for fork in self._forks.values():
            with contextlib.suppress(OSError):
                state = (
                    Path(f"/proc/{fork.stands_for_it}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
                )
                if fork.stopped != (state == "T"):
                    fork.stopped = state == "T"
                    os.kill(fork.pid, signal.SIGSTOP if fork.stopped else signal.SIGCONT)

    def _end(self) -> None:
        for link in list(self._forks):
            self._bury(link, kill=True)
        print(f"\nEngines: {self._forked} forked, {len(self._refused)} not", *sorted(set(self._refused)), sep="\n  ")


def _become(order: Mapping[str, Any], files: list[int]) -> NoReturn:
    """Be the engine process, in a fork."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        first = 1 + max(order["pipe"], *files)
        spare = [os.dup2(file, first + number) for number, file in enumerate(files)]
        for file, target in zip(spare, (0, 1, 2, order["pipe"]), strict=False):
            os.dup2(file, target)
        last = max(2, order["pipe"])
        os.closerange(3, last)
        os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = [order["module"], *order["arguments"]]
        sys.path[:] = [order["folder"], *order["path"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - a fork must not go on as the server
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _load_embedded_model() -> None:
    """Load the model of most engines once: what libraries and `ModelSamplers` remember of it, forks need not make."""
    import torch

    from bottega.miniature import WEIGHTS
    from bottega.model.loading import load_model

    load_model(WEIGHTS, name="miniature", device=torch.device("cpu"), dtype=torch.float32)


def main() -> None:
    """Import, then serve. Whoever asks meanwhile waits, as it would import for as long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        with lean_imports():
            importlib.import_module("bottega.controlnet.engine_loop")
            importlib.import_module("bottega.worker.engine.loop")
            importlib.import_module("bottega.worker.conversion.tensors")
            for service in read_services():
                if service.engine_add_on:
                    load_object(service.engine_add_on)
        remember_init_keys()
        _load_embedded_model()
        Server(listener).run()


if __name__ == "__main__":
    main()
