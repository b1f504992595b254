"""Checksums of stored values, and a reader of stored images in parts, which checks them by their SHA-256."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from types import TracebackType

from bottega.errors import DataLoss
from bottega.storage import os_errors
from bottega.storage.thread import FairThread

Value = str | bytes | int | float | None
"""The value of a SQLite column."""


def checksum(values: Sequence[Value]) -> int:
    """Return the CRC-32 of values and their types. It detects accidents, not manipulation."""
    found = 0
    for value in values:
        raw = value if isinstance(value, bytes) else repr(value).encode()
        found = zlib.crc32(raw, zlib.crc32(b"%d" % len(raw), found))
    return found


_BLOCK_BYTES = 1 << 20


class ContentReader:
    """A reader of one image in parts, which works even if the store deletes the image. An async context manager."""

    def __init__(self, thread: FairThread, descriptor: int, digest: str, *, size_bytes: int, owner: str) -> None:
        self._thread = thread
        self._owner = owner
        self._descriptor: int | None = descriptor
        self._digest = digest
        self.size_bytes = size_bytes

    async def read(self, offset: int, size_bytes: int) -> bytes:
        """Return up to `size_bytes` bytes from `offset` on.

        Raises DataLoss if the file has become shorter, or StorageUnavailable if it cannot be read.
        """
        size_bytes = max(0, min(size_bytes, self.size_bytes - offset))
        return await self._thread.run(lambda: self._read(offset, size_bytes), owner=self._owner)

    def close(self) -> None:
        """Close the reader. It may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    async def __aenter__(self) -> ContentReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # a caller that is cancelled while it waits for a reader never gets it

    def _read(self, offset: int, size_bytes: int) -> bytes:
        assert self._descriptor is not None, "read after close"
        with os_errors.translated():
            data = os.pread(self._descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise damaged(self._digest)
        return data


def check(descriptor: int, digest: str) -> None:
    """Read the whole file. Raise DataLoss if its SHA-256 is not `digest`."""
    found, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK_BYTES, offset):
        found.update(block)
        offset += len(block)
    if found.hexdigest() != digest:
        raise damaged(digest)


def damaged(digest: str) -> DataLoss:
    """Return the error for a file whose content does not match its hash."""
    return DataLoss(f"the stored image {digest} is damaged", metadata={"digest": digest})
