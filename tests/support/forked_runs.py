"""Tests run in processes that are forked from one that has collected them (`--processes`).

Importing all tests, torch and Diffusers takes as long as a tenth of the tests; so it is done once. A process takes a
group of tests at a time, such as those of a file, and sends its reports. Nothing may have started a thread before.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from _pytest.config import create_terminal_writer

from tests.support.interruption import END_TIMEOUT_S, handle_signals

Group = Sequence[pytest.Item]

# What `--durations` is to show of fixtures.
_SLOW_S = 0.1
# Where most tests wait, more of them run at a time: if the cores were less busy than this, in percent, for so long.
_BUSY, _LOOK_S = 85.0, 3.0
_MOST_MORE = 4
# What has heard an interruption ignores those that follow.
_AGAIN_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Process:
    """A process that runs tests."""

    pid: int
    link: Connection
    running: pytest.Item | None = None
    """The test that it has begun last, until it has ended."""


class ForkedRun:
    """Hands groups of tests to processes and gives their reports to pytest, as if the tests ran here."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._folder: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._forked = 0
        self._ended: set[str] = set()

    def run(self, groups: Sequence[Group], *, at_once: int, fill_cores: bool = False) -> None:
        """Run groups, so many at a time; the first ones begin first.

        Args:
            fill_cores: Run up to four more groups at a time, one after the other when cores are idle.

        Raises:
            pytest.Session.Failed: So many tests failed as pytest was told to end after.
            pytest.Session.Interrupted: A process died.
        """
        waiting = deque(groups)
        processes = [self._fork() for _ in range(min(at_once, len(groups)))]
        most = at_once + _MOST_MORE if fill_cores else at_once
        cores = _Cores()
        try:
            while processes:
                if waiting and len(processes) < most and cores.are_idle():
                    processes.append(self._fork())
                for link in wait([process.link for process in processes], _LOOK_S):
                    (process,) = (each for each in processes if each.link is link)
                    if not self._receive(process, waiting):
                        processes.remove(process)
                        self._bury(process)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
            if left := {item.nodeid for group in groups for item in group} - self._ended:
                raise RuntimeError(f"these tests were not run: {sorted(left)}")
        finally:
            _end(processes)

    def _fork(self) -> _Process:
        here, there = multiprocessing.Pipe()
        self._forked += 1
        pid = os.fork()
        if pid == 0:
            here.close()
            _be_a_process_of_tests(self._session, there, self._folder / f"process-{self._forked}")
        there.close()
        return _Process(pid=pid, link=here)

    def _receive(self, process: _Process, waiting: deque[Group]) -> bool:
        """Take a message of a process; return whether there may be more."""
        try:
            kind, value = process.link.recv()
        except EOFError:
            return False
        hook = self._session.config.hook
        match kind:
            case "asks":
                process.link.send([item.nodeid for item in waiting.popleft()] if waiting else [])
            case "begins":
                process.running = self._items[value]
            case "reports":
                report = hook.pytest_report_from_serializable(config=self._session.config, data=value)
                hook.pytest_runtest_logreport(report=report)
            case "ends":
                hook.pytest_runtest_logfinish(nodeid=value, location=self._items[value].location)
                process.running = None
                self._ended.add(value)
            case "fails":
                where = process.running.nodeid if process.running is not None else "between two tests"
                raise RuntimeError(f"a process of the tests failed at {where}:\n{value}")
        return True

    def _bury(self, process: _Process) -> None:
        """Reap a process; the test in which it died has failed."""
        process.link.close()
        status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if status != 0 and process.running is not None:
            test = process.running
            died = pytest.TestReport(
                nodeid=test.nodeid,
                location=test.location,
                keywords={},
                outcome="failed",
                longrepr=f"its process died with {status}",
                when="call",
            )
            self._session.config.hook.pytest_runtest_logreport(report=died)
        if status != 0:
            self._session.shouldstop = f"a process of the tests died with {status}"


def _end(processes: Sequence[_Process]) -> None:
    """Have processes end what their tests started, as after Ctrl-C."""
    for process in processes:
        process.link.close()
        _interrupt(process)
    began = time.monotonic()
    for process in processes:
        interrupted = time.monotonic()
        while os.waitpid(process.pid, os.WNOHANG) == (0, 0):
            now = time.monotonic()
            if now > began + END_TIMEOUT_S:
                os.kill(process.pid, signal.SIGKILL)
            elif now > interrupted + _AGAIN_S:
                # Python hears a signal that comes just before it begins to sleep only after that, or with the next.
                _interrupt(process)
                interrupted = now
            time.sleep(0.02)


def _interrupt(process: _Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)


class _Cores:
    """The processor cores of the machine, with all that runs on them."""

    def __init__(self) -> None:
        psutil.cpu_percent()
        self._looked_s = time.monotonic()

    def are_idle(self) -> bool:
        """Return whether they were since the last look; False if that was a moment ago."""
        if time.monotonic() < self._looked_s + _LOOK_S:
            return False
        self._looked_s = time.monotonic()
        return bool(psutil.cpu_percent() < _BUSY)


class _Reports:
    """Sends the reports of a process's tests."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config = config
        self._link = link
        self._all = bool(config.getoption("xmlpath"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call" and report.duration < _SLOW_S and not self._all:
            return  # two thirds of the reports say no more than that
        data: dict[str, Any] = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with contextlib.suppress(OSError):  # an interrupted run reads no reports
            self._link.send(("reports", data))


def _be_a_process_of_tests(session: pytest.Session, link: Connection, folder: Path) -> NoReturn:
    """Run the groups that the link brings, and exit."""
    status = 1
    try:
        # What the parent removes when it ends is not for this process to remove.
        atexit._clear()
        random.seed()
        handle_signals()
        config = session.config
        folder.mkdir()
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()  # its files are the parent's
        capture.start_global_capturing()
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        with Path(os.devnull).open("w") as nowhere:
            terminal._tw = create_terminal_writer(config, nowhere)
            config.pluginmanager.register(_Reports(config, link))
            try:
                for item, next_item in _given(session, link):
                    link.send(("begins", item.nodeid))
                    config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
                    link.send(("ends", item.nodeid))
                    if session.shouldfail or session.shouldstop:
                        break
            finally:
                session._setupstate.teardown_exact(None)
        status = 0
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        status = 0  # the run was interrupted
    except BaseException:  # noqa: BLE001 - a fork must not go on as the run
        link.send(("fails", traceback.format_exc()))
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _given(session: pytest.Session, link: Connection) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield the tests that the link brings, each with the next one: fixtures that both use are kept.

    A group is asked for when the last test of the one before it begins, so that none waits for a long one.
    """
    items = {item.nodeid: item for item in session.items}

    def ask() -> list[pytest.Item]:
        link.send(("asks", None))
        return [items[name] for name in link.recv()]

    group = ask()
    while group:
        following: list[pytest.Item] = []
        for number, item in enumerate(group, start=1):
            if number == len(group):
                following = ask()
            yield item, (*group[number:], *following, None)[0]
        group = following
