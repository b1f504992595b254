"""What the SQLite job store acknowledges is on the disk: the connection that writes, and its calls of the system."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bottega.gateway.jobs.store import SqliteJobStore
from tests.support.job_store_backends import record

ROOT = Path(__file__).resolve().parents[5]
# Of sqlite3.h: what `PRAGMA synchronous = FULL` means.
FULL = 2
# A traced process is slow, and tests share the cores.
PATIENCE_S = 60.0


async def test_the_connection_that_writes_waits_for_the_disk_at_every_commit(tmp_path: Path) -> None:
    store = SqliteJobStore(tmp_path / "jobs.sqlite")
    await store.open()
    try:
        await store.add(record("j1"))
        pragmas = ("synchronous", "journal_mode")
        told = await store._writer.run(
            lambda write: [write.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
        )
        assert told == [FULL, "wal"]
    finally:
        await store.close()


def test_nothing_is_acknowledged_while_what_was_written_of_it_may_be_lost(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    _traced_writer(tmp_path / "jobs.sqlite", trace)
    unsafe: set[str] = set()
    acknowledged: list[str] = []
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        if said := re.search(r'write\(1<.*"(added|completed) ', line):
            acknowledged.append(said[1])
            assert not unsafe, f"{said[1]} was said before {unsafe} was on the disk"
        elif wrote := re.search(r"pwrite64\(\d+<(.*/jobs\.sqlite(?:-wal|-journal)?)>", line):  # not what readers share
            unsafe.add(wrote[1])
        elif safe := re.search(r"f(?:data)?sync\(\d+<(.*)>\) += 0", line):
            unsafe.discard(safe[1])
    assert acknowledged == ["added", "completed"]


def _traced_writer(path: Path, trace: Path) -> None:
    """A process adds one job and completes it; `trace` has what it writes, and waits for, in the order of time."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    # -I2: told to end, it does, and its process with it.
    calls = ["strace", "-I2", "-f", "-y", "-e", "trace=write,pwrite64,fsync,fdatasync", "-o", str(trace)]
    writer = [sys.executable, "-m", "tests.support.job_store_writer", str(path), "j", "1"]
    with subprocess.Popen([*calls, *writer], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        process.terminate()
        _, why = process.communicate(timeout=PATIENCE_S)
    if b"PTRACE" in why:
        pytest.skip("processes cannot be traced here")
    assert said == [b"added j-0\n", b"completed j-0\n"], why
