"""What keeps the cores awake while a bench runs makes way for it, ends with it, and passes on how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from load.bench.awake import cores_awake

_AWAKE = [sys.executable, "-m", "load.bench.awake", sys.executable, "-c"]


def test_every_core_has_a_process_of_the_lowest_class_that_ends_with_it() -> None:
    before = set(psutil.Process().children())
    with cores_awake():
        cores = os.sched_getaffinity(0) - _doubled()
        keeping = _idlers(before)
        assert len(keeping) == len(cores)
        assert {min(os.sched_getaffinity(process.pid)) for process in keeping} == cores
    assert not any(process.is_running() for process in keeping)


def test_the_commands_status_is_its_own() -> None:
    assert subprocess.run([*_AWAKE, "raise SystemExit(3)"], timeout=30, check=False).returncode == 3


def test_a_signal_goes_to_the_command_and_nothing_is_left() -> None:
    code = "import signal; print('ready', flush=True); signal.sigwait({signal.SIGUSR1})"
    process = subprocess.Popen([*_AWAKE, code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM % 256
    assert not psutil.wait_procs(started, timeout=10)[1]


def _idlers(before: set[psutil.Process]) -> list[psutil.Process]:
    """Those of this process's new children that have the lowest class by now."""
    return [
        process
        for process in psutil.Process().children()
        if process not in before and os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    ]


def _doubled() -> set[int]:
    """Cores that are one of several threads of a physical one."""
    said = Path("/sys/devices/system/cpu")
    shared = {core: said / f"cpu{core}/topology/thread_siblings_list" for core in os.sched_getaffinity(0)}
    return {core for core, path in shared.items() if path.is_file() and path.read_text().strip() != str(core)}
