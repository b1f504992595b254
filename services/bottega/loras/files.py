"""The store's files: canonical LoRAs by digest, each with its descriptions, and files that are being written.

    files/incoming/                            files being written; those found at the start were interrupted
    files/ab/<digest>.safetensors              complete weights
    files/ab/<digest>.<16 digits>.json         the catalogue's record of one name of these weights
    quarantine/                                weights and descriptions that the catalogue does not list

Calls may wait for the disk. A file gets a digest's name only when it is complete. Complete files are deleted only when
a caller or an operator says so. Callers make sure that one call at a time changes files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.errors import StorageUnavailable, TooLarge
from bottega.loras import sidecar_files
from bottega.loras.disk_quota import DiskQuota
from bottega.loras.quarantine import WEIGHTS, QuarantineFolder
from bottega.loras.records import CatalogueRecord
from bottega.storage import folders, os_errors

_DIGEST = re.compile("[0-9a-f]{64}")
_FOREIGN_NAMES_IN_LOG = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderScan:
    """The result of comparing the files with the catalogue."""

    lost: tuple[str, ...]
    """Digests in the catalogue that have no weights."""
    moved: int
    """Number of files that were moved into quarantine."""
    moved_bytes: int


class LoraFolder:
    """The folder of the store's files. Every method may raise StorageUnavailable.

    Args:
        folder: The files.
        quarantine: The files that the catalogue does not list, on the same disk.
        budget_bytes: Upper bound on all files, including the quarantine and files being written.
        min_free_bytes: Space that stays free on the disk, see DiskQuota.
    """

    def __init__(self, folder: Path, *, quarantine: Path, budget_bytes: int, min_free_bytes: int) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self.quarantine = QuarantineFolder(quarantine, in_place=self._size_in_place)
        self.room = DiskQuota(
            folder, budget_bytes=budget_bytes, min_free_bytes=min_free_bytes, kept_bytes=lambda: self._kept_bytes
        )

    @property
    def used_bytes(self) -> int:
        """Size of all LoRAs outside of quarantine."""
        return self._used_bytes

    def open(self) -> None:
        """Create or open the folder, and delete files whose writing was interrupted."""
        with os_errors.translated():
            folders.make(self._incoming)
            for left in self._incoming.iterdir():
                left.unlink()
            self.quarantine.open()

    def reconcile(self, records: Collection[CatalogueRecord]) -> FolderScan:
        """Make the files agree with the catalogue.

        Files that no record refers to go into quarantine, weights that a record refers to come back from there, and
        missing descriptions are written.

        Args:
            records: All records of the catalogue.
        """
        wanted = {record.digest for record in records}
        stems = {sidecar_files.stem_of(record.digest, record.name) for record in records}
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
            if sidecar_files.stem_of(record.digest, record.name) not in described:
                self.describe(record)
        lost = tuple(sorted(wanted - weights.keys()))
        return FolderScan(lost=lost, moved=len(unlisted) + len(unknown), moved_bytes=moved_bytes)

    def path(self, digest: str) -> Path:
        """Return the path of a digest's weights, whether or not they exist.

        The digest must be 64 hex digits, so that the path is always below the folder.
        """
        assert _DIGEST.fullmatch(digest), "digests are checked before"
        return self._folder / digest[:2] / f"{digest}{WEIGHTS}"

    def has(self, digest: str) -> bool:
        """Return whether the weights of a digest exist."""
        with os_errors.translated():
            return self.path(digest).is_file()

    def spool(self) -> Path:
        """Create an empty file to write to. The caller removes it, or renames it with `adopt`."""
        with os_errors.translated():
            descriptor, name = tempfile.mkstemp(dir=self._incoming)
            os.close(descriptor)
        return Path(name)

    def adopt(self, spool: Path) -> tuple[str, CanonicalLora]:
        """Move a canonical file to its digest's path, and return the digest and the file's content.

        An existing file is replaced, because it may be damaged. Raises BadLora for a file that is not canonical, and
        TooLarge beyond the budget.
        """
        with os_errors.translated(), spool.open("rb") as file:
            lora = canonical.read(file)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with os_errors.translated():
            before_bytes = self._size_in_place(digest) or 0
            if self._kept_bytes - before_bytes + lora.file_bytes > self._budget_bytes:
                raise TooLarge(
                    f"the store's files would take more than its disk_bytes, {self._budget_bytes}; remove some",
                    metadata={"limit": "disk_bytes"},
                )
            self._put_in_place(spool, digest)
        self._used_bytes += lora.file_bytes - before_bytes
        return digest, lora

    def bring_back(self, digest: str) -> None:
        """Move weights from quarantine to their path, if they are in quarantine."""
        with os_errors.translated():
            if self.quarantine.has_weights(digest):
                self._bring_back(digest)

    def describe(self, record: CatalogueRecord) -> None:
        """Write a LoRA's record beside its weights.

        A failure is only logged: the catalogue has the record, and the next start writes the description.
        """
        folder = self.path(record.digest).parent
        try:
            with os_errors.translated():
                folders.make(folder)
                sidecar_files.write(folder, record, partial=self.spool())
        except StorageUnavailable as error:
            facts = {"lora": record.name, "text": error.message}
            _log.warning("the description of a LoRA could not be written beside its file", extra=facts)

    def undescribe(self, digest: str, name: str) -> None:
        """Delete a description, if it exists."""
        with os_errors.translated():
            path = self.path(digest).parent / f"{sidecar_files.stem_of(digest, name)}{sidecar_files.SUFFIX}"
            if path.exists():
                path.unlink()
                folders.sync(path.parent)

    def remove(self, digest: str) -> None:
        """Delete weights, if they exist.

        Weights that still have a description stay: the catalogue lacks a row that it should have.
        """
        path = self.path(digest)
        with os_errors.translated():
            if self.quarantine.describes(digest) or any(path.parent.glob(f"{digest}.*{sidecar_files.SUFFIX}")):
                return
            try:
                size_bytes = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                return
            folders.sync(path.parent)
        self._used_bytes -= size_bytes

    @property
    def _kept_bytes(self) -> int:
        return self._used_bytes + self.quarantine.used_bytes

    def _scan(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Return the weights by digest and the descriptions by stem."""
        weights: dict[str, Path] = {}
        described: dict[str, Path] = {}
        foreign: list[str] = []
        for path in self._folder.glob("??/*"):
            if path.suffix == WEIGHTS and _DIGEST.fullmatch(path.stem):
                weights[path.stem] = path
            elif path.suffix == sidecar_files.SUFFIX and sidecar_files.digest_of(path.stem):
                described[path.stem] = path
            else:
                foreign.append(path.name)
        if foreign:
            facts = {"folder": str(self._folder), "names": foreign[:_FOREIGN_NAMES_IN_LOG]}
            _log.warning("files in the store's folder that are not LoRAs are ignored", extra=facts)
        return weights, described

    def _confine(self, weights: Collection[Path], described: Collection[Path]) -> int:
        """Move files into quarantine, descriptions first, and return the size of the weights."""
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
        self._put_in_place(self.quarantine.weights(digest), digest)
        self.quarantine.forget_weights(digest)
        self._used_bytes += (self._size_in_place(digest) or 0) - before_bytes

    def _put_in_place(self, path: Path, digest: str) -> None:
        target = self.path(digest)
        folders.make(target.parent)
        path.replace(target)
        folders.sync(target.parent)

    def _size_in_place(self, digest: str) -> int | None:
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None
