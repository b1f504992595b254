"""The store's files: canonical LoRAs by digest with their descriptions, and files that are being written.

    files/incoming/                            files being written; those found at the start were interrupted
    files/ab/<digest>.safetensors              complete weights
    files/ab/<digest>.<16 digits>.json         a description: the catalogue's record of one name of these weights
    quarantine/                                weights and descriptions that the catalogue does not list

Calls may wait for the disk. A file gets a digest's name only when it is complete. Complete files are deleted only at
the request of a caller or an operator. Only one call at a time may change files; the callers make sure of that.

`DiskQuota` limits what is written: a budget, and space that stays free for other programs. Space is reserved before it
is written, by any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.errors import QueueFull, StorageUnavailable, TooLarge
from bottega.loras.quarantine import WEIGHTS, QuarantineFolder
from bottega.loras.records import DESCRIPTION, CatalogueRecord, description_of, description_stem
from bottega.storage import BlobFiles, folders, os_errors

# Seconds after which to retry: some running uploads have ended by then.
_RETRY_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """Reserved disk space for an upload or an import."""

    size_bytes: int
    files: list[Path] = field(default_factory=list)
    """Files that are being written. What they contain already is no longer counted as reserved."""

    @property
    def pending_bytes(self) -> int:
        """Bytes of the reservation that are not written yet."""
        written = 0
        for file in self.files:
            with contextlib.suppress(OSError):  # the file has been renamed or deleted
                written += file.stat().st_size
        return max(0, self.size_bytes - written)


class DiskQuota:
    """The disk space that the store may use.

    Args:
        budget_bytes: Upper bound on the bytes of the store's files, including reservations.
        min_free_bytes: Bytes of disk space that stay free for other programs. At most 5 % of the disk counts.
        kept_bytes: Returns the total size of the files that the store keeps.
        evict: Deletes files of at least so many bytes that the store has elsewhere, as far as there are any.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        min_free_bytes: int,
        kept_bytes: Callable[[], int],
        evict: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._min_free_bytes = min_free_bytes
        self._kept_bytes = kept_bytes
        self._evict = evict
        self._lock = threading.Lock()
        self._reserved: list[Reservation] = []

    @property
    def reserved_bytes(self) -> int:
        """Total size of all reservations."""
        return sum(reservation.size_bytes for reservation in tuple(self._reserved))

    def reserve(self, size_bytes: int) -> Reservation:
        """Reserve space. The caller must release it.

        Raises TooLarge if the budget can never hold it, QueueFull if running uploads have to end first, and
        StorageUnavailable if the disk is full.
        """
        with self._lock:
            self._make_room(size_bytes)
            self._check_budget(size_bytes)
            self._check_disk(size_bytes)
            reservation = Reservation(size_bytes=size_bytes)
            self._reserved.append(reservation)
            return reservation

    def grow(self, reservation: Reservation, max_bytes: int) -> None:
        """Enlarge a reservation to `max_bytes`, or as far as there is space. Raises StorageUnavailable."""
        with self._lock:
            self._make_room(max_bytes - reservation.size_bytes)
            free_bytes, pending_bytes, min_free_bytes = self._disk()
            left = min(self._left_in_budget, free_bytes - pending_bytes - min_free_bytes)
            reservation.size_bytes += max(0, min(left, max_bytes - reservation.size_bytes))

    def release(self, reservation: Reservation) -> None:
        """Release a reservation, whether or not its space was written to."""
        with self._lock:
            self._reserved.remove(reservation)

    def check_disk(self) -> None:
        """Raise StorageUnavailable if the disk has less free space than must stay free."""
        free_bytes, _, min_free_bytes = self._disk()
        if free_bytes < min_free_bytes:
            raise _disk_full(f"{free_bytes} bytes are free, and {min_free_bytes} must stay free (min_free_bytes)")

    @property
    def _left_in_budget(self) -> int:
        return self._budget_bytes - self._kept_bytes() - self.reserved_bytes

    def _make_room(self, wanted_bytes: int) -> None:
        if self._evict is not None:
            free_bytes, pending_bytes, min_free_bytes = self._disk()
            lack = wanted_bytes - min(self._left_in_budget, free_bytes - pending_bytes - min_free_bytes)
            if lack > 0:
                self._evict(lack)

    def _check_budget(self, wanted_bytes: int) -> None:
        left, reserved_bytes = self._left_in_budget, self.reserved_bytes
        if wanted_bytes <= left:
            return
        if wanted_bytes <= left + reserved_bytes:
            raise QueueFull(
                f"running uploads have reserved {reserved_bytes} of the {self._budget_bytes} bytes that the store may "
                "use on its disk (disk_bytes); try again when they have ended",
                retry_after_s=_RETRY_S,
            )
        raise TooLarge(
            f"the store may use {self._budget_bytes} bytes on its disk (disk_bytes): {self._kept_bytes()} are used, "
            f"including the quarantine, and this LoRA needs {wanted_bytes}; remove some LoRAs, or empty the quarantine "
            "(bottega loras quarantine)",
            metadata={"limit": "disk_bytes"},
        )

    def _check_disk(self, wanted_bytes: int) -> None:
        free_bytes, pending_bytes, min_free_bytes = self._disk()
        if wanted_bytes > free_bytes - pending_bytes - min_free_bytes:
            raise _disk_full(
                f"{free_bytes} bytes are free, of which {pending_bytes} are reserved for running uploads and "
                f"{min_free_bytes} must stay free (min_free_bytes); this LoRA needs {wanted_bytes}"
            )

    def _disk(self) -> tuple[int, int, int]:
        """Return the free bytes of the disk, how many of them are reserved, and how many must stay free."""
        free_bytes, kept_bytes = os_errors.measure(self._folder, min_free_bytes=self._min_free_bytes)
        return free_bytes, sum(reservation.pending_bytes for reservation in tuple(self._reserved)), kept_bytes


