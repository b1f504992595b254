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
# What starts do in the background has ended by then.
SETTLE_S = 20.0
REST_S = 60.0
MOST_BYTES = 800 << 20
# On two shared cores where others work as well. What is left are reports of each service, twice a second, and looks at
# ports: 0.01 is the aim.
MOST_CORES = 0.1


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
    before, began = sum(map(_seconds, family)), time.monotonic()
    time.sleep(REST_S)
    spent = (sum(map(_seconds, family)) - before) / (time.monotonic() - began)
    taken = {f"{process.pid} {' '.join(process.cmdline()[:5])}": process.memory_full_info().pss for process in family}
    told = "\n".join(f"{size >> 20} MiB {name}" for name, size in taken.items())
    assert sum(taken.values()) < MOST_BYTES, told
    assert spent < MOST_CORES


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
