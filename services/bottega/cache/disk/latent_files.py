"""The store's files: one for each latent, one for each picture, checked by SHA-256 when they are read.

    latents/incoming/<name>      being written; whatever is there at the start was interrupted
    latents/ab/<entry>@<step>    a latent's elements
    latents/ab/<entry>.rgb       the picture of an entry

Half a file never has its name, whatever kills the process. Nothing waits until a file is on the disk: what a power cut
tears does not have its checksum, and is a miss. Its calls may wait for the disk and raise StorageUnavailable.
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

# Of the size of a latent of SDXL.
_PROBE, _PROBE_BYTES = "probe", 256 << 10
_INCOMING = "incoming"
_NAME = re.compile(r"[0-9a-f]{32}(@[0-9]{1,3}|\.rgb)")
_SHARD_DIGITS = 2
_FOREIGN_NAMES_IN_LOG = 5

_log = logging.getLogger(__name__)


def latent_name(entry: str, step: int) -> str:
    """Of the file of an entry's latent."""
    return f"{entry}@{step}"


def picture_name(entry: str) -> str:
    """Of the file of an entry's picture."""
    return f"{entry}.rgb"


class LatentFiles:
    """folder: made where there is none. min_free_bytes: of the disk, see StoreSettings.

    One thread at a time writes and removes; any thread reads.
    """

    def __init__(self, folder: Path, *, min_free_bytes: int = 0) -> None:
        self._folder = folder
        self._incoming = folder / _INCOMING
        self._min_free_bytes = min_free_bytes
        self._shards: set[str] = set()

    def open(self) -> set[str]:
        """Removes what was interrupted, and returns the names that are there."""
        with os_errors.translated():
            folders.make(self._incoming)
            for left in self._incoming.iterdir():
                with contextlib.suppress(OSError):  # what is there is served on a disk that cannot be written, too
                    left.unlink()
            names, foreign = self._scan()
        if foreign:
            facts = {"folder": str(self._folder), "names": foreign[:_FOREIGN_NAMES_IN_LOG]}
            _log.warning("left alone what is no latent", extra=facts)
        return names

    @property
    def in_place(self) -> bool:
        """Whether its folder is still there."""
        return self._incoming.is_dir()

    def write(self, name: str, data: bytes) -> None:
        """Keeps a file. After an error there is none."""
        temporary, final = self._incoming / name, self._final(name)
        with os_errors.translated():
            self._make_shard(final.parent)
            try:
                _write(temporary, data)
                temporary.replace(final)
            except OSError:
                self._shards.discard(final.parent.name)  # it may be gone
                with contextlib.suppress(OSError):  # the error that led here is the one to tell
                    temporary.unlink(missing_ok=True)
                raise

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        """What was written; None where it is not there, or is not that any more."""
        with os_errors.translated():
            try:
                descriptor = os.open(self._final(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as file:  # buffered: it reads on where a file system gives a part
                data = file.read(size_bytes + 1)
        return data if hashlib.sha256(data).digest() == digest else None

    def remove(self, names: Iterable[str]) -> None:
        """Harmless for those that are not there."""
        with os_errors.translated():
            for name in names:
                self._final(name).unlink(missing_ok=True)

    def check_room(self, size_bytes: int) -> None:
        """Raises StorageUnavailable where so much more would leave others less of the disk than it should."""
        free_space.check(self._folder, size_bytes, min_free_bytes=self._min_free_bytes)

    def probe(self) -> None:
        """Returns when something could be written, and was taken away again."""
        path = self._incoming / _PROBE
        with os_errors.translated():
            folders.make(self._incoming)
            self.check_room(_PROBE_BYTES)
            try:
                _write(path, bytes(_PROBE_BYTES))
            finally:
                path.unlink(missing_ok=True)

    def _final(self, name: str) -> Path:
        # Names never become paths: what is none of ours can name no file.
        if not _NAME.fullmatch(name):
            raise ValueError("not the name of a latent or a picture")
        return self._folder / name[:_SHARD_DIGITS] / name

    def _make_shard(self, shard: Path) -> None:
        if shard.name not in self._shards:
            shard.mkdir(mode=0o700, exist_ok=True)
            self._shards.add(shard.name)

    def _scan(self) -> tuple[set[str], list[str]]:
        names: set[str] = set()
        foreign: list[str] = []
        self._shards.clear()
        with os.scandir(self._folder) as found:
            shards = [each for each in found if each.name != _INCOMING and each.is_dir(follow_symlinks=False)]
        for shard in shards:
            with os.scandir(shard.path) as files:
                for file in files:
                    ours = _NAME.fullmatch(file.name) and file.name[:_SHARD_DIGITS] == shard.name
                    names.add(file.name) if ours else foreign.append(file.name)
        return names, foreign


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)
