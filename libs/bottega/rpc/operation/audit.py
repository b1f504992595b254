"""The audit log: a line of JSON in a separate file for each call that changes something.

    {"at": "2026-11-24T13:40:01.123Z", "service": "loras", "role": "operator", "name": "anna", "tenant": "",
     "host": "10.0.0.9", "method": "LoraService/DeleteLora", "about": {"name": "watercolour"}, "outcome": "OK",
     "seconds": 0.021}

It contains refused calls, too, but no prompts, keys or certificates.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from bottega.errors import ConfigError
from bottega.rpc.security.caller import Caller
from bottega.rpc.security.private_files import open_private
from bottega.state_folder import make_missing

# Upper bound on the bytes of a file, and number of older files that are kept.
_FILE_BYTES, _FILES = 64 << 20, 8
# Upper bound on lines that wait for the disk. Further ones are only counted, and a line reports their number.
_MAX_WAITING = 10_000
# Fields of requests that identify things, and the length at which they are cut.
_ABOUT = frozenset({"name", "digest", "job_id", "request_id", "id", "entry", "kind", "controlnet", "lora", "source"})
_MOST_LETTERS = 128
_STOP_S = 5.0

_log = logging.getLogger(__name__)


class AuditLog:
    """The audit log of a process. A thread writes the lines in the order in which calls ended.

    Any thread may call it. The constructor raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path, *, service: str) -> None:
        self._service = service
        try:
            make_missing(path.parent)
            self._file = _PrivateFile(path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"server.audit {path} cannot be written: {error.strerror}") from None
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._missing = 0
        self._writer = threading.Thread(target=self._write, name="audit", daemon=True)
        self._writer.start()

    def note(
        self, method: str, known: Caller | None, host: str, *, about: Mapping[str, str], outcome: str, seconds: float
    ) -> None:
        """Add a line for a call that has ended.

        Args:
            known: The caller; None if it is unknown.
            host: The caller's host.
        """
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "service": self._service,
            "role": known.role if known else "unknown",
            "name": known.name if known else "",
            "tenant": known.tenant if known else "",
            "host": host,
            "method": method.rpartition(".")[2],
            "about": dict(about),
            "outcome": outcome,
            "seconds": round(seconds, 3),
        }
        try:
            self._waiting.put_nowait(json.dumps(line, ensure_ascii=False))
        except queue.Full:
            self._missing += 1

    def close(self) -> None:
        """Write the waiting lines and close the file. A second call does nothing."""
        deadline = time.monotonic() + _STOP_S
        while self._writer.is_alive() and time.monotonic() < deadline:
            try:
                self._waiting.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._writer.join(_STOP_S)
        self._file.close()

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            if self._missing:
                missing, self._missing = self._missing, 0
                self._emit(json.dumps({"service": self._service, "missing": missing}))
            self._emit(line)

    def _emit(self, line: str) -> None:
        self._file.emit(logging.makeLogRecord({"msg": line, "args": ()}))


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A log file that only its owner may read. A failure to write it is logged once."""

    _failed = False

    def _open(self):  # type: ignore[no-untyped-def]
        return open_private(Path(self.baseFilename))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to the file at the path. It is opened again if the open file was moved or deleted."""
        if self.stream is not None and not _is_in_place(self.stream.fileno(), self.baseFilename):
            self.stream.close()
            self.stream = None  # the next write opens it
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as logging has it
        if not self._failed:
            _log.exception("the audit log cannot be written; calls are not recorded until it can")
        self._failed = True


def _is_in_place(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), Path(path).stat())
    except OSError:
        return False


def about(request: object) -> Mapping[str, str]:
    """Return the names, digests and IDs in a request."""
    if not isinstance(request, Message):
        return {}
    named = {
        field.name: str(getattr(request, field.name))[:_MOST_LETTERS]
        for field in request.DESCRIPTOR.fields
        if field.name in _ABOUT and field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated
    }
    return {name: value for name, value in named.items() if value}
