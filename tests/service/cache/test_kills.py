"""Whenever a store is killed, the next one starts by itself, and has nothing that is torn."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cached_latents import WAIT_S
from tests.support.cached_latents_writer import look_through, store_of

# After it says that it has begun it reads, and builds its index, for some 30 ms; after "writing" it inserts and evicts.
_MOMENTS = (("begun", 0.06), ("writing", 0.3))


def _run_until_killed(folder: Path, line: str, after_s: float) -> list[str]:
    """What it said before it was killed, some time after that line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.cached_latents_writer", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    said = []
    with process:
        assert process.stdout is not None
        try:
            for found in process.stdout:
                said.append(found.strip())
                if found.strip() == line:
                    time.sleep(after_s)
                    break
        finally:
            process.kill()
        said += process.stdout.read().split("\n")
    assert process.returncode == -9, "it ended by itself, and said why"
    return said


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_kill_leaves_anything_torn(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    for kill in range(kills):
        line, most_s = _MOMENTS[(kill + 1) % 2]
        said = _run_until_killed(tmp_path, line, chance.uniform(0.0, most_s))
        assert line in said
    store = store_of(tmp_path)
    store.start()
    assert store.flush(WAIT_S)
    assert look_through(store) > 0
    files = {path.name for path in (tmp_path / "latents").glob("??/*") if "@" in path.name}
    rows = {f"{entry.entry}@{step}" for entry in store.entries("", 10_000) for step in entry.steps}
    store.close()
    assert files == rows, "files without a record are swept"
    assert not list(tmp_path.glob("*.damaged-*"))
