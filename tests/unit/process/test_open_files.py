"""A refusal to open one more file or socket, wherever it comes from, is told as what it is; real limits, no fakes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.errors import StorageUnavailable, TooManyOpenFiles
from bottega.gateway.jobs.store import sqlite_schema
from bottega.process import open_files
from bottega.process.child import ChildProcess
from bottega.storage import os_errors


@contextlib.contextmanager
def limited(soft: int) -> Iterator[None]:
    """In the block this process has that limit, above which nothing more can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def expect_told(error: TooManyOpenFiles) -> None:
    assert error.reason_name == "TOO_MANY_OPEN_FILES"
    assert error.metadata["cause"] == "EMFILE"
    assert "LimitNOFILE" in error.message
    assert "disk" not in error.message
    assert error.retry_after_s


def test_the_soft_limit_becomes_the_hard_one_or_as_much_as_is_sane() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limited(256):
        open_files.raise_limit()
        assert open_files.limit() == (open_files.ENOUGH if hard < 0 else min(hard, open_files.ENOUGH))


def test_a_low_limit_is_logged_and_another_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with limited(256):
        open_files.warn_if_low()
    (line,) = caplog.records
    assert (line.__dict__["limit"], line.levelname) == (256, "WARNING")
    caplog.clear()
    with limited(min(open_files.ENOUGH, resource.getrlimit(resource.RLIMIT_NOFILE)[1])):
        open_files.warn_if_low()
    assert not caplog.records


def test_a_file_that_cannot_be_opened_for_want_of_a_descriptor_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    with limited(3), pytest.raises(TooManyOpenFiles) as caught, os_errors.translated():
        (tmp_path / "picture").open("wb")
    expect_told(caught.value)
    with pytest.raises(StorageUnavailable) as other, os_errors.translated():
        raise OSError(errno.ENOSPC, "full")
    assert type(other.value) is StorageUnavailable


def test_the_whole_machines_limit_is_another_one() -> None:
    told = open_files.too_many(OSError(errno.ENFILE, os.strerror(errno.ENFILE)))
    assert told.metadata["cause"] == "ENFILE"
    assert "fs.file-max" in told.message


def test_what_sqlite_cannot_open_is_told_by_why_it_cannot(tmp_path: Path) -> None:
    def failure(path: Path) -> sqlite3.Error:
        with pytest.raises(sqlite3.Error) as caught:
            sqlite3.connect(path).execute("CREATE TABLE t (x)")
        return caught.value

    with limited(3):
        told = sqlite_schema.typed_error(failure(tmp_path / "jobs.sqlite"))
    assert isinstance(told, TooManyOpenFiles)
    expect_told(told)
    other = sqlite_schema.typed_error(failure(tmp_path / "nowhere" / "jobs.sqlite"))
    assert type(other) is StorageUnavailable


async def test_a_child_process_that_cannot_be_started_says_why() -> None:
    with limited(3), pytest.raises(TooManyOpenFiles) as caught:
        await ChildProcess.start("bottega.codec.process")
    expect_told(caught.value)
