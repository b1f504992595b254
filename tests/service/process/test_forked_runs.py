"""Runs of pytest whose tests run in forked processes: nothing is lost, whatever tests do to their process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

_ROOT = Path(__file__).parents[3]


def command(folder: Path, *options: str) -> Sequence[str]:
    ini = ("-c", os.devnull, f"--rootdir={folder}", "-o", "markers=alone", "-o", "asyncio_mode=auto")
    return [sys.executable, "-m", "pytest", "-p", "tests.conftest", *ini, "--processes=2", "-ra", *options, str(folder)]


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Return the status and what the run wrote."""
    # A busy machine took 60 s for what takes 3 s alone; the test's own limit is 120 s.
    arguments = command(folder, *options)
    done = subprocess.run(arguments, cwd=_ROOT, capture_output=True, text=True, timeout=110, check=False)
    return done.returncode, done.stdout


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(f"import os, pathlib, time, pytest\n{text}")


def test_every_test_is_run_once_and_those_that_must_be_alone_at_the_end(tmp_path: Path) -> None:
    log = f"pathlib.Path({str(tmp_path)!r}, 'log').open('a').write"
    both = "import pytest\n\n\n@pytest.fixture(scope='session')\ndef pid():\n    return os.getpid()\n"
    write(
        tmp_path,
        one=f"@pytest.mark.alone\ndef test_last(): {log}('last ')\n\ndef test_first(): {log}('first ')",
        two=f"{both}def test_a(pid): {log}(f'{{pid}} ')\n\ndef test_b(pid): {log}(f'{{pid}} ')\n",
        three="def test_output(): print('is shown'); assert False",
        four="@pytest.mark.skip(reason='of this')\ndef test_skipped(): pass",
    )
    status, said = run(tmp_path)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 4 passed, 1 skipped" in said
    assert "is shown" in said
    *others, last = (tmp_path / "log").read_text().split()
    assert last == "last"
    others.remove("first")
    assert len(set(others)) == 1 < len(others), "a file has one process"


def test_a_test_that_ends_its_process_fails_and_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path, one="def test_dies(): os._exit(7)\n\ndef test_after(): pass", two="def test_fine(): pass")
    status, said = run(tmp_path)
    assert status == pytest.ExitCode.INTERRUPTED
    assert re.search(r"FAILED .*test_one.py::test_dies", said)
    assert "its process died with 7" in said


def test_an_interrupted_run_ends_what_tests_started(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    write(
        tmp_path,
        one=f"@pytest.fixture\ndef service():\n    yield\n    pathlib.Path({str(ended)!r}).touch()\n\n"
        f"def test_waits(service): pathlib.Path({str(begun)!r}).touch(); time.sleep(60)",
    )
    with subprocess.Popen(command(tmp_path), cwd=_ROOT, stdout=subprocess.DEVNULL) as running:
        wait_until(begun.exists, "the test to begin")
        running.terminate()
        assert running.wait(30) == pytest.ExitCode.INTERRUPTED
    assert ended.exists()
