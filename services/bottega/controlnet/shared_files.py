"""Files of shared ControlNets in S3, for servers whose machines have no folder in common. Needs the extra `s3`.

Each file is an object whose name is the SHA-256 of the file. If a ControlNet was added at another server, a server
copies its files to root/shared/<digest>/.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from bottega.errors import DataLoss, Unavailable
from bottega.model_files.digest import controlnet_digest, controlnet_files, file_digest
from bottega.storage import os_errors
from bottega.storage.folders import make, open_below
from bottega.storage.objects import s3_location
from bottega.storage.s3 import S3Objects

_NAMES = re.compile(r"[0-9a-f]{64}")
_FOLDER = "shared"
_INCOMING = ".incoming-"
# Seconds for which objects that belong to no ControlNet are kept: an upload writes objects before it adds the
# ControlNet.
_UNUSED_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file of a ControlNet."""

    path: str
    """Path of the file in the ControlNet's folder."""
    sha256: str
    size_bytes: int


_FILES = TypeAdapter(tuple[SharedFile, ...])


class SharedFiles:
    """The files of the ControlNets in a shared catalogue. All methods block, and may raise StorageUnavailable.

    Args:
        s3_url: s3://bucket/prefix.
        root: Folder with the server's own ControlNets; copies are written below it, too.
    """

    def __init__(self, s3_url: str, root: Path) -> None:
        self._objects = S3Objects(s3_location(s3_url), names=_NAMES)
        self._root = root
        self._copies = root / _FOLDER
        self._closed = threading.Event()

    def close(self) -> None:
        """Let uploads and copies that are being made end soon, with an error."""
        self._closed.set()

    def open(self) -> None:
        """Test S3, and remove incomplete copies of a killed process."""
        self._objects.probe()
        with os_errors.translated():
            for incoming in self._copies.glob(f"{_INCOMING}*"):
                shutil.rmtree(incoming)

    def upload(self, folder: str) -> str:
        """Upload the files of a ControlNet and return a description of them. `folder` is relative to the root."""
        found = self._root / folder
        files = []
        with os_errors.translated():
            for path in controlnet_files(found):
                self._check_open()
                with open_below(path, self._root) as file:
                    opened = Path(f"/proc/self/fd/{file.fileno()}")
                    sha256, size_bytes = file_digest(opened), opened.stat().st_size
                    self._objects.upload(sha256, opened)
                files.append(SharedFile(path=path.relative_to(found).as_posix(), sha256=sha256, size_bytes=size_bytes))
        return _FILES.dump_json(tuple(files)).decode()

    def fetch(self, digest: str, description: str) -> str:
        """Copy the files of a ControlNet below the root, unless it has them whole; return their folder in it.

        Raises DataLoss if an object differs from the file that was uploaded. The caller must compare the digest.
        """
        if not _NAMES.fullmatch(digest):
            raise _damaged()
        target = self._copies / digest
        with os_errors.translated():
            if target.is_dir() and not self._is_whole(target, digest):
                shutil.rmtree(target)
            if not target.is_dir():
                make(self._copies)
                with tempfile.TemporaryDirectory(prefix=_INCOMING, dir=self._copies) as incoming:
                    whole = Path(incoming) / digest
                    for file in _files(description):
                        self._copy(file, whole / file.path)
                    whole.rename(target)
        return f"{_FOLDER}/{digest}"

    def unused_for_long(self) -> Sequence[str]:
        """Return the objects that were written so long ago that those without a ControlNet are not needed."""
        return [item.name for item in self._objects.objects() if item.age_s > _UNUSED_S]

    def sweep(self, digests: Collection[str], descriptions: Collection[str], objects: Collection[str]) -> None:
        """Delete copies and objects of ControlNets that are not in the catalogue any more.

        Args:
            digests: Hashes of all ControlNets in the catalogue, and of those that the server hosts.
            descriptions: Results of `upload` for all in the catalogue; "" of those whose files are not uploaded yet.
            objects: Result of `unused_for_long`.
        """
        # Of an empty database, others may know better. An upload may be writing objects that have been there before.
        if descriptions and all(descriptions):
            used = {file.sha256 for description in descriptions for file in _files(description)}
            self._objects.remove(set(objects) - used)
        with os_errors.translated():
            for copy in self._copies.glob("[0-9a-f]*"):
                if copy.name not in digests:
                    shutil.rmtree(copy)

    def _is_whole(self, copy: Path, digest: str) -> bool:
        try:
            return controlnet_digest(copy, self._root) == digest
        except (OSError, ValueError):  # of a file that is lacking or damaged
            return False

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("the ControlNet server is stopping")

    def _copy(self, file: SharedFile, target: Path) -> None:
        hashed = hashlib.sha256()
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            for part in self._objects.parts(file.sha256, file.size_bytes):
                copy.write(part)
                hashed.update(part)
                self._check_open()
        if hashed.hexdigest() != file.sha256:
            raise DataLoss(f"the object of {file.path} in S3 is damaged; add the ControlNet again")


def _files(description: str) -> Iterator[SharedFile]:
    """Yield the files of a ControlNet. Raises DataLoss if the description is damaged, or has outside paths."""
    try:
        files = _FILES.validate_json(description)
    except ValidationError:
        raise _damaged() from None
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not _NAMES.fullmatch(file.sha256):
            raise _damaged()
        yield file


def _damaged() -> DataLoss:
    return DataLoss("the description of a ControlNet's files in the database is damaged; add it again")
