"""What a process can have: the least of what its machine and its control groups leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from bottega.process.available_memory import available_bytes

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
