"""JSON logs on stderr; every line carries the request_id and job_id of the call it was written in.

It knows no service; fields are bound by whoever knows them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar

from pythonjsonlogger.json import JsonFormatter

_bound: ContextVar[Mapping[str, str] | None] = ContextVar("bottega_log_fields", default=None)


def configure(service: str, level: str) -> None:
    """Sends everything that is logged to stderr, one JSON object a line.

    level: a name of logging's, in any case.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_bound_fields)
    handler.setFormatter(
        JsonFormatter(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "message": "event"},
            static_fields={"service": service},
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def bind(**fields: str) -> None:
    """Adds fields to every line that the current task, and tasks it starts from now on, will write."""
    _bound.set({**bound(), **fields})


def bound() -> Mapping[str, str]:
    """The fields of the current task."""
    return _bound.get() or {}


def _add_bound_fields(record: logging.LogRecord) -> bool:
    for name, value in bound().items():
        if name not in record.__dict__:
            setattr(record, name, value)
    return True
