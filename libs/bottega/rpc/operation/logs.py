"""JSON logs on stderr. Every line has the request_id and job_id of the call in which it was written.

Logging never waits for the reader of stderr. While there is room, a line is written at once: that costs no more than a
blocking write, and a crash after it loses nothing. While the reader does not read (`bottega up` after Ctrl-Z, a
terminal after Ctrl-S), lines wait in a bounded queue, which a thread writes out. Further lines are dropped and counted.

`logging.handlers.QueueListener` does neither: it loses queued lines in a crash, and a process with a reader that does
not read never ends.
"""

from __future__ import annotations

import logging
import os
import re
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType

from pythonjsonlogger.json import JsonFormatter

# Bytes of lines that may wait for the reader: about a thousand lines.
MAX_WAITING_BYTES = 256 << 10
# Timeout of poll(), which returns earlier if there is room.
_LOOK_S = 1.0
MAX_REQUEST_ID_CHARACTERS = 128

_bound: ContextVar[Mapping[str, str] | None] = ContextVar("bottega_log_fields", default=None)
_handler: _PipeHandler | None = None

# Visible ASCII, so that it cannot end a line or hide characters.
_REQUEST_ID = re.compile(r"[!-~]+")
# Time for a slow reader; a stopped one is not waited for any longer.
_FLUSH_S = 1.0
_STDOUT = 1


def configure(service: str, level: str) -> None:
    """Send all log records and warnings to stderr, one JSON object per line.

    Args:
        level: Name of the lowest level to log, in lower or upper case.
    """
    global _handler  # noqa: PLW0603 - a process has one stderr
    formatter = JsonFormatter(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "message": "event"},
        static_fields={"service": service},
        json_ensure_ascii=True,  # so that untrusted text cannot end a line, or control a terminal
    )
    _handler = _PipeHandler(_own_stderr(), formatter)
    _handler.addFilter(_add_bound_fields)
    logging.basicConfig(handlers=[_handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_crash


def bind(**fields: str) -> None:
    """Add fields to all log lines of the current task, and of tasks that it starts from now on."""
    _bound.set({**bound(), **fields})


def bound() -> Mapping[str, str]:
    """Return the log fields of the current task."""
    return _bound.get() or {}


def request_id_from(text: str) -> str:
    """Return a caller's request_id for use in `bind`: shortened if it is long, "" if it is not visible ASCII."""
    cut = text[:MAX_REQUEST_ID_CHARACTERS]
    return cut if _REQUEST_ID.fullmatch(cut) else ""


def dropped_lines() -> int:
    """Return how many lines this process dropped because the reader of stderr was too slow."""
    return _handler.pipe.dropped if _handler else 0


def flush() -> None:
    """Wait up to a second until all lines are written. For processes that end without Python's exit handlers."""
    if _handler:
        _handler.flush()


def last_words(text: str) -> None:
    """Write a line of plain text for people before the process ends."""
    if _handler is None:
        print(text, file=sys.stderr)
    else:
        _handler.pipe.write(f"{text}\n".encode(errors="backslashreplace"))


class _PipeHandler(logging.Handler):
    """A handler that writes to a LogPipe. Python flushes it at exit."""

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.pipe = LogPipe(descriptor, self._dropped)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - as logging treats records that cannot be formatted
            self.handleError(record)
        else:
            self.pipe.write(line)

    def flush(self) -> None:
        """Wait up to a second for the reader."""
        self.pipe.flush(_FLUSH_S)

    def _dropped(self, lines: int) -> bytes:
        record = logging.makeLogRecord(
            {
                "name": __name__,
                "levelno": logging.WARNING,
                "levelname": "WARNING",
                "msg": "log lines were dropped, because stderr was not read fast enough",
                "lines": lines,
            }
        )
        return f"{self.format(record)}\n".encode()


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an uncaught exception as one line. Python would write the traceback in pieces, and could block."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("the process ends with an unexpected error", exc_info=(kind, error, trace))


def _own_stderr() -> int:
    """Make stderr non-blocking, and stdout if both have the same target. Return the descriptor of stderr."""
    descriptor = sys.stderr.fileno()
    never_blocking(descriptor)
    try:
        same = os.path.samestat(os.fstat(descriptor), os.fstat(_STDOUT))
    except OSError:  # there is no stdout
        return descriptor
    if same and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.dup2(descriptor, _STDOUT)
    return descriptor


def _add_bound_fields(record: logging.LogRecord) -> bool:
    for name, value in bound().items():
        if name not in record.__dict__:
            setattr(record, name, value)
    return True


@dataclass(frozen=True, slots=True)
class _LogLine:
    data: bytes
    dropped: int = 0
    """Number of dropped lines that this line reports; 0 for ordinary lines."""


class LogPipe:
    """Writes lines to a descriptor that does not block (see `never_blocking`). Any thread may call it.

    Args:
        dropped_line: Returns the line that reports a number of dropped lines. It is written when there is space again.

    Attributes:
        dropped: Number of lines that were dropped since the start.
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
        """Wait up to `timeout_s` until all lines are written. Return whether they are."""
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
        """Write waiting lines while the descriptor accepts them. The lock must be held."""
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
        """Write the first waiting line. Return False if the descriptor accepts no more now."""
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

    This affects all writers in this process and its children, including C libraries. Pipes and terminals are reopened,
    so that other processes that use them are not affected. Files are left as they are.
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
