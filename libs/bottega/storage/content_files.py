"""A folder of files named by the SHA-256 of their content, which are on the disk once they are written.

    folder/incoming/<digest>    being written; what is here at the start was interrupted
    folder/ab/ab<62 digits>     complete, and on the disk

Methods of ContentFolder block and raise OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bottega.errors import DataLoss
from bottega.storage import folders, os_errors
from bottega.storage.fair_thread import FairThread
from bottega.storage.process_lock import ProcessLock

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_INCOMING = "incoming"
_BLOCK_BYTES = 1 << 20
# About the size of a small picture.
_PROBE, _PROBE_BYTES = "probe", 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A complete file."""

    digest: str
    size_bytes: int
    time: float
    """Unix time at which it was last written or renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The content of a folder."""

    files: tuple[StoredFile, ...]
    foreign: tuple[str, ...]
    """Paths of files of other programs, relative to the folder."""


class ContentFolder:
    """A folder of files, which one process at a time may have open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = ProcessLock(path)

    def open(self) -> Scan:
        """Create or open the folder, remove interrupted files, and return what it contains.

        On a read-only disk interrupted files stay. Raises BlockingIOError if another process has the folder open.
        """
        folders.make_own(self._path)
        self._lock.acquire()
        folders.make(self._path / _INCOMING)
        for left in (self._path / _INCOMING).iterdir():
            _clear(left)
        return self._scan()

    @property
    def in_place(self) -> bool:
        """Whether the opened folder still exists. Raises OSError if that cannot be determined."""
        return self._lock.in_place and (self._path / _INCOMING).is_dir()

    def close(self) -> None:
        """Close the folder, so that another process may open it."""
        self._lock.release()

    def write(self, digest: str, data: bytes, *, time: float) -> None:
        """Write a file, and return when it is on the disk. After an error there is none."""
        folders.make(self._path / digest[:2])
        temporary, final = self._path / _INCOMING / digest, self._final(digest)
        try:
            _write(temporary, data, time)
            temporary.replace(final)
            try:
                folders.sync(final.parent)
            except OSError:
                _discard(final)  # it could be gone after a power cut
                raise
        except OSError:
            _discard(temporary)
            raise

    def renew(self, digest: str, *, time: float) -> None:
        """Set the time of a file."""
        os.utime(self._final(digest), (time, time))

    def confirm(self, digest: str, *, size_bytes: int, thoroughly: bool) -> bool:
        """Return whether the file exists with this size.

        Args:
            thoroughly: Whether to check its hash as well, and to make sure that it is on the disk.
        """
        try:
            with self.reading(digest) as descriptor:
                if os.fstat(descriptor).st_size != size_bytes:
                    return False
                if thoroughly:
                    check(descriptor, digest)
                    folders.sync(self._final(digest).parent)
        except (FileNotFoundError, DataLoss):
            return False
        return True

    def is_intact(self, digest: str) -> bool:
        """Return whether the file exists and has its hash."""
        try:
            with self.reading(digest) as descriptor:
                check(descriptor, digest)
        except (FileNotFoundError, DataLoss):
            return False
        return True

    def probe(self) -> None:
        """Write and remove a file, as a test of the disk."""
        path = self._path / _INCOMING / _PROBE
        try:
            _write(path, bytes(_PROBE_BYTES), time=0.0)
        finally:
            _discard(path)

    def remove(self, digest: str) -> None:
        """Remove a file, which may not exist."""
        self._final(digest).unlink(missing_ok=True)

    def open_file(self, digest: str) -> int:
        """Return a descriptor that reads the file, even after its removal. Raises FileNotFoundError."""
        return os.open(self._final(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[int]:
        """Yield a descriptor as `open_file` does, and close it after the block."""
        descriptor = self.open_file(digest)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _final(self, digest: str) -> Path:
        # Only digests become paths.
        if not _DIGEST.fullmatch(digest):
            raise ValueError("not a SHA-256 in hex")
        return self._path / digest[:2] / digest

    def _scan(self) -> Scan:
        files: list[StoredFile] = []
        foreign: list[str] = []
        for folder in os.scandir(self._path):
            if _SHARD.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                _scan_shard(folder, files, foreign)
            elif folder.name != _INCOMING:
                foreign.append(folder.name)
        return Scan(files=tuple(files), foreign=tuple(foreign))


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

        Raises DataLoss if the file has become shorter, and StorageUnavailable if it cannot be read.
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
    """Read the whole file. Raises DataLoss if it does not have its hash."""
    found, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK_BYTES, offset):
        found.update(block)
        offset += len(block)
    if found.hexdigest() != digest:
        raise damaged(digest)


def damaged(digest: str) -> DataLoss:
    """Return the error for a file whose content does not have its hash."""
    return DataLoss(f"the stored image {digest} is damaged", metadata={"digest": digest})


def _scan_shard(folder: os.DirEntry[str], files: list[StoredFile], foreign: list[str]) -> None:
    for entry in os.scandir(folder.path):
        status = entry.stat(follow_symlinks=False)
        ours = _DIGEST.fullmatch(entry.name) and entry.name.startswith(folder.name) and stat.S_ISREG(status.st_mode)
        if ours:
            files.append(StoredFile(digest=entry.name, size_bytes=status.st_size, time=status.st_mtime))
        else:
            foreign.append(f"{folder.name}/{entry.name}")


def _write(path: Path, data: bytes, time: float) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.utime(descriptor, (time, time))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        if error.errno not in os_errors.FORBIDDEN:
            raise


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):  # the first error is the one to report
        path.unlink()
