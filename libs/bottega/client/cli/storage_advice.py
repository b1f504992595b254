"""What to do where a service cannot store something: only some of the causes are somebody's to remove."""

from __future__ import annotations

from bottega.errors import StorageUnavailable

# Causes by how they begin. SQLite does not tell an output error on a full disk from others.
_NO_ROOM = ("ENOSPC", "EDQUOT", "EFBIG", "SQLITE_FULL", "SQLITE_IOERR")
_NO_DESCRIPTOR = ("EMFILE", "ENFILE")
_FORBIDDEN = ("EROFS", "EACCES", "EPERM", "SQLITE_READONLY", "SQLITE_PERM")


def storage_advice(error: StorageUnavailable, service: str) -> str:
    """service: whose disk it is, as people call it."""
    cause = error.metadata.get("cause", "")
    if cause.startswith(_NO_ROOM):
        return f"Make room on the {service}'s disk; it goes on by itself then."
    if cause.startswith(_FORBIDDEN):
        return f"Let the {service} write to its folder; it goes on by itself then."
    if cause.startswith(_NO_DESCRIPTOR):
        return f"The {service} goes on by itself when connections end; bottega doctor says how to allow more."
    return f"Try again in {error.retry_after_s or 1:.0f} s; if it stays so, bottega logs -n 50 says why."
