"""The files of a store in one folder, named by the store, most of them by the SHA-256 of their content, and a reader.

<folder>/incoming/<name>    files being written; those that are here at the start were interrupted
<folder>/ab/ab...           complete files

A partial file never has its final name, even if the process is killed. Calls may wait for the disk and raise
StorageUnavailable.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from bottega.errors import DataLoss
from bottega.storage import folders, os_errors
from bottega.storage.objects import StoredObject
from bottega.storage.thread import FairThread

PROBE_BYTES = 256 << 10
"""Size of the file by which `probe` tests whether the disk can be written."""

_PROBE = "probe"
_INCOMING = "incoming"
_SHARD = re.compile(r"[0-9a-f]{2}")
_PIECE_BYTES = 4 << 20
_FOREIGN_NAMES_IN_LOG = 5
_BLOCK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class BlobFiles:
    """The files of a store in a folder; an ObjectStore. Only one process at a time may write, from any threads.

    Args:
        folder: Created if it does not exist.
        names: Matches a file's whole name. Names begin with two hex digits.
        min_free_bytes: Bytes of disk space to leave to other programs. A value above 5 % of the disk counts as 5 %.
        synced: Whether files and their names are on the disk when a call that writes returns. If False, a power cut may
            damage a file; its checksum then fails, which counts as missing.
    """

    def __init__(self, folder: Path, *, names: re.Pattern[str], min_free_bytes: int = 0, synced: bool = False) -> None:
        self._folder = folder
        self._incoming = folder / _INCOMING
        self._names = names
        self._min_free_bytes = min_free_bytes
        self._synced = synced
        # Names of folders of files that exist. Creating them again would take longer than writing a file.
        self._shards: set[str] = set()
        self._writing = threading.Lock()

    def open(self) -> set[str]:
        """Remove interrupted files, and return the names of complete ones."""
        self.clear()
        return {file.name for file in self.scan()}

    def clear(self) -> None:
        """Create the folder, and remove interrupted files. On a read-only disk they stay."""
        with os_errors.translated():
            folders.make(self._incoming)
            for left in self._incoming.iterdir():
                try:
                    left.unlink()
                except OSError as error:
                    if self._synced and error.errno not in os_errors.FORBIDDEN:
                        raise

    def scan(self) -> list[os.DirEntry[str]]:
        """Return all complete files. The names of other files are logged."""
        with os_errors.translated():
            found, foreign = self._scan()
        if foreign:
            facts = {"folder": str(self._folder), "names": foreign[:_FOREIGN_NAMES_IN_LOG]}
            _log.warning("the folder has files of other programs, which are left alone", extra=facts)
        return found

    @property
    def in_place(self) -> bool:
        """Whether the folder still exists."""
        return self._incoming.is_dir()

    def path(self, name: str) -> Path:
        """Return the path of a file. Raise ValueError for an invalid name, so that only valid names become paths."""
        if not self._names.fullmatch(name):
            raise ValueError("not the name of a file of this store")
        return self._folder / name[:2] / name

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        with os_errors.translated():
            try:
                return self.path(name).stat().st_size
            except FileNotFoundError:
                return None

    def spool(self) -> Path:
        """Create an empty file to write to. The caller removes it, or moves it into place with `adopt`."""
        with os_errors.translated():
            descriptor, name = tempfile.mkstemp(dir=self._incoming)
            os.close(descriptor)
        return Path(name)

    def adopt(self, name: str, source: Path) -> None:
        """Move a complete file on the same disk into place. An existing file is replaced."""
        final = self.path(name)
        with os_errors.translated():
            self._make_shard(final.parent)
            source.replace(final)
            if self._synced:
                folders.sync(final.parent)

    def write(self, name: str, data: bytes, *, time: float | None = None) -> None:
        """Write a file. If an error is raised, there is no such file.

        Args:
            time: Modification time of the file, in Unix time; None is now.
        """
        self._write(name, [memoryview(data)], time)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless one of that name exists. Return whether it was written."""
        temporary, final = self._incoming / name, self.path(name)
        with self._writing, os_errors.translated():
            self._make_shard(final.parent)
            try:
                self._write_file(temporary, [memoryview(data)], None)
                final.hardlink_to(temporary)
                if self._synced:
                    _sync_or_remove(final)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    temporary.unlink()
        return True

    def objects(self, start: str = "") -> Iterator[StoredObject]:
        """Yield the complete files whose names begin with `start`, which is empty or has at least two characters."""
        with os_errors.translated():
            for file in self._scan(start[:2])[0]:
                if file.name.startswith(start):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        age_s = max(0.0, time.time() - status.st_mtime)
                        yield StoredObject(name=file.name, size_bytes=status.st_size, age_s=age_s)

    def copy(self, name: str, source: int, size_bytes: int) -> None:
        """Write a file with the first bytes of the open file `source`. If an error is raised, there is no such file."""
        self._write(name, _pieces(source, size_bytes), None)

    def open_file(self, name: str) -> int:
        """Return a descriptor that reads the file, even after its removal. Raise OSError if it cannot be opened."""
        return os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        """Return the content of a file; None if it does not exist or is damaged."""
        with os_errors.translated():
            try:
                descriptor = self.open_file(name)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as file:  # buffered, because a file system may return only a part
                data = file.read(size_bytes + 1)
        return data if hashlib.sha256(data).digest() == digest else None

    def remove(self, names: Iterable[str], *, synced: bool = False) -> None:
        """Remove files. Ignore those that do not exist.

        Args:
            synced: Whether to wait until they are removed from the disk.
        """
        with os_errors.translated():
            for name in names:
                path = self.path(name)
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    if synced:
                        folders.sync(path.parent)

    def check_room(self, size_bytes: int) -> None:
        """Raise StorageUnavailable if writing this many bytes would leave too little free space to other programs."""
        os_errors.check(self._folder, size_bytes, min_free_bytes=self._min_free_bytes)

    def lack(self, size_bytes: int) -> int:
        """Return how many bytes must be freed before `size_bytes` more may be written."""
        return os_errors.lack(self._folder, size_bytes, min_free_bytes=self._min_free_bytes)

    def probe(self) -> None:
        """Write and remove a file, as a test of the disk."""
        path = self._incoming / _PROBE
        with os_errors.translated():
            folders.make(self._incoming)
            self.check_room(PROBE_BYTES)
            try:
                self._write_file(path, [memoryview(bytes(PROBE_BYTES))], None)
            finally:
                path.unlink(missing_ok=True)

    def _write(self, name: str, pieces: Iterable[memoryview], time: float | None) -> None:
        temporary, final = self._incoming / name, self.path(name)
        with self._writing, os_errors.translated():
            self._make_shard(final.parent)
            try:
                self._write_file(temporary, pieces, time)
                temporary.replace(final)
                if self._synced:
                    _sync_or_remove(final)
            except OSError:
                self._shards.discard(final.parent.name)  # it may have been deleted
                with contextlib.suppress(OSError):  # the first error is the one to report
                    temporary.unlink(missing_ok=True)
                raise

    def _write_file(self, path: Path, pieces: Iterable[memoryview], time: float | None) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for piece in pieces:
                rest = piece
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            if time is not None:
                os.utime(descriptor, (time, time))
            if self._synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _make_shard(self, shard: Path) -> None:
        if self._synced:
            folders.make(shard)
        elif shard.name not in self._shards:
            shard.mkdir(mode=0o700, exist_ok=True)
            self._shards.add(shard.name)

    def _scan(self, only: str = "") -> tuple[list[os.DirEntry[str]], list[str]]:
        ours: list[os.DirEntry[str]] = []
        foreign: list[str] = []
        if not only:
            self._shards.clear()
        with os.scandir(self._folder) as shards:
            for shard in shards:
                if only and shard.name != only:
                    continue
                if _SHARD.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                    with os.scandir(shard.path) as files:
                        for file in files:
                            is_ours = self._names.fullmatch(file.name) and file.name.startswith(shard.name)
                            if is_ours and file.is_file(follow_symlinks=False):
                                ours.append(file)
                            else:
                                foreign.append(f"{shard.name}/{file.name}")
                elif shard.name != _INCOMING:
                    foreign.append(shard.name)
        return ours, foreign


