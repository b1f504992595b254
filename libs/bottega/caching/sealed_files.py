"""Loads a file from disk into anonymous memory: completely, checked and then sealed."""

from __future__ import annotations

import errno
import hashlib
import os
import time

from bottega.errors import DataLoss
from bottega.storage import os_errors
from bottega.transport.memory import reserve, seal

_PIECE_BYTES = 4 << 20


def load(source: int, target: int, size_bytes: int, *, digest: str | None, what: str) -> float:
    """Copy the file `source` into the new file `target` and seal it. Return the seconds that the checksum took.

    Raises DataLoss or StorageUnavailable.

    Args:
        source: File descriptor.
        target: File descriptor of an anonymous file (memfd).
        digest: Expected SHA-256; None skips the check.
        what: What such a file is called in texts for users.
    """
    _take_memory(target, size_bytes, what)
    with os_errors.translated():
        check_s = _copy(source, target, size_bytes, digest, what)
        seal(target)
    return check_s


def check(source: int, digest: str, *, what: str) -> None:
    """Read the whole file. Raise DataLoss if it does not have this SHA-256, or StorageUnavailable."""
    with os_errors.translated():
        if digest_of(source) != digest:
            raise _damaged(what)


def digest_of(source: int) -> str:
    """Return the SHA-256 of a file in hex. Raise OSError if it cannot be read."""
    hashed, buffer, place = hashlib.sha256(), bytearray(_PIECE_BYTES), 0
    while got := os.preadv(source, [buffer], place):
        hashed.update(memoryview(buffer)[:got])
        place += got
    return hashed.hexdigest()


def _take_memory(target: int, size_bytes: int, what: str) -> None:
    try:
        reserve(target, size_bytes)
    except OSError as error:
        cause = errno.errorcode.get(error.errno or 0, "ENOMEM")
        full = f"no memory is left for a {what} of {size_bytes} bytes: free some, or lower the store's budget_bytes"
        raise os_errors.unavailable(full, cause=cause) from error


def _copy(source: int, target: int, size_bytes: int, digest: str | None, what: str) -> float:
    hashed, check_s = hashlib.sha256(), 0.0
    buffer = bytearray(min(_PIECE_BYTES, size_bytes))
    done = 0
    while got := os.readv(source, [buffer]):
        piece = memoryview(buffer)[:got]
        done += got
        if done > size_bytes:
            break
        if digest is not None:
            began_s = time.monotonic()
            hashed.update(piece)
            check_s += time.monotonic() - began_s
        os.pwrite(target, piece, done - got)
    if done != size_bytes or (digest is not None and hashed.hexdigest() != digest):
        raise _damaged(what)
    return check_s


def _damaged(what: str) -> DataLoss:
    return DataLoss(f"the {what}'s file is damaged; it has to be added again")
