"""What a suite takes of its machine while nobody asks for anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until
from tests.support.warm_start.sitecustomize import COLD

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

START_S = 120.0
# What starts do in the background has ended by then, and fleet, links and engine are at rest.
SETTLE_S = 25.0
REST_S = 60.0
MOST_BYTES = 800 << 20
# Processor time of all processes, on a machine that does nothing else.
MOST_CORES = 0.01


@pytest.fixture
def family(tmp_path: Path) -> Iterator[list[psutil.Process]]:
    """The processes of a `bottega up` with the embedded model."""
    printed = tmp_path / "printed"
    command = [sys.executable, "-m", "bottega.client.cli", "up", "--port", "0", "--state", str(tmp_path / "state")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BOTTEGA_")} | COLD
    with printed.open("wb") as output:
        suite = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        started = lambda: "Ready after" in printed.read_text() or suite.poll() is not None  # noqa: E731
        wait_until(started, "the suite to be ready", within_s=START_S)
        assert suite.poll() is None, printed.read_text()
        time.sleep(SETTLE_S)
        yield [psutil.Process(suite.pid), *psutil.Process(suite.pid).children(recursive=True)]
    finally:
        suite.terminate()
        suite.wait(60)


def test_a_suite_at_rest_takes_little_memory_and_little_of_a_core(family: list[psutil.Process]) -> None:
    before, began = [_seconds(process) for process in family], time.monotonic()
    time.sleep(REST_S)
    passed_s = time.monotonic() - began
    shares = [(_seconds(process) - used_s) / passed_s for process, used_s in zip(family, before, strict=True)]
    sizes = [process.memory_full_info().pss for process in family]
    told = "\n".join(
        f"{share:.2%} of a core, {size >> 20} MiB: {' '.join(process.cmdline()[:5])}"
        for process, share, size in zip(family, shares, sizes, strict=True)
    )
    assert sum(sizes) < MOST_BYTES, told
    assert sum(shares) < MOST_CORES, told


def _seconds(process: psutil.Process) -> float:
    """Return the processor time of its threads. /proc/PID/stat counts hundredths of a second, which are too coarse."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
