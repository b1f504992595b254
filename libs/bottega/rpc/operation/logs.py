"""JSON logs on stderr; every line carries the request_id and job_id of the call it was written in.

Whoever logs never waits for the reader of stderr, see
`log_pipe`: lines are dropped, and counted, before that.
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

# Of visible ASCII: nothing that could end a line, or look like something else.
_REQUEST_ID = re.compile(r"[!-~]+")
# For a reader that is there and slow; one that was stopped is not waited for.
_FLUSH_S = 1.0
_STDOUT = 1


def configure(service: str, level: str) -> None:
    """Sends everything that is logged to stderr, one JSON object a line; warnings as well.

    level: a name of logging's, in any case.
    """
    global _handler  # noqa: PLW0603 - a process has one stderr
    formatter = JsonFormatter(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "message": "event"},
        static_fields={"service": service},
        json_ensure_ascii=True,  # so that no untrusted text ends a line, or reaches a terminal as it is
    )
    _handler = _PipeHandler(_own_stderr(), formatter)
    _handler.addFilter(_add_bound_fields)
    logging.basicConfig(handlers=[_handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _tell_crash


def bind(**fields: str) -> None:
    """Adds fields to every line that the current task, and tasks it starts from now on, will write."""
    _bound.set({**bound(), **fields})


def bound() -> Mapping[str, str]:
    """The fields of the current task."""
    return _bound.get() or {}


def request_id_from(text: str) -> str:
    """A caller's request_id as it may be bound: cut to its length, and empty if it is not all visible ASCII."""
    cut = text[:MAX_REQUEST_ID_CHARACTERS]
    return cut if _REQUEST_ID.fullmatch(cut) else ""


def dropped_lines() -> int:
    """Lines that this process has dropped because nobody read them."""
    return _handler.pipe.dropped if _handler else 0


def flush() -> None:
    """Waits a second at most for what the reader of stderr has not taken. For those who end without Python's help."""
    if _handler:
        _handler.flush()


def last_words(text: str) -> None:
    """Writes a line that is no JSON, for a person, before the process ends."""
    if _handler is None:
        print(text, file=sys.stderr)
    else:
        _handler.pipe.write(f"{text}\n".encode(errors="backslashreplace"))


class _PipeHandler(logging.Handler):
    """Python flushes it when it ends."""

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.pipe = LogPipe(descriptor, self._dropped)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - logging's own way with lines that cannot be formatted
            self.handleError(record)
        else:
            self.pipe.write(line)

    def flush(self) -> None:
        """Waits for the reader, a while."""
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


def _tell_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ends the process is a line as well: a long traceback, written in pieces, could outrun a slow reader."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("ended by what nobody expected", exc_info=(kind, error, trace))


def _own_stderr() -> int:
    """Its descriptor, made never to block, with stdout where that goes the same way."""
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
