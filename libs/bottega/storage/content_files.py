"""A folder of files named by the SHA-256 of what they hold: written whole or not at all, and checked when read.

    folder/incoming/<digest>    being written; whatever is there at the start was interrupted, and counts for nothing
    folder/ab/ab<62 digits>     complete, and on the disk

Its methods block and raise OSError.
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

from bottega.errors import DataLoss
from bottega.storage import folders, os_errors
from bottega.storage.process_lock import ProcessLock

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_INCOMING = "incoming"
_BLOCK_BYTES = 1 << 20
# Of the size of a small picture.
_PROBE, _PROBE_BYTES = "probe", 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """time: Unix seconds at which it was last put."""

    digest: str
    size_bytes: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """foreign: paths of what the store did not put there, relative to the folder."""

    files: tuple[StoredFile, ...]
    foreign: tuple[str, ...]


class ContentFolder:
    """One process at a time has a folder open, so that nobody takes another's half-written files for lost ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = ProcessLock(path)

    def open(self) -> Scan:
        """Creates the folder or takes it over: removes what was interrupted, and says what is there.

        What is there can be read on a disk that cannot be written: there what was interrupted stays. Raises
        BlockingIOError when another process has it.
        """
        folders.make_own(self._path)
        self._lock.acquire()
        folders.make(self._path / _INCOMING)
        for left in (self._path / _INCOMING).iterdir():
            _clear(left)
        return self._scan()

    @property
    def in_place(self) -> bool:
        """Whether the folder that was opened is still there. Raise OSError where that cannot be seen."""
        return self._lock.in_place and (self._path / _INCOMING).is_dir()

    def close(self) -> None:
        """Lets another process have the folder."""
        self._lock.release()

    def write(self, digest: str, data: bytes, *, time: float) -> None:
        """The file is complete and on the disk when this returns; after an error there is none."""
        folders.make(self._path / digest[:2])
        temporary, final = self._path / _INCOMING / digest, self._final(digest)
        try:
            _write(temporary, data, time)
            temporary.replace(final)
            try:
                folders.sync(final.parent)
            except OSError:
                _discard(final)  # it could be gone after a power cut, which nobody must rely on
                raise
        except OSError:
            _discard(temporary)
            raise

    def renew(self, digest: str, *, time: float) -> None:
        """Sets the time of a file."""
        os.utime(self._final(digest), (time, time))

    def confirm(self, digest: str, *, size_bytes: int, thoroughly: bool) -> bool:
        """Whether the file is there with this size; thoroughly: also with its hash, and on the disk for certain."""
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
        """Whether the file is there with its hash."""
        try:
            with self.reading(digest) as descriptor:
                check(descriptor, digest)
        except (FileNotFoundError, DataLoss):
            return False
        return True

    def probe(self) -> None:
        """Writes something and takes it away again. Raises OSError where a file could not be written."""
        path = self._path / _INCOMING / _PROBE
        try:
            _write(path, bytes(_PROBE_BYTES), time=0.0)
        finally:
            _discard(path)

    def remove(self, digest: str) -> None:
        """Harmless when it has gone."""
        self._final(digest).unlink(missing_ok=True)

    def open_file(self, digest: str) -> int:
        """A descriptor to read the file by, which outlives its removal. Raises FileNotFoundError."""
        return os.open(self._final(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[int]:
        """`open_file`, closed at the end of the block."""
        descriptor = self.open_file(digest)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _final(self, digest: str) -> Path:
        # Names never become paths: what is no digest can name no file.
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


def check(descriptor: int, digest: str) -> None:
    """Reads the whole file. Raises DataLoss when it does not have its hash."""
    found, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK_BYTES, offset):
        found.update(block)
        offset += len(block)
    if found.hexdigest() != digest:
        raise damaged(digest)


def damaged(digest: str) -> DataLoss:
    """The error for a file that does not hold what its name says."""
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
    with contextlib.suppress(OSError):  # the error that led here is the one to tell
        path.unlink()
