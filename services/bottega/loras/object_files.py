"""The store's files as objects in S3, with a folder of verified copies in front.

    s3://bucket/prefix/ab/<digest>.safetensors        weights
    s3://bucket/prefix/ab/<digest>.<16 digits>.json   descriptions
    tier/                                             copies of weights, the least recently used of which are deleted

A LoRA is imported when S3 has it. A copy is checked by its digest when it is first opened, and a damaged or missing one
is read from S3 again. Objects that the catalogue does not list stay where they are, and are in quarantine.

At the first start with S3, the files that the store has in its folder are moved to S3.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.errors import DataLoss, StorageUnavailable, TooLarge
from bottega.loras.files import (
    LORA_FILES,
    DiskQuota,
    FolderScan,
    LoraFolder,
    description_name,
    log_undescribed,
    read_canonical,
)
from bottega.loras.quarantine import WEIGHTS, QuarantinedObjects, is_intact
from bottega.loras.records import DESCRIPTION, CatalogueRecord, description_of
from bottega.storage import BlobFiles, os_errors
from bottega.storage.blob_files import check
from bottega.storage.objects import StoredObject

if TYPE_CHECKING:  # obstore is optional
    from bottega.storage.s3 import S3Objects

# Files of the same turn are fetched one after the other, so that none is fetched twice.
_TURNS = 16

_log = logging.getLogger(__name__)


class LoraObjects:
    """The store's files in S3; has the methods of LoraFolder. Every method may raise StorageUnavailable.

    Any thread may call `size_of` and `open_file`.

    Args:
        place: Address of the objects, for operators.
        folder: The store's folder.
        budget_bytes: Upper bound on the bytes of all weights in S3.
        local_bytes: Upper bound on the bytes of copies in the folder, and of files being written.
        min_free_bytes: Bytes that stay free on the disk, see DiskQuota.
    """

    def __init__(
        self,
        objects: S3Objects,
        place: str,
        folder: Path,
        *,
        budget_bytes: int,
        local_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self._objects = objects
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._tier = BlobFiles(folder / "tier", names=LORA_FILES)
        self._lock = threading.Lock()
        self._local: OrderedDict[str, int] = OrderedDict()
        """Sizes of the copies by digest, the last used last."""
        self._checked: set[str] = set()
        """Digests of copies that were found to be intact."""
        self._stored: dict[str, int] = {}
        """Sizes of weights in S3 by digest, as of the last scan and of what became known since."""
        self._turns = [threading.Lock() for _ in range(_TURNS)]
        self.quarantine = QuarantinedObjects(
            place, read=self._read_object, remove=lambda name: objects.remove([name]), in_place=self.size_of
        )
        self.room = DiskQuota(
            folder / "tier",
            budget_bytes=local_bytes,
            min_free_bytes=min_free_bytes,
            kept_bytes=lambda: self.used_bytes,
            evict=self._evict,
        )

    @property
    def used_bytes(self) -> int:
        """Total bytes of the copies in the folder."""
        with self._lock:
            return sum(self._local.values())

    def open(self) -> None:
        """Create or open the folder, test S3, and move files from before there was S3."""
        self._tier.clear()
        copies = [file for file in self._tier.objects() if file.name.endswith(WEIGHTS)]
        with self._lock:
            self._local = OrderedDict(
                (_digest(file), file.size_bytes) for file in sorted(copies, key=lambda file: -file.age_s)
            )
        self._objects.probe()
        self._move_to_objects(self._folder / "files", "??/*")
        self._move_to_objects(self._folder / "quarantine", "*")

    def reconcile(self, records: Collection[CatalogueRecord]) -> FolderScan:
        """Make the files agree with the catalogue.

        Objects to which no record refers are in quarantine from then on. Objects that are missing are written from
        their copies, and missing descriptions as well.
        """
        wanted = {record.digest for record in records}
        described = {description_name(record.digest, record.name) for record in records}
        found = list(self._objects.objects())
        weights = {_digest(file): file for file in found if file.name.endswith(WEIGHTS)}
        unlisted = [
            *(file for digest, file in weights.items() if digest not in wanted),
            *(file for file in found if file.name.endswith(DESCRIPTION) and file.name not in described),
        ]
        with self._lock:
            self._stored = {digest: file.size_bytes for digest, file in weights.items()}
        lost = [digest for digest in wanted - weights.keys() if not self._write_again(digest)]
        new = self.quarantine.set(unlisted)
        names = {file.name for file in found}
        for record in records:
            if description_name(record.digest, record.name) not in names:
                self.describe(record)
        for digest in list(self._local):
            if digest not in wanted:
                self._drop(digest)
        moved_bytes = sum(file.size_bytes for file in new if file.name.endswith(WEIGHTS))
        return FolderScan(lost=tuple(sorted(lost)), moved=len(new), moved_bytes=moved_bytes)

    def path(self, digest: str) -> Path:
        """Return the path for a copy of the weights with a digest. Raises ValueError for an invalid digest."""
        return self._tier.path(_weights(digest))

    def has(self, digest: str) -> bool:
        """Return whether S3 has weights with this digest."""
        return self._find(digest) is not None

    def size_of(self, digest: str) -> int | None:
        """Return the size of weights as far as it is known without asking S3."""
        with self._lock:
            return self._local.get(digest) or self._stored.get(digest)

    def learn(self, sizes: Mapping[str, int]) -> None:
        """Note sizes of weights by digest, which another store may have written."""
        with self._lock:
            self._stored.update(sizes)

    def open_file(self, digest: str) -> int:
        """Return a descriptor that reads weights, from a copy if there is an intact one, else from S3.

        Raises FileNotFoundError, DataLoss if the object is damaged, and the errors of DiskQuota.reserve.
        """
        with self._turns[hash(digest) % _TURNS]:
            descriptor = self._open_copy(digest)
            return self._fetch(digest) if descriptor is None else descriptor

    def open_any(self, digest: str) -> BufferedReader:
        """Open weights, which may be in quarantine. Raises the errors of `open_file`."""
        return os.fdopen(self.open_file(digest), "rb")

    def spool(self) -> Path:
        """Create an empty file to write to. The caller removes it, or passes it to `adopt`."""
        return self._tier.spool()

    def adopt(self, spool: Path) -> tuple[str, CanonicalLora]:
        """Write a canonical file to S3. Return the digest and the parsed content.

        An existing object is replaced, because it may be damaged. Raises BadLora for a file that is not canonical, and
        TooLarge beyond the budget.
        """
        digest, lora = read_canonical(spool)
        with self._lock:
            others_bytes = sum(self._stored.values()) - self._stored.get(digest, 0)
        if others_bytes + lora.file_bytes > self._budget_bytes:
            raise TooLarge(
                f"the store's files in S3 would exceed objects_bytes, {self._budget_bytes}; remove some LoRAs",
                metadata={"limit": "objects_bytes"},
            )
        with self._turns[hash(digest) % _TURNS]:
            self._objects.upload(_weights(digest), spool)
            with self._lock:
                self._stored[digest] = lora.file_bytes
            self._keep(digest, spool, lora.file_bytes)
        self.bring_back(digest)
        return digest, lora

    def read(self, digest: str) -> CanonicalLora:
        """Return the parsed header of complete weights. Raises BadLora, and the errors of `open_file`."""
        with self.open_any(digest) as file:
            return canonical.read(file)

    def bring_back(self, digest: str) -> None:
        """Take the weights with this digest out of quarantine, if they are there."""
        self.quarantine.release(_weights(digest))

    def describe(self, record: CatalogueRecord) -> None:
        """Write a LoRA's record beside its weights as a description.

        A failure is only logged, because the catalogue has the record and the next start writes the description.
        """
        name = description_name(record.digest, record.name)
        try:
            self._objects.write(name, description_of(record))
            self.quarantine.release(name)
        except StorageUnavailable as error:
            log_undescribed(record, error)

    def undescribe(self, digest: str, name: str) -> None:
        """Delete a description, if it exists."""
        self._objects.remove([description_name(digest, name)])

    def remove(self, digest: str) -> None:
        """Delete weights, if they exist.

        Weights that still have a description stay, because the catalogue lacks a row that it should have.
        """
        if any(file.name.endswith(DESCRIPTION) for file in self._objects.objects(digest)):
            return
        with self._turns[hash(digest) % _TURNS]:
            self._objects.remove([_weights(digest)])
            with self._lock:
                self._stored.pop(digest, None)
            self._drop(digest)

    def _find(self, digest: str) -> StoredObject | None:
        return next(iter(self._objects.objects(_weights(digest))), None)

    def _open_copy(self, digest: str) -> int | None:
        """Return a descriptor of an intact copy; None if there is none. A damaged copy is deleted."""
        try:
            descriptor = self._tier.open_file(_weights(digest))
        except FileNotFoundError:
            return None
        with self._lock:
            if digest in self._local:
                self._local.move_to_end(digest)
        if digest not in self._checked:
            try:
                check(descriptor, digest)
            except (DataLoss, OSError):
                os.close(descriptor)
                _log.warning("a copy of a LoRA is damaged; it is read from S3 again", extra={"digest": digest})
                self._drop(digest)
                return None
            self._checked.add(digest)
        return descriptor

    def _fetch(self, digest: str) -> int:
        """Copy an object to the folder, and return a descriptor of it."""
        found = self._find(digest)
        if found is None:
            raise FileNotFoundError(digest)
        room = self.room.reserve(found.size_bytes)
        try:
            spool = self._tier.spool()
            room.files.append(spool)
            try:
                hashed = hashlib.sha256()
                with os_errors.translated(), spool.open("wb") as file:
                    for part in self._objects.parts(found.name, found.size_bytes):
                        self.room.check_disk()
                        file.write(part)
                        hashed.update(part)
                if hashed.hexdigest() != digest:
                    raise DataLoss("the LoRA's object in S3 is damaged; upload the LoRA again")
                with os_errors.translated():
                    descriptor = os.open(spool, os.O_RDONLY | os.O_CLOEXEC)
                self._keep(digest, spool, found.size_bytes)
            finally:
                spool.unlink(missing_ok=True)
        finally:
            self.room.release(room)
        return descriptor

    def _keep(self, digest: str, spool: Path, size_bytes: int) -> None:
        """Move an intact file to its place in the folder."""
        self._tier.adopt(_weights(digest), spool)
        with self._lock:
            self._local[digest] = size_bytes
            self._local.move_to_end(digest)
        self._checked.add(digest)

    def _drop(self, digest: str) -> None:
        """Delete a copy."""
        with self._lock:
            self._local.pop(digest, None)
        self._checked.discard(digest)
        self._tier.remove([_weights(digest)])

    def _evict(self, wanted_bytes: int) -> None:
        """Delete the least recently used copies until at least `wanted_bytes` are free, or none is left."""
        while wanted_bytes > 0:
            with self._lock:
                digest, size_bytes = next(iter(self._local.items()), ("", 0))
            if not digest:
                return
            self._drop(digest)
            wanted_bytes -= size_bytes

    def _write_again(self, digest: str) -> bool:
        """Write a missing object from its copy. Return whether there is an intact one."""
        path = self.path(digest)
        if not path.exists() or not is_intact(path, digest):
            return False
        self._objects.upload(_weights(digest), path)
        with self._lock:
            self._stored[digest] = path.stat().st_size
        _log.warning("the object of a LoRA was missing, and is written again from a copy", extra={"digest": digest})
        return True

    def _read_object(self, name: str, size_bytes: int) -> bytes:
        return b"".join(self._objects.parts(name, size_bytes))

    def _move_to_objects(self, folder: Path, pattern: str) -> None:
        """Move the files of a folder to S3. Damaged ones stay."""
        with os_errors.translated():
            files = [path for path in folder.glob(pattern) if LORA_FILES.fullmatch(path.name)]
        if not files:
            return
        _log.info("files are moved to S3", extra={"folder": str(folder), "files": len(files)})
        for path in _weights_last(files):
            with os_errors.translated():
                if path.suffix == WEIGHTS and not is_intact(path, path.stem):
                    _log.error("a damaged file is not moved to S3", extra={"path": str(path)})
                    continue
                self._objects.upload(path.name, path)
                path.unlink()


LoraFiles = LoraFolder | LoraObjects


def _weights(digest: str) -> str:
    return f"{digest}{WEIGHTS}"


def _digest(file: StoredObject) -> str:
    return file.name.removesuffix(WEIGHTS)


def _weights_last(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.suffix == WEIGHTS)
