"""`bottega up` as people start it, for tests: a process of its own, waited for, ended by process id."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bottega.client.instance import InstanceRecord, StateFolder
from tests.support.waiting import wait_until

BOTTEGA = [sys.executable, "-m", "bottega.client.cli"]

# A worker of the miniature is warm in 7 s with free cores; tests share theirs.
START_S = 90.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """A `bottega up` in the foreground."""

    process: subprocess.Popen[bytes]
    state: StateFolder
    environment: dict[str, str]
    """Of the process, without what would name another suite."""
    printed: Path
    """The file of what it prints."""

    def record(self) -> InstanceRecord:
        """Return what the suite has written about itself."""
        found = self.state.read()
        assert found is not None
        return found

    def family(self) -> list[psutil.Process]:
        """Return its processes, without `bottega up` itself."""
        members: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return members


@contextmanager
def running_up(
    folder: Path,
    *options: object,
    environment: Mapping[str, str] | None = None,
    start_s: float = START_S,
    watch: Callable[[Up], None] = lambda _: None,
) -> Iterator[Up]:
    """Start a suite on free ports, and yield it when it is ready.

    Args:
        folder: For its state and for what it prints.
        options: Of the command.
        environment: What its processes have beside this process's.
        start_s: Seconds that it may take until it is ready.
        watch: Called all the time while it starts.
    """
    state, printed = StateFolder(folder / "state"), folder / "printed"
    inherited = {name: value for name, value in os.environ.items() if name not in ("BOTTEGA_ADDRESS", "BOTTEGA_FLEET")}
    folder.mkdir(parents=True, exist_ok=True)
    own = {**inherited, "BOTTEGA_STATE": str(state.root), **(environment or {})}
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [*BOTTEGA, "up", "--port", "0", *map(str, options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=own,
        )
    up = Up(process=process, state=state, environment=own, printed=printed)

    def has_started() -> bool:
        watch(up)
        return "Ready after" in printed.read_text() or process.poll() is not None

    try:
        wait_until(has_started, "the suite to be ready", within_s=start_s)
        assert process.poll() is None, printed.read_text()
        yield up
    finally:
        process.terminate()
        process.wait(_STOP_S)
