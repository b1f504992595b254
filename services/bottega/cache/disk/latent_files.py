"""The store's files: one for each latent and one for each picture, checked by SHA-256 when they are read.

    latents/incoming/<name>      being written; what is here at the start was interrupted
    latents/ab/<entry>@<step>    a latent's elements
    latents/ab/<entry>.rgb       the picture of an entry

A partial file never has its final name, even if the process is killed. Nothing waits for the data to reach the disk: a
file that a power cut damaged fails its checksum, which is a miss. Calls may wait for the disk and raise
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

# About the size of an SDXL latent.
_PROBE, _PROBE_BYTES = "probe", 256 << 10
_INCOMING = "incoming"
_NAME = re.compile(r"[0-9a-f]{32}(@[0-9]{1,3}|\.rgb)")
_SHARD_DIGITS = 2
_FOREIGN_NAMES_IN_LOG = 5

_log = logging.getLogger(__name__)


def latent_name(entry: str, step: int) -> str:
    """Return the name of a latent's file."""
    return f"{entry}@{step}"


def picture_name(entry: str) -> str:
    """Return the name of a picture's file."""
    return f"{entry}.rgb"


class LatentFiles:
    """The files of latents and pictures. One thread at a time writes and removes; any thread reads.

    Args:
        folder: Created if it does not exist.
        min_free_bytes: See StoreSettings.
    """

    def __init__(self, folder: Path, *, min_free_bytes: int = 0) -> None:
        self._folder = folder
        self._incoming = folder / _INCOMING
        self._min_free_bytes = min_free_bytes
        self._shards: set[str] = set()

    def open(self) -> set[str]:
        """Remove interrupted files, and return the names of complete ones."""
        with os_errors.translated():
            folders.make(self._incoming)
            for left in self._incoming.iterdir():
                with contextlib.suppress(OSError):  # files on a read-only disk are served, too
                    left.unlink()
            names, foreign = self._scan()
        if foreign:
            facts = {"folder": str(self._folder), "names": foreign[:_FOREIGN_NAMES_IN_LOG]}
            _log.warning("files that are not latents were left alone", extra=facts)
        return names

    @property
    def in_place(self) -> bool:
        """Whether its folder still exists."""
        return self._incoming.is_dir()

    def write(self, name: str, data: bytes) -> None:
        """Write a file. After an error there is none."""
        temporary, final = self._incoming / name, self._final(name)
        with os_errors.translated():
            self._make_shard(final.parent)
            try:
                _write(temporary, data)
                temporary.replace(final)
            except OSError:
                self._shards.discard(final.parent.name)  # the folder may be gone
                with contextlib.suppress(OSError):  # the first error is the one to report
                    temporary.unlink(missing_ok=True)
                raise

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        """Return the content of a file; None if it does not exist or is damaged."""
        with os_errors.translated():
            try:
                descriptor = os.open(self._final(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as file:  # buffered, because a file system may return only a part
                data = file.read(size_bytes + 1)
        return data if hashlib.sha256(data).digest() == digest else None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that may not exist."""
        with os_errors.translated():
            for name in names:
                self._final(name).unlink(missing_ok=True)

    def check_room(self, size_bytes: int) -> None:
        """Raise StorageUnavailable if that many more bytes would leave too little of the disk to others."""
        free_space.check(self._folder, size_bytes, min_free_bytes=self._min_free_bytes)

    def probe(self) -> None:
        """Write and remove a file as a test."""
        path = self._incoming / _PROBE
        with os_errors.translated():
            folders.make(self._incoming)
            self.check_room(_PROBE_BYTES)
            try:
                _write(path, bytes(_PROBE_BYTES))
            finally:
                path.unlink(missing_ok=True)

    def _final(self, name: str) -> Path:
        # Only valid names become paths.
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
            shards = [item for item in found if item.name != _INCOMING and item.is_dir(follow_symlinks=False)]
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
