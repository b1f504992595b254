"""What processes hold is measured; memory that was freed is kept while there is work, and given back at rest."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bottega.background_tasks import running
from bottega.process import memory
from tests.support.waiting import eventually

FREED_MIB = 96
# With an event loop, as a service, or without one, as an engine.
GIVEN_BACK = ("async with memory.trimmed_at_rest():", "if memory.trim_at_rest() is None:")
PROGRAM = f"""
import asyncio
import os
import time

from bottega.process import memory

memory._REST_S = 0.2

def mib():
    return memory.resident_bytes([os.getpid()]) / 2**20

async def main():
    memory.keep_freed_memory()
    before = mib()
    GIVEN_BACK
        for _ in range(2):
            pieces = [b"1" * 2**20 for _ in range({FREED_MIB})]
            del pieces
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                await asyncio.sleep(0)
            print(mib() - before)
            for _ in range(100):
                if mib() - before < {FREED_MIB} / 4:
                    break
                await asyncio.sleep(0.1)
            print(mib() - before)

asyncio.run(main())
"""


@pytest.mark.parametrize("given_back", GIVEN_BACK)
def test_freed_memory_is_kept_while_there_is_work_and_given_back_at_rest(given_back: str) -> None:
    program = PROGRAM.replace("GIVEN_BACK", given_back)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    sizes = [float(line) for line in done.stdout.split()]
    assert min(sizes[0], sizes[2]) > FREED_MIB * 0.9, "fresh pages for every image cost more than the image"
    assert max(sizes[1], sizes[3]) < FREED_MIB / 4


async def test_a_fault_while_memory_is_measured_is_logged_and_it_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pids() -> list[int]:
        if not caplog.records:
            raise OSError("/proc cannot be read")
        return [os.getpid()]

    monkeypatch.setattr(memory, "_LOOK_S", 0.01)
    meter = memory.MemoryMeter(pids)
    async with running(meter.run()):
        await eventually(lambda: meter.resident_bytes >= 2**20)
    assert [line.levelname for line in caplog.records if line.exc_info] == ["ERROR"]
