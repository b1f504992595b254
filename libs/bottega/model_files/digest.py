"""Hashes of model folders, over the names and contents of their files."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType

import psutil

from bottega import rules
from bottega.model_files.configuration_rules import INDEX_FILE
from bottega.model_files.controlnet_config import FILE
from bottega.model_files.presets import Preset
from bottega.model_files.report import ModelReport
from bottega.state_folder import make_private, write_whole
from bottega.storage.folders import listed, open_below

_PIECE_BYTES = 4 << 20
# Endings of configurations, vocabularies and chat templates.
_CONFIGURATIONS = frozenset({".jinja", ".json", ".txt"})
# Smaller files are hashed in less than .1 s.
_LEAST_KEPT_BYTES = 64 << 20
_MAX_KEPT = 1000
# A file that changed so shortly before it was hashed may change again without another time stamp.
_UNSETTLED_NS = 2_000_000_000
# File systems on which the local kernel sets a time stamp at every change, which callers cannot set. Others have no
# such time stamp (vfat, exfat) or take it from another clock (SMB, NFS).
_CHANGE_TIMES = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
# Bytes of a ControlNet's files, which take a minute to hash. ControlNets of SDXL have 5 GB.
_MAX_CONTROLNET_BYTES = 32 << 30


def files_digest(folder: Path, paths: Iterable[Path], *, hashed: Callable[[Path], str] | None = None) -> str:
    """Return the SHA-256 over the names and contents of files with weights or configurations, in hexadecimal.

    Args:
        folder: Folder that contains all paths.
        paths: Paths of files. Files of other types are ignored.
        hashed: Returns the SHA-256 of a file's contents in hexadecimal. By default the file is read, following links.
    """
    total = hashlib.sha256()
    for path in sorted(paths):
        if path.suffix in {".safetensors", *_CONFIGURATIONS}:
            content = (hashed or file_digest)(path)
            total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def file_digest(path: Path, on_read: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Args:
        on_read: Called with the size of each piece that was read.
    """
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            total.update(piece)
            on_read(len(piece))
    return total.hexdigest()


