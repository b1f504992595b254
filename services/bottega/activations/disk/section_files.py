"""The store's files, sections and drawn tensors, named by the SHA-256 of their content.

    sections/incoming/<digest>    being written; what is there at the start was interrupted
    sections/ab/ab<62 digits>     complete

A partial file never has its final name, even if the process is killed. Files are not synced: what a power cut damages
has another digest, which is noticed when it is read, and counts as missing. Calls may block on the disk and raise
StorageUnavailable.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from bottega.storage import folders, free_space, os_errors

PROBE_BYTES = 256 << 10
"""Size of the file by which `probe` tests whether the disk can be written."""

_PROBE = "probe"
_INCOMING = "incoming"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD_DIGITS = 2
_PIECE_BYTES = 4 << 20
_FOREIGN_NAMES_IN_LOG = 5

_log = logging.getLogger(__name__)


class SectionFiles:
    """Files by digest in a folder, which is created if missing.

    One thread at a time may write and remove; any thread may read. `min_free_bytes` is as in ActivationStoreSettings.
    """

    def __init__(self, folder: Path, *, min_free_bytes: int = 0) -> None:
        self._folder = folder
        self._incoming = folder / _INCOMING
        self._min_free_bytes = min_free_bytes

    def open(self) -> dict[str, int]:
        """Delete partial files, and return the size of each file, by digest."""
        with os_errors.translated():
            folders.make(self._incoming)
            for left in self._incoming.iterdir():
                with contextlib.suppress(OSError):  # A disk that cannot be written is still served.
                    left.unlink()
            sizes, foreign = self._scan()
        if foreign:
            facts = {"folder": str(self._folder), "names": foreign[:_FOREIGN_NAMES_IN_LOG]}
            _log.warning("the folder of sections contains other files, which are ignored", extra=facts)
        return sizes

    @property
    def in_place(self) -> bool:
        """Whether the folder still exists."""
        return self._incoming.is_dir()

    def path(self, digest: str) -> Path:
        """Return the path of a digest's file. Raise ValueError for anything else, so that names never become paths."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError("not a SHA-256 in hex")
        return self._folder / digest[:_SHARD_DIGITS] / digest

    def write(self, digest: str, source: int, size_bytes: int) -> None:
        """Write the bytes of the open file `source`. After an error there is no file."""
        temporary, final = self._incoming / digest, self.path(digest)
        with os_errors.translated():
            final.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                _write(temporary, source, size_bytes)
                temporary.replace(final)
            except OSError:
                with contextlib.suppress(OSError):  # The first error is raised.
                    temporary.unlink(missing_ok=True)
                raise

    def read(self, digest: str, size_bytes: int) -> bytes | None:
        """Return a file's bytes; None if it is missing or damaged."""
        with os_errors.translated():
            try:
                descriptor = os.open(self.path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as file:  # Buffered, so that short reads are continued.
                data = file.read(size_bytes + 1)
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def remove(self, digests: Iterable[str]) -> None:
        """Delete files; missing ones are ignored."""
        with os_errors.translated():
            for digest in digests:
                self.path(digest).unlink(missing_ok=True)

    def check_room(self, size_bytes: int) -> None:
        """Raise StorageUnavailable if so many more bytes would leave less than `min_free_bytes` on the disk."""
        free_space.check(self._folder, size_bytes, min_free_bytes=self._min_free_bytes)

    def lack(self, size_bytes: int) -> int:
        """Return how many bytes must be freed for so many more. Raise StorageUnavailable."""
        return free_space.lack(self._folder, size_bytes, min_free_bytes=self._min_free_bytes)

    def probe(self) -> None:
        """Write and delete a file, to test the disk."""
        path = self._incoming / _PROBE
        with os_errors.translated():
            folders.make(self._incoming)
            self.check_room(PROBE_BYTES)
            try:
                path.write_bytes(bytes(PROBE_BYTES))
            finally:
                path.unlink(missing_ok=True)

    def _scan(self) -> tuple[dict[str, int], list[str]]:
        sizes: dict[str, int] = {}
        foreign: list[str] = []
        with os.scandir(self._folder) as found:
            shards = [each for each in found if each.name != _INCOMING and each.is_dir(follow_symlinks=False)]
        for shard in shards:
            with os.scandir(shard.path) as files:
                for file in files:
                    if _DIGEST.fullmatch(file.name) and file.name[:_SHARD_DIGITS] == shard.name:
                        sizes[file.name] = file.stat(follow_symlinks=False).st_size
                    else:
                        foreign.append(file.name)
        return sizes, foreign


def _write(path: Path, source: int, size_bytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        place = 0
        while place < size_bytes:
            rest = memoryview(os.pread(source, min(_PIECE_BYTES, size_bytes - place), place))
            if not rest:
                raise OSError("the source has become shorter")
            place += len(rest)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)
