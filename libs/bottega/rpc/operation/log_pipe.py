"""Writes lines to a descriptor, mostly stderr, without ever waiting for its reader.

While there is room, a line is written at once: that costs no more than a blocking write, and a crash after it loses
nothing. While the reader does not read (`bottega up` after Ctrl-Z, a terminal after Ctrl-S), lines wait in a bounded
queue, which a thread writes out. Further lines are dropped and counted.

`logging.handlers.QueueListener` does neither: it loses queued lines in a crash, and a process with a reader that does
not read never ends.
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

# Bytes of lines that may wait for the reader: about a thousand lines.
MAX_WAITING_BYTES = 256 << 10
# Timeout of poll(), which returns earlier if there is room.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class _LogLine:
    """A line that waits."""

    data: bytes
    dropped: int = 0
    """The number of dropped lines that this line reports; 0 for ordinary lines."""


class LogPipe:
    """A writer of lines to a descriptor that does not block (see `never_blocking`). It is thread-safe.

    Args:
        dropped_line: Returns the line that reports a number of dropped lines. It is written when there is room again.

    Attributes:
        dropped: Lines that were dropped since the start.
    """

    def __init__(
        self, descriptor: int, dropped_line: Callable[[int], bytes], *, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._max_waiting_bytes = max_waiting_bytes
        # The lock is reentrant, and `_writing` is needed too: the garbage collector may log while a line is written.
        self._lock = threading.RLock()
        self._writing = False
        self._waiting: deque[_LogLine] = deque()
        self._waiting_bytes = 0
        self._unreported = 0
        self._writer: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Write a line that ends with a newline. If the reader does not read, keep the line for later, or drop it."""
        with self._lock:
            if not (self._waiting or self._unreported or self._writing):
                try:  # the usual case; the code below does the same, and takes a tenth longer
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
            if self._unreported:
                self._add_unreported()
            self._add(_LogLine(line))
            self._write_waiting()
            if self._waiting and self._writer is None:
                self._start_writer()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written, or for `timeout_s`. Return whether all are written."""
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
            return  # no thread can start, as at interpreter exit: the next line, or flush, writes the waiting ones
        self._writer = writer

    def _write_out(self) -> None:
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
        """Write waiting lines while there is room. The lock must be held."""
        if self._writing:
            return
        self._writing = True
        try:
            while self._waiting or self._unreported:
                if not self._waiting:
                    self._add_unreported()
                if not self._write_first():
                    return
        finally:
            self._writing = False

    def _write_first(self) -> bool:
        """Write the first waiting line. Return False if nothing more can be written for now."""
        line = self._waiting.popleft()
        self._waiting_bytes -= len(line.data)
        try:
            rest = line.data[os.write(self._descriptor, line.data) :]
        except BlockingIOError:
            rest = line.data
        except OSError:  # the reader is gone, or the disk is full
            for lost in (line, *self._waiting):
                self._drop(lost)
            self._waiting.clear()
            self._waiting_bytes = 0
            return False
        if rest:
            self._waiting.appendleft(_LogLine(rest, line.dropped))
            self._waiting_bytes += len(rest)
        return not rest

    def _add(self, line: _LogLine) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line.data)

    def _add_unreported(self) -> None:
        """Queue the line that reports dropped lines. It is short, and may exceed the limit."""
        dropped, self._unreported = self._unreported, 0
        self._add(_LogLine(self._dropped_line(dropped), dropped))

    def _drop(self, line: _LogLine) -> None:
        self.dropped += not line.dropped
        self._unreported += line.dropped or 1

    def _wait_for_room(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll(timeout_s * 1000)


def never_blocking(descriptor: int) -> None:
    """Make writes to a pipe, a terminal or a socket fail instead of waiting for the reader.

    This concerns all writers in this process and its children, C libraries included. Pipes and terminals are reopened,
    so that other processes which hold them are not affected. Files are left as they are.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        os.set_blocking(descriptor, False)
    elif stat.S_ISFIFO(mode) or os.isatty(descriptor):
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # it belongs to another user, or there is no /proc
            os.set_blocking(descriptor, False)
            return
        os.dup2(own, descriptor)
        os.close(own)
