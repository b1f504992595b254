"""The process that opens an untrusted LoRA is confined, and one that stands still is no fault of the file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from bottega.errors import Unavailable
from bottega.loras.importing.import_processes import ImportJob, ImportProcesses, ImportSource
from bottega.miniature import WEIGHTS
from bottega.process.child import ChildProcess
from bottega.process.limited_process import LimitedProcess, SandboxStatus, sandbox_status
from tests.support.running_loras import lora_file

SECRET = "BOTTEGA_TEST_SECRET"


def job_of(folder: Path) -> ImportJob:
    source, output = lora_file(folder), folder / "output"
    output.touch()
    size_bytes = source.stat().st_size
    return ImportJob(sources=(ImportSource(path=source),), size_bytes=size_bytes, base=WEIGHTS, output=output)


async def test_an_import_process_has_no_secrets_and_is_confined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = LimitedProcess._exchange
    environments: list[dict[str, str]] = []
    statuses: list[SandboxStatus | None] = []

    async def watched(process: LimitedProcess, child: ChildProcess, frame: bytes) -> bytes:
        environments.append(psutil.Process(child.pid).environ())
        statuses.append(sandbox_status(child.pid))
        return await exchange(process, child, frame)

    monkeypatch.setattr(LimitedProcess, "_exchange", watched)
    monkeypatch.setenv(SECRET, "a token")
    importer = ImportProcesses(at_once=1, deadline_s=60, cpu_s=60)
    assert (await importer.run(job_of(tmp_path))).format == "kohya"
    (environment,), (status,) = environments, statuses
    assert environment.keys() - {"LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH"} == {
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
    }
    assert status is not None
    assert status.no_new_privileges
    assert (tmp_path / "output").stat().st_size > 0


async def test_an_import_that_stands_still_is_unavailable_and_not_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, pids = LimitedProcess._exchange, list[int]()

    async def stopped(process: LimitedProcess, child: ChildProcess, frame: bytes) -> bytes:
        psutil.Process(child.pid).suspend()  # as where its disk is another machine's, which is gone
        pids.append(child.pid)
        return await exchange(process, child, frame)

    monkeypatch.setattr(LimitedProcess, "_exchange", stopped)
    importer = ImportProcesses(at_once=1, deadline_s=2, cpu_s=60)
    with pytest.raises(Unavailable, match="not done within 2 s"):
        await asyncio.wait_for(importer.run(job_of(tmp_path)), 60)
    assert len(pids) == 1, "it is not tried again"
    assert not psutil.pid_exists(pids[0])
