"""The start of a worker's engine: the temporary folder of its trials, and what is logged of its stages."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bottega.process.engine_supervisor import StartProgress
from bottega.worker import engine_client
from bottega.worker.engine_client import StartMonitor, TrialFolder
from tests.support.waiting import eventually

_KILLED = (
    "import os, signal; from bottega.worker.engine_client import TrialFolder; folder = TrialFolder(); "
    "os.kill(os.getpid(), signal.SIGKILL)"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _make_old(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600,) * 2)


def test_a_folder_goes_with_its_worker(temporary: Path) -> None:
    folder = TrialFolder()
    (folder.path / "trials.json").write_text("[]", encoding="utf-8")
    del folder
    assert not list(temporary.iterdir())


def test_the_folders_of_killed_workers_go_with_the_next_start(temporary: Path) -> None:
    for _ in range(2):
        environment = {**os.environ, "TMPDIR": str(temporary)}
        subprocess.run([sys.executable, "-c", _KILLED], env=environment, check=False, timeout=60)
    left = list(temporary.iterdir())
    assert left
    for folder in left:
        _make_old(folder)
    own = TrialFolder()
    assert list(temporary.iterdir()) == [own.path]


def test_the_folder_of_a_worker_that_lives_stays_and_so_does_what_is_not_ours(temporary: Path) -> None:
    (temporary / "bottega-other").mkdir()
    (temporary / "bottega-trials-link").symlink_to(temporary / "bottega-other")
    living = TrialFolder()
    for folder in (living.path, temporary / "bottega-other"):
        _make_old(folder)
    other = TrialFolder()
    assert {path.name for path in temporary.iterdir()} == {
        living.path.name, other.path.name, "bottega-other", "bottega-trials-link"
    }  # fmt: skip


LOADING = StartProgress(stage="loading unet", done_bytes=31 * 10**8, total_bytes=51 * 10**8)


async def test_a_stage_that_takes_long_is_logged_again_and_again_with_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "_QUIET_S", 0.1)
    monkeypatch.setattr(engine_client, "_REPEAT_S", 0.1)
    caplog.set_level("INFO")
    extended: list[str] = []
    start = StartMonitor(extended.append)
    start.note(LOADING)
    await eventually(lambda: len(caplog.records) >= 2)
    start.note(StartProgress(stage="warming up"))
    seconds = start.end()
    await asyncio.sleep(0.2)
    assert {vars(record)["progress"] for record in caplog.records} == {"loading unet, 3.1 of 5.1 GB"}
    assert extended == ["loading unet, 3.1 of 5.1 GB", "warming up"]
    assert list(seconds) == ["starting the engine", "loading unet", "warming up"]
    assert seconds["loading unet"] >= 0.2
