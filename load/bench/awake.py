"""Run a command while no core sleeps: `python -m load.bench.awake COMMAND ...`.

A core that has nothing to do sleeps, and waking it takes microseconds on some machines and a tenth of a millisecond on
others, virtual ones above all: there a process alone on the machine can be slower than beside another one. A process of
the lowest class keeps each core awake, and makes way for every other one at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.synchronize import Semaphore
from pathlib import Path

_TURNS = 1_000_000
_START_S = 30.0


def main() -> int:
    """Run the command; return its exit status."""
    with cores_awake():
        process = subprocess.Popen(sys.argv[1:])
        # Both go to the command, which stops what it started; this ends when it has.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _: process.send_signal(got))
        return process.wait()


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Keep the cores of this process awake while the block runs. Raises TimeoutError where they might sleep."""
    spawn = multiprocessing.get_context("spawn")
    cores = [core for core in os.sched_getaffinity(0) if not _shares_its_units(core)]
    begun = spawn.Semaphore(0)
    keeping = [spawn.Process(target=_keep_awake, args=(core, os.getpid(), begun), daemon=True) for core in cores]
    try:
        for process in keeping:
            process.start()
        # Until then they have no lower class than others: they import what the main module does.
        if not all(begun.acquire(timeout=_START_S) for _ in keeping):
            raise TimeoutError(f"the processes that keep cores awake did not begin within {_START_S:g} s")
        yield
    finally:
        for process in keeping:
            if process.is_alive():
                process.kill()
                process.join()


def _keep_awake(core: int, parent: int, begun: Semaphore) -> None:
    # Where the system shares out by session, a class counts within one alone; this one is new, with least weight.
    os.setsid()
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        autogroup.write_text("19")
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    begun.release()
    while os.getppid() == parent:
        for _ in range(_TURNS):
            pass


def _shares_its_units(core: int) -> bool:
    """Return whether it is one of several threads of a physical core: kept awake, it would take from the others."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return siblings.is_file() and siblings.read_text().strip() != str(core)


if __name__ == "__main__":
    sys.exit(main())
