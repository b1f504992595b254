"""What processes hold is measured; memory that was freed is kept while there is work, and given back at rest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from bottega.process import memory
from bottega.process.memory import available_bytes
from tests.support.waiting import eventually

FREED_MIB = 96
# With an event loop, as a service, or without one, as an engine.
GIVEN_BACK = ("async with memory.trimmed_at_rest():", "if memory.trim_at_rest() is None:")
PROGRAM = f"""
import asyncio
import os
import time

from bottega.process import memory

memory._REST_S = 0.4
memory._AT_REST = 0.01  # it works even if other processes leave it a fiftieth of a core

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
MIB = 1 << 20
MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    4194304 kB\nHugePages_Total:       0\n"
MACHINE = 4096 * MIB
# A limit of 1000 MiB; of the 900 MiB that are used files have 300.
GROUP = {
    "memory.max": f"{1000 * MIB}\n",
    "memory.current": f"{900 * MIB}\n",
    "memory.stat": f"anon {600 * MIB}\ninactive_file {200 * MIB}\nactive_file {100 * MIB}\n",
}
OLD_GROUP = {
    "memory.limit_in_bytes": f"{1000 * MIB}\n",
    "memory.usage_in_bytes": f"{900 * MIB}\n",
    "memory.stat": f"inactive_file 1\ntotal_inactive_file {200 * MIB}\ntotal_active_file {100 * MIB}\n",
}
NO_LIMIT = {**GROUP, "memory.max": "max\n"}


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
    assert meter.resident_bytes == 0
    await eventually(lambda: meter.resident_bytes >= 2**20)
    assert [line.levelname for line in caplog.records if line.exc_info] == ["ERROR"]


def system(root: Path, cgroup: str, groups: Mapping[str, Mapping[str, str]]) -> Path:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    files |= {f"sys/fs/cgroup/{group}/{name}": text for group, held in groups.items() for name, text in held.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "groups", "left"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/a/b\n", {"a/b": GROUP}, 400 * MIB),
        ("0::/a/b\n", {"a/b": NO_LIMIT, "a": GROUP}, 400 * MIB),
        ("0::/a/b\n", {"a/b": {**GROUP, "memory.max": f"{700 * MIB}"}, "a": GROUP}, 100 * MIB),
        ("0::/a/b\n", {"a/b": {**GROUP, "memory.max": f"{500 * MIB}"}}, 0),
        ("0::/a\n", {"a": {**GROUP, "memory.max": f"{1 << 60}"}}, MACHINE),
        ("0::/a/b\n", {".": GROUP}, 400 * MIB),
        ("0::/../../b\n", {".": GROUP}, 400 * MIB),
        ("9:name=systemd:/\n4:cpu,memory:/a\n0::/\n", {"memory/a": OLD_GROUP}, 400 * MIB),
        ("4:memory:/of/the/host\n", {"memory": OLD_GROUP}, 400 * MIB),
        ("4:cpu:/a\n", {"memory/a": OLD_GROUP}, MACHINE),
    ],
)
def test_the_least_of_machine_and_groups_counts(
    tmp_path: Path, cgroup: str, groups: Mapping[str, Mapping[str, str]], left: int
) -> None:
    assert available_bytes(system(tmp_path, cgroup, groups)) == left


def test_nothing_is_known_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_it_is_what_this_machine_has_at_most() -> None:
    found = available_bytes()
    assert found is not None
    assert 0 < found <= psutil.virtual_memory().total
