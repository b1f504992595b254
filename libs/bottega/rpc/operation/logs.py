"""JSON logs on stderr. Every line has the request_id and job_id of the call in which it was written.

Logging never waits for the reader of stderr: lines are dropped and counted instead (see `log_pipe`).
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType

from pythonjsonlogger.json import JsonFormatter

from bottega.rpc.operation.log_pipe import LogPipe, never_blocking

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
        level: Name of a level, in lower or upper case.
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
    """Add fields to all lines of the current task, and of tasks that it starts from now on."""
    _bound.set({**bound(), **fields})


def bound() -> Mapping[str, str]:
    """Return the fields of the current task."""
    return _bound.get() or {}


def request_id_from(text: str) -> str:
    """Return a caller's request_id for `bind`: cut to the maximal length; empty if it is not visible ASCII."""
    cut = text[:MAX_REQUEST_ID_CHARACTERS]
    return cut if _REQUEST_ID.fullmatch(cut) else ""


def dropped_lines() -> int:
    """Return how many lines this process dropped because nobody read them."""
    return _handler.pipe.dropped if _handler else 0


def flush() -> None:
    """Wait a second at most until all lines are written. For processes that end without Python's exit handlers."""
    if _handler:
        _handler.flush()


def last_words(text: str) -> None:
    """Write a plain line for people before the process ends."""
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
        """Wait for the reader, a second at most."""
        self.pipe.flush(_FLUSH_S)

    def _dropped(self, lines: int) -> bytes:
        record = logging.makeLogRecord(
            {
                "name": __name__,
                "levelno": logging.WARNING,
                "levelname": "WARNING",
                "msg": "log lines were dropped, as nobody read them",
                "lines": lines,
            }
        )
        return f"{self.format(record)}\n".encode()


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an uncaught exception as one line: Python would write the traceback in pieces, and could block."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("ended by an unexpected error", exc_info=(kind, error, trace))


def _own_stderr() -> int:
    """Return the descriptor of stderr, made non-blocking, together with stdout if both go to the same place."""
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
