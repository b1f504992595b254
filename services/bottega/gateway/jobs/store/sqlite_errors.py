"""Typed errors for SQLite's, as callers may read them: without paths."""

from __future__ import annotations

import sqlite3

from bottega.errors import BottegaError, DataLoss
from bottega.process import open_files
from bottega.storage import os_errors, sqlite_files

# Errors of SQLite when it could not open a file: its own, the log beside it, or what readers share.
_OPENS_FILES = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
# Texts by primary result code, https://sqlite.org/rescode.html; extended codes have it in their low byte.
_TEXTS = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the disk cannot be written",
    sqlite3.SQLITE_PERM: "the disk cannot be written",
    sqlite3.SQLITE_CANTOPEN: "the job store cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk is full or does not do what it should",
    sqlite3.SQLITE_BUSY: "another process holds the job store",
    sqlite3.SQLITE_LOCKED: "another process holds the job store",
    sqlite3.SQLITE_PROTOCOL: "another process holds the job store",
    sqlite3.SQLITE_NOMEM: "the job store has no memory left",
}


def typed(error: sqlite3.Error) -> BottegaError | None:
    """Return DataLoss or StorageUnavailable, without SQLite's text; None for what only a fault of ours can cause.

    SQLite does not say why it could not open a file. If no file can be opened at all, that is the reason.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return None
    if sqlite_files.says_damage(error):
        return damaged()
    text = _TEXTS.get(code & 0xFF)
    if text and code & 0xFF in _OPENS_FILES and (why := open_files.exhausted()):
        return open_files.too_many(why)
    return os_errors.unavailable(text, cause=error.sqlite_errorname) if text else None


def damaged() -> DataLoss:
    """Return the error for a store that is damaged."""
    return DataLoss("the job store is damaged; its operator has to look after it")
