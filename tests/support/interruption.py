"""An interrupted run of tests ends what its tests started, also where other processes run them (`pytest -n 2`)."""

from __future__ import annotations

import signal
import time
from types import FrameType

import psutil
import pytest

# As long as a service may take to stop, twice: of what a test started, and of what all tests share.
END_TIMEOUT_S = 60.0


def handle_signals(config: pytest.Config) -> None:
    """Turns SIGTERM into Ctrl-C, so that fixtures stop their services when a run is cut short.

    Ctrl-C itself is what tests send to commands, which would ignore it as a run in a shell's background does.
    """
    is_worker = hasattr(config, "workerinput")
    has_workers = not is_worker and bool(config.getoption("tx", None))
    signal.signal(signal.SIGTERM, _interrupt_workers if has_workers else _interrupt_once)
    # Execnet sends Ctrl-C once more to a worker that takes its time.
    signal.signal(signal.SIGINT, _interrupt_once if is_worker else signal.default_int_handler)
    if has_workers:
        config.pluginmanager.register(_Patience())


class _Patience:
    """What pytest calls in the process that has workers."""

    def pytest_keyboard_interrupt(self) -> None:
        """Waits for what the tests started: after this, xdist gives its workers ten seconds."""
        until = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < until and any(map(_started, psutil.Process().children())):
            time.sleep(0.1)


def _started(worker: psutil.Process) -> list[psutil.Process]:
    try:
        return list(worker.children())
    except psutil.NoSuchProcess:
        return []


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C; a second signal, as of make to a group that `timeout` has told already, must not end the ending."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _interrupt_workers(number: int, frame: FrameType | None) -> None:
    for worker in psutil.Process().children():
        worker.terminate()
    _interrupt_once(number, frame)
