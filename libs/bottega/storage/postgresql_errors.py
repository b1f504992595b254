"""Errors of PostgreSQL and its client psycopg as those of bottega.errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from bottega.errors import BottegaError, ConfigError, DataLoss, InternalError, InvalidRequest
from bottega.storage import os_errors

try:
    import psycopg
    from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests
except ImportError as missing:  # without psycopg, or without libpq
    raise ConfigError(
        f"PostgreSQL is configured, but its client is not installed ({missing}): "
        "pip install 'bottega-services[postgresql]', or deploy/install.sh install --with 'bottega-libs[postgresql]'"
    ) from missing

# Texts by SQLSTATE or by its class (the first two characters),
# https://www.postgresql.org/docs/current/errcodes-appendix.html
_TEXTS = {
    "08": "the connection to PostgreSQL is lost",
    "23503": "another transaction was in the way",
    "23505": "another transaction was in the way",
    "25006": "the database is read-only",
    "25P03": "the transaction was silent for too long and was ended",
    "40": "another transaction was in the way",
    "42501": "the database user lacks rights",
    "53100": "the database's disk is full",
    "53": "PostgreSQL lacks resources",
    "55P03": "another transaction holds a lock for too long",
    "57014": "PostgreSQL is too slow",
    "57": "PostgreSQL is stopping or starting",
    "58": "PostgreSQL's disk fails",
}
_UNREACHABLE = "PostgreSQL cannot be reached"
_DAMAGED = ("42703", "42883", "42P01", "XX001", "XX002")
# Refusals at the start of a connection for which waiting does not help. libpq tells only their text.
_WRONG = re.compile(
    r'(password authentication failed|no password supplied|role ".*" does not exist|database ".*" does not exist'
    r"|no pg_hba\.conf entry|permission denied for database|authentication failed for user|is not permitted to log in"
    r"|certificate verify failed|root certificate file .* does not exist|invalid .*connection option"
    r"|server does not support SSL)"
)


@contextlib.contextmanager
def translated(place: str, *, starting: bool = False) -> Iterator[None]:
    """Convert all errors of psycopg in the block to those of bottega.errors. Those of a bug become InternalError.

    Args:
        place: Host, port and name of the database.
        starting: Whether a refused login is a ConfigError: later, it is an outage that an operator will end.
    """
    try:
        yield
    except psycopg.Error as error:
        # The cause is for operators; libpq does not always name the server.
        cause = type(error)(f"{place}: {first_line(error)}") if starting else error
        raise _typed(error, place, starting=starting) from cause


@contextlib.contextmanager
def busy_if_locked(text: str) -> Iterator[None]:
    """Raise StorageUnavailable with the cause BUSY if a statement in the block waits for a lock for too long.

    Args:
        text: What the lock is held for.
    """
    try:
        yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
        raise os_errors.unavailable(text, cause=os_errors.BUSY) from error


def _typed(error: psycopg.Error, place: str, *, starting: bool) -> BottegaError:
    """Return the error to raise; only a ConfigError, which callers never see, names the database."""
    text = first_line(error)
    if starting and (_WRONG.search(text) or isinstance(error, psycopg.ProgrammingError)):
        todo = "; give it by PGPASSFILE or PGPASSWORD" if "no password supplied" in text else ""
        return ConfigError(f"the database {place} cannot be used: {text}{todo}")
    if isinstance(error, (PoolTimeout, PoolClosed)):
        return os_errors.unavailable(_UNREACHABLE, cause="ETIMEDOUT")
    if isinstance(error, TooManyRequests):
        return os_errors.unavailable("too many operations wait for the database", cause=os_errors.BUSY)
    state = error.sqlstate
    if state in _DAMAGED:
        return DataLoss("the tables of the database were changed or are damaged")
    if what := _TEXTS.get(state or "") or _TEXTS.get((state or "")[:2]):
        return os_errors.unavailable(what, cause=type(error).__name__)
    if state is None and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return os_errors.unavailable(_UNREACHABLE if starting else _TEXTS["08"], cause="ECONNRESET")
    if isinstance(error, psycopg.DataError):
        return InvalidRequest("PostgreSQL cannot store a value, such as a text with a NUL byte")
    return InternalError("the database refuses a statement")


def first_line(error: Exception) -> str:
    """Return the first line of an error that says something. psycopg's errors do not contain passwords."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