def _disk_full(why: str) -> StorageUnavailable:
    return os_errors.unavailable(f"the disk is full: {why}", cause="ENOSPC")


LORA_FILES = re.compile(rf"[0-9a-f]{{64}}(\{WEIGHTS}|\.[0-9a-f]{{16}}\{DESCRIPTION})")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderScan:
    """The result of comparing the files with the catalogue."""

    lost: tuple[str, ...]
    """Digests in the catalogue whose weights are missing."""
    moved: int
    """Number of files that were moved into quarantine."""
    moved_bytes: int


class LoraFolder:
    """The folder of the store's files. Every method may raise StorageUnavailable.

    Args:
        quarantine: Folder of files that the catalogue does not list, on the same disk.
        budget_bytes: Upper bound on the bytes of all files, including the quarantine and files being written.
        min_free_bytes: Bytes that stay free on the disk, see DiskQuota.
    """

    def __init__(self, folder: Path, *, quarantine: Path, budget_bytes: int, min_free_bytes: int) -> None:
        self._files = BlobFiles(folder, names=LORA_FILES, synced=True)
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self.quarantine = QuarantineFolder(quarantine, in_place=self._size_in_place)
        self.room = DiskQuota(
            folder, budget_bytes=budget_bytes, min_free_bytes=min_free_bytes, kept_bytes=lambda: self._kept_bytes
        )

    @property
    def used_bytes(self) -> int:
        """Total bytes of all LoRAs outside of the quarantine."""
        return self._used_bytes

    def open(self) -> None:
        """Create or open the folder, and delete files whose writing was interrupted."""
        self._files.clear()
        with os_errors.translated():
            self.quarantine.open()

    def reconcile(self, records: Collection[CatalogueRecord]) -> FolderScan:
        """Make the files agree with the catalogue.

        Files to which no record refers are moved into quarantine, weights to which a record refers are moved back from
        there, and missing descriptions are written.
        """
        wanted = {record.digest for record in records}
        stems = {description_stem(record.digest, record.name) for record in records}
        with os_errors.translated():
            weights, described = self._scan()
            unlisted = [weights.pop(digest) for digest in weights.keys() - wanted]
            unknown = [described.pop(stem) for stem in described.keys() - stems]
            moved_bytes = self._confine(unlisted, unknown)
            self._used_bytes = sum(path.stat().st_size for path in weights.values())
            for digest in wanted - weights.keys():
                if self.quarantine.has_weights(digest):
                    self._bring_back(digest)
                    weights[digest] = self.path(digest)
        for record in records:
            if description_stem(record.digest, record.name) not in described:
                self.describe(record)
        lost = tuple(sorted(wanted - weights.keys()))
        return FolderScan(lost=lost, moved=len(unlisted) + len(unknown), moved_bytes=moved_bytes)

    def path(self, digest: str) -> Path:
        """Return the path for the weights with a digest. They need not exist.

        Raises ValueError for an invalid digest.
        """
        return self._files.path(f"{digest}{WEIGHTS}")

    def has(self, digest: str) -> bool:
        """Return whether weights with this digest exist."""
        return self._size_in_place(digest) is not None

    def spool(self) -> Path:
        """Create an empty file to write to. The caller removes it, or renames it with `adopt`."""
        return self._files.spool()

    def adopt(self, spool: Path) -> tuple[str, CanonicalLora]:
        """Move a canonical file to the path of its digest. Return the digest and the parsed content.

        An existing file is replaced, because it may be damaged. Raises BadLora for a file that is not canonical, and
        TooLarge beyond the budget.
        """
        digest, lora = read_canonical(spool)
        before_bytes = self._size_in_place(digest) or 0
        if self._kept_bytes - before_bytes + lora.file_bytes > self._budget_bytes:
            raise TooLarge(
                f"the store's files would exceed disk_bytes, {self._budget_bytes}; remove some LoRAs",
                metadata={"limit": "disk_bytes"},
            )
        self._files.adopt(f"{digest}{WEIGHTS}", spool)
        self._used_bytes += lora.file_bytes - before_bytes
        return digest, lora

    def read(self, digest: str) -> CanonicalLora:
        """Return the parsed header of complete weights. Raises BadLora, OSError."""
        with self.path(digest).open("rb") as file:
            return canonical.read(file)

    def size_of(self, digest: str) -> int:
        """Return the size of complete weights. Raises OSError."""
        return self.path(digest).stat().st_size

    def open_file(self, digest: str) -> int:
        """Return a descriptor that reads complete weights. Raises OSError."""
        return os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)

    def open_any(self, digest: str) -> BufferedReader:
        """Open weights, which may be in quarantine. Raises OSError."""
        place = self.quarantine.weights if self.quarantine.has_weights(digest) else self.path
        return place(digest).open("rb")

    def bring_back(self, digest: str) -> None:
        """If the weights with this digest are in quarantine, move them back to their path."""
        with os_errors.translated():
            if self.quarantine.has_weights(digest):
                self._bring_back(digest)

    def describe(self, record: CatalogueRecord) -> None:
        """Write a LoRA's record beside its weights as a description.

        A failure is only logged, because the catalogue has the record and the next start writes the description.
        """
        try:
            self._files.write(description_name(record.digest, record.name), description_of(record))
        except StorageUnavailable as error:
            log_undescribed(record, error)

    def undescribe(self, digest: str, name: str) -> None:
        """Delete a description, if it exists."""
        self._files.remove([description_name(digest, name)], synced=True)

    def remove(self, digest: str) -> None:
        """Delete weights, if they exist.

        Weights that still have a description stay, because the catalogue lacks a row that it should have.
        """
        with os_errors.translated():
            described = any(self.path(digest).parent.glob(f"{digest}.*{DESCRIPTION}"))
        size_bytes = self._size_in_place(digest)
        if size_bytes is None or described or self.quarantine.describes(digest):
            return
        self._files.remove([f"{digest}{WEIGHTS}"], synced=True)
        self._used_bytes -= size_bytes

    @property
    def _kept_bytes(self) -> int:
        return self._used_bytes + self.quarantine.used_bytes

    def _scan(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Return the weights by digest, and the descriptions by file name without suffix."""
        paths = [Path(file.path) for file in self._files.scan()]
        weights = {path.stem: path for path in paths if path.suffix == WEIGHTS}
        return weights, {path.stem: path for path in paths if path.suffix == DESCRIPTION}

    def _confine(self, weights: Collection[Path], described: Collection[Path]) -> int:
        """Move files into quarantine, descriptions first, and return the total bytes of the weights."""
        moved_bytes = sum(path.stat().st_size for path in weights)
        for path in described:
            self.quarantine.move_in_description(path)
        for path in weights:
            self.quarantine.move_in_weights(path)
        if weights or described:
            self.quarantine.sync()
        for folder in {path.parent for path in (*weights, *described)}:
            folders.sync(folder)
        return moved_bytes

    def _bring_back(self, digest: str) -> None:
        before_bytes = self._size_in_place(digest) or 0
        self._files.adopt(f"{digest}{WEIGHTS}", self.quarantine.weights(digest))
        self.quarantine.forget_weights(digest)
        self._used_bytes += (self._size_in_place(digest) or 0) - before_bytes

    def _size_in_place(self, digest: str) -> int | None:
        return self._files.size(f"{digest}{WEIGHTS}")


def description_name(digest: str, name: str) -> str:
    """Return the name of a description's file."""
    return f"{description_stem(digest, name)}{DESCRIPTION}"


def log_undescribed(record: CatalogueRecord, error: StorageUnavailable) -> None:
    """Log that a description could not be written."""
    facts = {"lora": record.name, "text": error.message}
    _log.warning("the description of a LoRA could not be written; the next start tries again", extra=facts)


def read_canonical(path: Path) -> tuple[str, CanonicalLora]:
    """Return the digest of a file and its parsed header. Raises BadLora for a file that is not canonical."""
    with os_errors.translated(), path.open("rb") as file:
        lora = canonical.read(file)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest(), lora