def _sync_or_remove(final: Path) -> None:
    """Wait until a new file's name is on the disk. If that fails, remove the file, because a power cut could."""
    try:
        folders.sync(final.parent)
    except OSError:
        with contextlib.suppress(OSError):
            final.unlink()
        raise


def _pieces(source: int, size_bytes: int) -> Iterator[memoryview]:
    place = 0
    while place < size_bytes:
        piece = memoryview(os.pread(source, min(_PIECE_BYTES, size_bytes - place), place))
        if not piece:
            raise OSError("the source file was truncated meanwhile")
        place += len(piece)
        yield piece


class ContentReader:
    """A reader of one image in parts, which works even if the store deletes the image. An async context manager."""

    def __init__(self, thread: FairThread, descriptor: int, digest: str, *, size_bytes: int, owner: str) -> None:
        self._thread = thread
        self._owner = owner
        self._descriptor: int | None = descriptor
        self._digest = digest
        self.size_bytes = size_bytes

    @classmethod
    def of_bytes(cls, thread: FairThread, data: bytes, digest: str, *, owner: str) -> ContentReader:
        """Return a reader of bytes in memory."""
        descriptor = os.memfd_create("image", os.MFD_CLOEXEC)
        os.pwrite(descriptor, data, 0)
        return cls(thread, descriptor, digest, size_bytes=len(data), owner=owner)

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
