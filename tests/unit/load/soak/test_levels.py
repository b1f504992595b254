"""What a soak says has grown: levels of its parts, and what of a machine a sample counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from load.soak.levels import Sample, growth, levels, take_sample

LENGTH_S = 1000.0
MIB = 1 << 20


def samples(memory_at: list[float]) -> list[Sample]:
    """One every ten seconds, whose memory is that of its part of the run."""
    count = 100
    return [
        Sample(
            at_s=10.0 * number,
            memory_bytes=round(memory_at[number * len(memory_at) // count]),
            descriptors=50,
            shared_bytes=0,
            disk_bytes=7,
        )
        for number in range(count)
    ]


def test_the_level_is_that_after_the_first_tenth_and_is_compared_with_the_end() -> None:
    filling = [1e6 * part for part in range(10)]
    found = levels(samples([*filling, *[10e6] * 80, *[10.5e6] * 10]), LENGTH_S)
    assert found["memory_bytes"] == (10e6, 10.5e6)
    assert growth(found["memory_bytes"]) == pytest.approx(0.05)
    assert growth(found["descriptors"]) == growth(found["shared_bytes"]) == 0.0


def test_a_run_that_was_too_short_says_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        levels(samples([1.0])[:12], LENGTH_S)


# Holds a memory file of 8 MiB, which its child shares, and ten descriptors more.
HOLDER = """
import os, sys
held = os.memfd_create("held")
os.write(held, bytes(8 << 20))
more = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
child = os.fork()
if child: print("ready", flush=True)
sys.stdin.read()
"""


def test_a_sample_counts_shared_memory_once_and_all_descriptors_and_the_state(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "record").write_bytes(bytes(MIB))
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 64 * MIB)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "ready\n"
        own = psutil.Process(holder.pid)
        found = take_sample(3.0, {"holder": [own, *own.children()]}, tmp_path)
        holder.stdin.close()
    assert found.at_s == 3.0
    assert found.shared_bytes == 8 * MIB
    assert MIB < found.memory_bytes < 200 * MIB
    assert found.descriptors >= 2 * (3 + 1 + 10)
    assert MIB <= found.disk_bytes < 2 * MIB
    gone = take_sample(4.0, {"holder": [own]}, tmp_path)
    assert (gone.memory_bytes, gone.descriptors, gone.shared_bytes) == (0, 0, 0)
