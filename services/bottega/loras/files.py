"""The store's files: canonical LoRAs by digest, each with descriptions, and what is on its way to become one.

    files/incoming/                            being written; whatever is there at the start was interrupted
    files/ab/<digest>.safetensors              weights, whole
    files/ab/<digest>.<16 digits>.json         what the catalogue says of a name that has them
    quarantine/                                both of what the catalogue does not know

Its calls may wait for the disk. Half a file never has a digest's name, and nothing that was whole is deleted without a
word of somebody who may. Knows the catalogue's records, not the catalogue. Of its calls that change what is kept, one
at a time is under way.
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

from bottega.errors import StorageUnavailable, TooLarge
from bottega.lora import canonical
from bottega.lora.canonical import CanonicalLora
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
    """lost: digests without weights. moved: files that went into quarantine just now, and their bytes."""

    lost: tuple[str, ...]
    moved: int
    moved_bytes: int


class LoraFolder:
    """folder, quarantine: of one disk. budget_bytes: of all files together, those in quarantine and those on their way
    included. min_free_bytes: of the disk, see DiskQuota. Every method may raise StorageUnavailable."""

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
        """Of all LoRAs."""
        return self._used_bytes

    def open(self) -> None:
        """Takes over the folder, and removes what was interrupted on its way."""
        with os_errors.translated():
            folders.make(self._incoming)
            for left in self._incoming.iterdir():
                left.unlink()
            self.quarantine.open()

    def sort_out(self, records: Collection[CatalogueRecord]) -> FolderScan:
        """Moves what none of these wants into quarantine, and weights that one of them wants back out of it; writes
        the descriptions that are not there. records: all that the catalogue has."""
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
        """Where the LoRA of a digest is, if it is there. A digest that is none of ours has no path elsewhere."""
        assert _DIGEST.fullmatch(digest), "digests are checked before"
        return self._folder / digest[:2] / f"{digest}{WEIGHTS}"

    def has(self, digest: str) -> bool:
        """Whether the LoRA of a digest is there."""
        with os_errors.translated():
            return self.path(digest).is_file()

    def spool(self) -> Path:
        """A new empty file, for what is on its way. Whoever asked removes it."""
        with os_errors.translated():
            descriptor, name = tempfile.mkstemp(dir=self._incoming)
            os.close(descriptor)
        return Path(name)

    def adopt(self, spool: Path) -> tuple[str, CanonicalLora]:
        """Keeps a canonical file under its digest, in place of one that is there: that one may have been damaged.

        Raises BadLora for what is none, TooLarge beyond the budget.
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
        """Moves weights out of quarantine, into their place, where they are in it."""
        with os_errors.translated():
            if self.quarantine.has_weights(digest):
                self._bring_back(digest)

    def describe(self, record: CatalogueRecord) -> None:
        """Writes what the catalogue says of a LoRA beside its weights. A disk that does not take it is told of in the
        log: the catalogue has it, and the next start writes it."""
        folder = self.path(record.digest).parent
        try:
            with os_errors.translated():
                folders.make(folder)
                sidecar_files.write(folder, record, partial=self.spool())
        except StorageUnavailable as error:
            facts = {"lora": record.name, "text": error.message}
            _log.warning("the description of a LoRA could not be written beside its file", extra=facts)

    def undescribe(self, digest: str, name: str) -> None:
        """Removes what `describe` wrote. Harmless where it is not."""
        with os_errors.translated():
            path = self.path(digest).parent / f"{sidecar_files.stem_of(digest, name)}{sidecar_files.SUFFIX}"
            if path.exists():
                path.unlink()
                folders.sync(path.parent)

    def remove(self, digest: str) -> None:
        """Removes weights. Harmless where they are not.

        Those that a description speaks of stay: the catalogue does not know all that it should.
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
        """Weights by digest, and descriptions by stem."""
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
            _log.warning("left alone what is no LoRA's file", extra=facts)
        return weights, described

    def _confine(self, weights: Collection[Path], described: Collection[Path]) -> int:
        """Moves these into quarantine, descriptions first. The bytes of the weights."""
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
