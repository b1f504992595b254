"""What an operating system's refusal means to a caller: one typed error, without paths."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from bottega.errors import StorageUnavailable
from bottega.process import open_files

# Long enough for an operator, or a sweep, to have made room; short enough to notice it.
RETRY_AFTER_S = 5.0
# The cause of what is no fault of a disk: more waits for it than it can take at once.
BUSY = "EAGAIN"
# The cause of what comes before `open` has succeeded, or after `close`.
NOT_OPEN = "EBADF"

# What the system says where nothing may be written, as on a disk that came back read-only.
FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# As causes: of a disk, of a quota on it, and of SQLite, which has both from the system.
_LACK_OF_ROOM = frozenset({"ENOSPC", "EDQUOT", "SQLITE_FULL"})


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns every OSError of the block into StorageUnavailable; the OSError is its cause.

    Every one: also an unexpected one means that the block's work was not done and may be done later. Where too many
    files are open it is TooManyOpenFiles, a kind of it that blames no disk.
    """
    try:
        yield
    except OSError as error:
        if open_files.is_cause(error):
            raise open_files.too_many(error) from error
        raise unavailable(_says(error.errno), cause=errno.errorcode.get(error.errno or 0, "EIO")) from error


def unavailable(what: str, *, cause: str) -> StorageUnavailable:
    """what: for people, such as "the disk is full". cause: the system's name for it, such as ENOSPC."""
    return StorageUnavailable(what, metadata={"cause": cause}, retry_after_s=RETRY_AFTER_S)


def is_lack_of_room(error: StorageUnavailable) -> bool:
    """Whether it would have been done with more of the disk free."""
    return error.metadata.get("cause") in _LACK_OF_ROOM


def _says(number: int | None) -> str:
    if number in _FULL:
        return "the disk is full"
    if number in FORBIDDEN:
        return "the disk cannot be written"
    if number == errno.EWOULDBLOCK:
        return "another process uses the storage"
    return "the disk does not do what it should"
