"""A lock of a folder or file: one process at a time has it, the next one hears which, and it ends with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bottega.storage.folders import HeldElsewhere, ProcessLock

_PATIENCE_S = 20.0
_HOLD = """
import sys
from pathlib import Path
from bottega.storage.folders import ProcessLock
lock = ProcessLock(Path(sys.argv[1]))
lock.acquire()
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def _held(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """By another process, in the block, unless that one is killed before."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"taken\n"
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(_PATIENCE_S)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_second_process_is_told_what_is_in_use_and_by_whom(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "folder" else tmp_path / "some.lock"
    lock = ProcessLock(path)
    with _held(path) as process:
        with pytest.raises(HeldElsewhere) as caught:
            lock.acquire()
        assert (caught.value.path, caught.value.pid) == (path, process.pid)
        assert str(caught.value).startswith(f"{path} is in use by process {process.pid}: ")
    lock.acquire()
    lock.release()


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    with _held(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(_PATIENCE_S)
        lock = ProcessLock(tmp_path)
        lock.acquire()
        lock.release()


def test_a_lock_is_taken_once_and_let_go_once(tmp_path: Path) -> None:
    lock, other = ProcessLock(tmp_path), ProcessLock(tmp_path)
    lock.acquire()
    lock.acquire()
    with pytest.raises(HeldElsewhere) as caught:
        other.acquire()
    assert caught.value.pid == os.getpid()
    lock.release()
    lock.release()
    other.acquire()
    other.release()


def test_a_process_whose_locks_cannot_be_seen_is_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.storage.folders._PROCESSES", tmp_path / "nothing")
    with _held(tmp_path), pytest.raises(HeldElsewhere, match="in use by another process"):
        ProcessLock(tmp_path).acquire()
