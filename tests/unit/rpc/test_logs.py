"""Lines to a pipe whose reader does not read: nobody waits, what is lost is told, the rest comes in order."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.rpc.operation.logs import LogPipe, never_blocking
from tests.support.waiting import wait_until

PIPE_BYTES = 4096
LINE = b"x" * 99 + b"\n"


def told(lines: int) -> bytes:
    return b"dropped %d\n" % lines


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """A pipe of one page, to read from and to write to."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    never_blocking(write_end)
    yield read_end, write_end
    for end in (read_end, write_end):
        os.close(end)


def read(read_end: int, until: bytes) -> list[bytes]:
    """The lines up to the one that begins so."""
    data = b""
    while not any(line.startswith(until) for line in data.split(b"\n")[:-1]):
        data += os.read(read_end, 1 << 16)
    return data.splitlines(keepends=True)


def number(lines: int, pipe: LogPipe) -> None:
    for n in range(lines):
        pipe.write(b"%098d\n" % n)


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "logs"]


def test_lines_are_in_the_pipe_when_they_are_written(ends: tuple[int, int]) -> None:
    pipe = LogPipe(ends[1], told)
    pipe.write(LINE)
    os.set_blocking(ends[0], False)
    assert os.read(ends[0], PIPE_BYTES) == LINE
    assert not writers()


@pytest.mark.timeout(20)
def test_what_nobody_reads_waits_and_comes_in_order(ends: tuple[int, int]) -> None:
    pipe = LogPipe(ends[1], told)
    number(500, pipe)
    pipe_holds = PIPE_BYTES // 99
    assert not pipe.flush(0.01)
    lines = read(ends[0], b"%098d" % 499)
    assert lines == [b"%098d\n" % n for n in range(500)]
    assert len(lines) > pipe_holds
    assert pipe.dropped == 0
    wait_until(lambda: not writers(), "the thread to end")


@pytest.mark.timeout(20)
def test_what_is_beyond_the_bound_is_dropped_counted_and_told_without_another_line(ends: tuple[int, int]) -> None:
    pipe = LogPipe(ends[1], told, max_waiting_bytes=10 * 99)
    number(500, pipe)
    assert 500 - PIPE_BYTES // 99 - 12 <= pipe.dropped < 490
    lines = read(ends[0], b"dropped")
    assert lines[-1] == told(pipe.dropped)
    assert lines[:-1] == [b"%098d\n" % n for n in range(500 - pipe.dropped)]
    pipe.write(b"after\n")
    assert read(ends[0], b"after") == [b"after\n"]


@pytest.mark.timeout(20)
def test_a_line_that_is_larger_than_the_pipe_comes_whole(ends: tuple[int, int]) -> None:
    pipe = LogPipe(ends[1], told)
    pipe.write(b"y" * 20_000 + b"\n")
    pipe.write(b"after\n")
    assert read(ends[0], b"after") == [b"y" * 20_000 + b"\n", b"after\n"]


def test_lines_whose_reader_is_gone_are_counted_and_nobody_waits() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    pipe = LogPipe(write_end, told)
    for _ in range(3):
        pipe.write(LINE)
    assert pipe.flush(5)
    assert pipe.dropped == 3
    os.close(write_end)


def test_a_disk_that_was_full_is_told_how_many_lines_it_lost(tmp_path: Path) -> None:
    full, later = os.open("/dev/full", os.O_WRONLY), tmp_path / "log"
    pipe = LogPipe(full, told)
    for _ in range(3):
        pipe.write(LINE)
    os.dup2(os.open(later, os.O_WRONLY | os.O_CREAT), full)  # the same descriptor, with room
    pipe.write(b"after\n")
    assert later.read_bytes() == told(3) + b"after\n"
    assert pipe.dropped == 3
    os.close(full)


def test_others_who_hold_the_pipe_go_on_to_wait_for_its_reader() -> None:
    read_end, write_end = os.pipe()
    other = os.dup(write_end)
    never_blocking(write_end)
    assert (os.get_blocking(write_end), os.get_blocking(other)) == (False, True)
    for end in (read_end, write_end, other):
        os.close(end)


@pytest.mark.timeout(20)
def test_a_line_that_is_logged_while_another_is_written_comes_too(ends: tuple[int, int]) -> None:
    """As a collected object may do, in the same thread."""
    inner: list[bytes] = [b"inner\n"]

    def telling(lines: int) -> bytes:
        while inner:
            pipe.write(inner.pop())
        return told(lines)

    pipe = LogPipe(ends[1], telling, max_waiting_bytes=99)
    number(100, pipe)
    lines = read(ends[0], b"dropped")
    lines += [] if b"inner\n" in lines else read(ends[0], b"inner")
    assert lines.count(b"inner\n") == 1
    assert lines.count(told(pipe.dropped)) == 1
