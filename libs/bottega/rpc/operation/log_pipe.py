"""Writes lines to a descriptor, mostly stderr, without ever waiting for its reader.

A line is written at once while there is room: it costs what a blocking write costs, and a crash right after it loses
nothing. While the reader does not read (`bottega up` after Ctrl-Z, a terminal after Ctrl-S), lines wait in a bounded
queue that a thread writes out; beyond its bound they are dropped and counted.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Lines that wait for a reader: about a thousand. Beyond them lines are dropped, and the reader is told how many.
MAX_WAITING_BYTES = 256 << 10
# Between two looks at whether there is room; poll() wakes earlier where there is.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class _LogLine:
    """untold: of a line that says how many were dropped, that number; 0 for all others."""

    data: bytes
    untold: int = 0


class LogPipe:
    """Lines to one descriptor, which must not block (see `never_blocking`). May be used from every thread.

    dropped_line: makes the line that says how many were dropped, which is written as soon as there is room again.
    dropped: lines that were dropped since the start.
    """

    def __init__(
        self, descriptor: int, dropped_line: Callable[[int], bytes], *, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._max_waiting_bytes = max_waiting_bytes
        # Collecting garbage may log, also while this very thread writes a line: hence `_writing`, too.
        self._lock = threading.RLock()
        self._writing = False
        self._waiting: deque[_LogLine] = deque()
        self._waiting_bytes = 0
        self._untold = 0
        self._writer: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Writes a line, its end included; keeps it for later, or drops it, where the reader does not read."""
        with self._lock:
            if not (self._waiting or self._untold or self._writing):
                try:  # as nearly always; what follows does the same, for a tenth of a line's time more
                    rest = line[os.write(self._descriptor, line) :]
                except OSError:
                    rest = line
                if not rest:
                    return
                line = rest
            self._write_waiting()
            if self._waiting and self._waiting_bytes + len(line) > self._max_waiting_bytes:
                self._drop(_LogLine(line))
                return
            if self._untold:
                self._add_untold()
            self._add(_LogLine(line))
            self._write_waiting()
            if self._waiting and self._writer is None:
                self._start_writer()

    def flush(self, timeout_s: float) -> bool:
        """Returns when nothing waits any more, or after `timeout_s`; whether nothing waits."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait_for_room(min(left_s, _LOOK_S))
        return True

    def _start_writer(self) -> None:
        writer = threading.Thread(target=self._write_out, name="logs", daemon=True)
        try:
            writer.start()
        except RuntimeError:
            return  # no thread can be had, as at the very end: the next line, or flush, writes what waits
        self._writer = writer

    def _write_out(self) -> None:
        """The writer's thread: until nothing waits."""
        while not self._is_done(by_writer=True):
            self._wait_for_room(_LOOK_S)

    def _is_done(self, *, by_writer: bool = False) -> bool:
        with self._lock:
            self._write_waiting()
            if self._waiting:
                return False
            if by_writer:
                self._writer = None
            return True

    def _write_waiting(self) -> None:
        """As much of what waits as there is room for. With the lock."""
        if self._writing:
            return
        self._writing = True
        try:
            while self._waiting or self._untold:
                if not self._waiting:
                    self._add_untold()
                if not self._write_first():
                    return
        finally:
            self._writing = False

    def _write_first(self) -> bool:
        """Whether it is written; else nothing more can be, for now."""
        line = self._waiting.popleft()
        self._waiting_bytes -= len(line.data)
        try:
            rest = line.data[os.write(self._descriptor, line.data) :]
        except BlockingIOError:
            rest = line.data
        except OSError:  # its reader is gone, or its disk is full
            for lost in (line, *self._waiting):
                self._drop(lost)
            self._waiting.clear()
            self._waiting_bytes = 0
            return False
        if rest:
            self._waiting.appendleft(_LogLine(rest, line.untold))
            self._waiting_bytes += len(rest)
        return not rest

    def _add(self, line: _LogLine) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line.data)

    def _add_untold(self) -> None:
        """A short line, which may exceed the bound."""
        untold, self._untold = self._untold, 0
        self._add(_LogLine(self._dropped_line(untold), untold))

    def _drop(self, line: _LogLine) -> None:
        self.dropped += not line.untold
        self._untold += line.untold or 1

    def _wait_for_room(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll(timeout_s * 1000)


def never_blocking(descriptor: int) -> None:
    """Makes writes to a pipe, a terminal or a socket fail where they would wait for its reader.

    Of all who write there from this process and from those that it starts, C libraries included. A pipe and a terminal
    are opened anew for that, so that nobody else who holds them notices. Files are left as they are.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        os.set_blocking(descriptor, False)
    elif stat.S_ISFIFO(mode) or os.isatty(descriptor):
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # another user's, or no /proc
            os.set_blocking(descriptor, False)
            return
        os.dup2(own, descriptor)
        os.close(own)
