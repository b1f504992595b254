"""Trials of faults, each in a copy of the tree: made, tested, undone. The tree itself is never touched."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.faults.catalogue import ROOT, Fault, Place

_COPIED = ("libs", "services", "kernels", "protos", "tests", "load", "deploy", "pyproject.toml", "Makefile")
_PYTEST = ("-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "--timeout=60", "--override-ini=addopts=")
_MOST_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """status: pytest's; None where it did not end in time. said: its last words."""

    status: int | None
    seconds: float
    said: str

    @property
    def caught(self) -> bool:
        """Whether a test failed. That none could be collected is no catch."""
        return self.status == pytest.ExitCode.TESTS_FAILED

    @property
    def word(self) -> str:
        return "caught" if self.caught else "MISSED" if self.status == pytest.ExitCode.OK else "BROKEN"


Report = Callable[[Fault, Outcome], None]


def try_all(placed: Sequence[tuple[Fault, Place]], *, at_once: int, report: Report) -> list[Outcome]:
    """Tries every fault, so many at a time, after its tests have been seen to pass without any."""
    waiting: queue.SimpleQueue[tuple[Fault, Place]] = queue.SimpleQueue()
    for each in placed:
        waiting.put(each)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        trees = [_Tree(Path(folder) / str(number)) for number in range(at_once)]
        sound = trees[0].test(sorted({test for _, place in placed for test in place.tests}), most_s=5 * _MOST_S)
        if sound.status != pytest.ExitCode.OK:
            print(f"without any fault the tests do not pass:\n{sound.said}", flush=True)
            return []
        threads = [threading.Thread(target=_try, args=(tree, waiting, outcomes, report)) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return outcomes


def _try(tree: _Tree, waiting: queue.SimpleQueue[tuple[Fault, Place]], outcomes: list[Outcome], report: Report) -> None:
    while True:
        try:
            fault, place = waiting.get_nowait()
        except queue.Empty:
            return
        right = tree.read(place.file)
        tree.write(place.file, right.replace(fault.text, fault.becomes))
        outcome = tree.test(place.tests, most_s=_MOST_S)
        tree.write(place.file, right)
        outcomes.append(outcome)
        report(fault, outcome)


class _Tree:
    """A copy of the tree; weights, which are large and never written in place, are shared where the disk can."""

    _times = count(1_600_000_000)

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(source, path / name, ignore=ignored, copy_function=_copy)
            else:
                _copy(str(source), str(path / name))

    def read(self, file: str) -> str:
        return (self._path / file).read_text(encoding="utf-8")

    def write(self, file: str, source: str) -> None:
        """A new file, with a time that no version of it had: Python tells compiled code by time and size."""
        path = self._path / file
        path.unlink()
        path.write_text(source, encoding="utf-8")
        stamp = next(self._times)
        os.utime(path, (stamp, stamp))

    def test(self, tests: Sequence[str], *, most_s: float) -> Outcome:
        code = os.pathsep.join(str(self._path / name) for name in ("libs", "services", "kernels", "protos"))
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *_PYTEST, "--import-mode=importlib", *tests],
            cwd=self._path,
            env={**os.environ, "PYTHONPATH": code},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as run:
            try:
                said, _ = run.communicate(timeout=most_s)
                status: int | None = run.returncode
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, 9)
                said, status = run.communicate()[0], None
        return Outcome(status=status, seconds=time.monotonic() - began, said="\n".join(said.splitlines()[-12:]))


def _copy(source: str, target: str) -> str:
    if Path(source).suffix == ".safetensors":
        try:
            os.link(source, target)
        except OSError:  # another disk
            pass
        else:
            return target
    return shutil.copy2(source, target)