class KnownDigests:
    """The digests of large files, which are kept in a file so that each version of a file is hashed once.

    A digest counts while path, inode, size and time stamps are the same. The kernel sets one of the time stamps (ctime)
    at every change. Without a file, or if it cannot be read or written, every file is hashed. Several processes may
    share a file.

    Limits: a program that changes a file through a shared memory mapping may do so a while before the time stamp
    changes. If the system's clock is set back, a later change may get the time stamp of an earlier one. Digests of
    files on a file system without such a time stamp are not kept.

    Args:
        file: Where digests are kept; None to keep none.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known = _read(file) if file is not None else {}

    def digest(self, path: Path, on_read: Callable[[int], None] = lambda _: None) -> str:
        """Return the SHA-256 of a file, in hexadecimal.

        Args:
            on_read: Called with the size of each piece that was read; once if nothing had to be read.
        """
        name, before, now_ns = str(path.resolve()), _version(path), time.time_ns()
        known = self._known.get(name)
        if isinstance(known, list) and known[:-1] == before and isinstance(known[-1], str):
            on_read(path.stat().st_size)
            return known[-1]
        found = file_digest(path, on_read)
        status = path.stat()
        settled = max(status.st_mtime_ns, status.st_ctime_ns) < now_ns - _UNSETTLED_NS
        unchanged = settled and _version(path) == before and _has_change_time(name)
        if self._file is not None and status.st_size >= _LEAST_KEPT_BYTES and unchanged:
            self._keep(self._file, name, [*before, found])
        return found

    def _keep(self, file: Path, name: str, entry: list[object]) -> None:
        """Add an entry to those in the file, to which other processes may have added some."""
        with contextlib.suppress(OSError):
            make_private(file.parent)
            lock = os.open(file.with_name(f".{file.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._known = _read(file)
                self._known.pop(name, None)
                self._known[name] = entry
                while len(self._known) > _MAX_KEPT:
                    del self._known[next(iter(self._known))]
                write_whole(file, json.dumps(self._known).encode())
            finally:
                os.close(lock)


def _read(file: Path) -> dict[str, object]:
    """Return the kept entries; an empty dict if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def _has_change_time(path: str) -> bool:
    """Return whether the file system of an absolute path is one of `_CHANGE_TIMES`."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return False
    # Reversed, because the last of several file systems at one place is the visible one.
    above = [mount for mount in reversed(mounts) if path.startswith(f"{mount.mountpoint.rstrip('/')}/")]
    return bool(above) and max(above, key=lambda mount: len(mount.mountpoint)).fstype in _CHANGE_TIMES


def _version(path: Path) -> list[object]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def model_digest(
    report: ModelReport,
    preset: Preset | None = None,
    on_read: Callable[[int], None] = lambda _: None,
    known: KnownDigests | None = None,
    *,
    text_dtypes: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the SHA-256 of a model, hex: of the names and contents of its index and of all files that are loaded.

    Other files in the folder, such as ControlNets, LoRAs and weights of another variant, do not change what the model
    draws. Of a preset only the fields of its scheduler do; the rest are defaults, which each request's parameters
    contain.

    Args:
        text_dtypes: Element types of text encoders, by part, that differ from that of the model.
    """
    paths, other = {report.folder / INDEX_FILE}, set[Path]()
    for part in report.parts.values():
        found = {path for path in part.folder.iterdir() if path.suffix in _CONFIGURATIONS and path.is_file()}
        found |= set(part.files)
        if part.folder.parent == report.folder:
            paths |= found
        else:
            other |= found
    hashed = partial((known or KnownDigests()).digest, on_read=on_read)
    total = files_digest(report.folder, paths, hashed=hashed)
    if other:  # a VAE in the place of the model's own
        replaced = files_digest(next(iter(other)).parent, other, hashed=hashed)
        total = hashlib.sha256(f"{total}\0vae={replaced}".encode()).hexdigest()
    different = {**(preset or Preset()).scheduler_overrides, **dict(sorted(text_dtypes.items()))}
    changes = "".join(f"\0{name}={value}" for name, value in different.items())
    return hashlib.sha256(f"{total}{changes}".encode()).hexdigest() if changes else total


def controlnet_digest(folder: Path, root: Path | None = None) -> str:
    """Return the SHA-256 over the names and contents of a ControlNet's files, in hexadecimal.

    Args:
        folder: Folder of the ControlNet.
        root: Folder that must contain all files; None for no restriction.

    Raises:
        OSError: A file cannot be read, or is outside the root.
        ValueError: The files are too large.
    """
    left = _MAX_CONTROLNET_BYTES

    def hashed(path: Path) -> str:
        nonlocal left
        with open_below(path, root) as file:
            left -= os.fstat(file.fileno()).st_size
            if left < 0:
                raise ValueError(f"its files have more than {_MAX_CONTROLNET_BYTES} bytes")
            return _sha256(file, os.fstat(file.fileno()).st_size)

    return files_digest(folder, controlnet_files(folder), hashed=hashed)


def controlnet_files(folder: Path) -> list[Path]:
    """Return the files of a ControlNet that its digest covers. Raises OSError."""
    return [folder / FILE, *listed(folder, ".safetensors", most=rules.MAX_CONTROLNET_FILES, deep=True)]


def _sha256(file: BufferedReader, size_bytes: int) -> str:
    """Return the hash of the first `size_bytes`, so that reading ends even if the file grows meanwhile."""
    total = hashlib.sha256()
    while size_bytes > 0 and (chunk := file.read(min(size_bytes, _PIECE_BYTES))):
        total.update(chunk)
        size_bytes -= len(chunk)
    return total.hexdigest()
