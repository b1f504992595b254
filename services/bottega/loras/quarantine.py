"""The quarantine: files that the catalogue does not list, until an operator restores or deletes them.

A store with its files in a folder moves them to another folder:

    quarantine/<digest>.safetensors           weights
    quarantine/<digest>.<16 digits>.json      a description of weights, which are here or among the store's files

Those of a store with its files in S3 stay where they are, and are only noted.

Calls may wait for the disk or S3, and raise OSError or StorageUnavailable. Only one thread at a time may make them.
"""

from __future__ import annotations

import abc
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import DataLoss, LoraNotFound
from bottega.loras.records import (
    DESCRIPTION,
    MAX_DESCRIPTION_BYTES,
    CatalogueRecord,
    described_digest,
    read_description,
)
from bottega.storage import folders
from bottega.storage.objects import StoredObject

WEIGHTS = ".safetensors"
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedLora:
    """A LoRA in quarantine that can be restored."""

    id: str
    """Name of its description file without suffix, or its digest if it has no description."""
    digest: str
    record: CatalogueRecord | None
    """The record in its description; None if the description is missing or damaged."""
    size_bytes: int | None
    """Bytes of its weights; None if the weights are missing."""
    since_s: float
    """Unix time in seconds at which it was moved into quarantine; of an object in S3, at which it was written."""


def is_id(text: str) -> bool:
    """Return whether a text has the form of an ID in quarantine."""
    return _DIGEST.fullmatch(text) is not None or described_digest(text) is not None


class Quarantine(abc.ABC):
    """An index of the files in quarantine.

    Args:
        place: Where they are, for operators.
        in_place: Returns the bytes of the weights that the store has outside of quarantine under a digest; None if it
            has none.
    """

    def __init__(self, place: str, *, in_place: Callable[[str], int | None]) -> None:
        self.place = place
        self._in_place = in_place
        self._weights: dict[str, int] = {}  # sizes of weights, by digest
        self._described: dict[str, str] = {}  # digests, by the stem of a description
        self._descriptions: Counter[str] = Counter()  # numbers of descriptions, by digest

    @property
    def used_bytes(self) -> int:
        """Total bytes of all weights in quarantine."""
        return sum(self._weights.values())

    def __len__(self) -> int:
        return len(self._ids())

    def has_weights(self, digest: str) -> bool:
        """Return whether weights with this digest are in quarantine."""
        return digest in self._weights

    def describes(self, digest: str) -> bool:
        """Return whether a description of weights with this digest is in quarantine."""
        return digest in self._descriptions

    def page(self, *, size: int, after: str) -> list[QuarantinedLora]:
        """Return up to `size` LoRAs sorted by ID, starting after the ID `after`."""
        return [self.find(id) for id in sorted(id for id in self._ids() if id > after)[:size]]

    def find(self, id: str) -> QuarantinedLora:
        """Return the LoRA with this ID. Raises LoraNotFound."""
        described = id in self._described
        if not described and (id not in self._weights or id in self._descriptions):
            raise LoraNotFound(f"nothing in quarantine has the ID {id}", metadata={"loras": id})
        digest = self._described.get(id, id)
        quarantined_bytes = self._weights.get(digest)
        return QuarantinedLora(
            id=id,
            digest=digest,
            record=self._record(id) if described else None,
            size_bytes=self._in_place(digest) if quarantined_bytes is None else quarantined_bytes,
            since_s=self._since_s(f"{id}{DESCRIPTION if described else WEIGHTS}"),
        )

    def forget(self, id: str) -> None:
        """Delete the description with this ID, if there is one."""
        if self._undescribe(id):
            self._delete(f"{id}{DESCRIPTION}")

    def discard(self, id: str) -> int:
        """Delete a LoRA permanently, and return how many bytes that freed. Raises LoraNotFound.

        Its weights stay while another description in quarantine refers to them.
        """
        digest = self.find(id).digest
        self.forget(id)
        if self.describes(digest) or digest not in self._weights:
            return 0
        self._delete(f"{digest}{WEIGHTS}")
        return self._weights.pop(digest)

    @abc.abstractmethod
    def _record(self, stem: str) -> CatalogueRecord | None:
        """Return the record in a description, or None if it is damaged: its weights can still be restored."""

    @abc.abstractmethod
    def _since_s(self, name: str) -> float:
        """Return `since_s` of a file."""

    @abc.abstractmethod
    def _delete(self, name: str) -> None:
        """Delete a file, if it exists."""

    def _describe(self, stem: str) -> None:
        if stem not in self._described:
            digest = self._described[stem] = stem.partition(".")[0]
            self._descriptions[digest] += 1

    def _undescribe(self, stem: str) -> bool:
        """Remove a description from the index. Return whether it was there."""
        digest = self._described.pop(stem, None)
        if digest is None:
            return False
        self._descriptions[digest] -= 1
        if not self._descriptions[digest]:
            del self._descriptions[digest]
        return True

    def _ids(self) -> set[str]:
        """Return the IDs of descriptions, and of weights without a description."""
        return {*self._described, *(self._weights.keys() - self._descriptions.keys())}


class QuarantineFolder(Quarantine):
    """The folder of files in quarantine.

    Args:
        in_place: See Quarantine.
    """

    def __init__(self, folder: Path, *, in_place: Callable[[str], int | None]) -> None:
        super().__init__(str(folder), in_place=in_place)
        self.folder = folder

    def open(self) -> None:
        """Create or scan the folder. Files with other names are ignored and not counted."""
        folders.make(self.folder)
        self._weights.clear()
        self._described.clear()
        for path in self.folder.iterdir():
            if path.suffix == WEIGHTS and _DIGEST.fullmatch(path.stem):
                self._weights[path.stem] = path.stat().st_size
            elif path.suffix == DESCRIPTION and (digest := described_digest(path.stem)):
                self._described[path.stem] = digest
        self._descriptions = Counter(self._described.values())

    def weights(self, digest: str) -> Path:
        """Return the path in quarantine for weights with this digest."""
        return self.folder / f"{digest}{WEIGHTS}"

    def move_in_weights(self, path: Path) -> None:
        """Move weights here, unless undamaged weights with the same digest are here already.

        The caller syncs the folder from which they came, and this one with `sync`.
        """
        target = self.folder / path.name
        if target.exists() and is_intact(target, path.stem):
            path.unlink()
            return
        size_bytes = path.stat().st_size
        path.replace(target)
        self._weights[path.stem] = size_bytes

    def move_in_description(self, path: Path) -> None:
        """Move a description here, replacing an older one. The caller syncs as for `move_in_weights`."""
        path.replace(self.folder / path.name)
        self._describe(path.stem)

    def sync(self) -> None:
        """Wait until the files that were moved here are on the disk."""
        folders.sync(self.folder)

    def forget_weights(self, digest: str) -> None:
        """Update the index after the caller has moved weights out of quarantine."""
        self._weights.pop(digest, None)
        folders.sync(self.folder)

    def _record(self, stem: str) -> CatalogueRecord | None:
        try:
            with (self.folder / f"{stem}{DESCRIPTION}").open("rb") as file:
                return read_description(file.read(MAX_DESCRIPTION_BYTES + 1), stem)
        except DataLoss:
            return None

    def _since_s(self, name: str) -> float:
        return (self.folder / name).stat().st_ctime

    def _delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        folders.sync(self.folder)


class QuarantinedObjects(Quarantine):
    """The objects in S3 that the catalogue does not list. They are not moved.

    Args:
        read: Returns an object of this name and size.
        remove: Deletes an object.
        in_place: See Quarantine.
    """

    def __init__(
        self,
        place: str,
        *,
        read: Callable[[str, int], bytes],
        remove: Callable[[str], None],
        in_place: Callable[[str], int | None],
    ) -> None:
        super().__init__(place, in_place=in_place)
        self._read = read
        self._remove = remove
        self._files: dict[str, StoredObject] = {}
        self._scanned_s = 0.0

    def set(self, found: Collection[StoredObject]) -> list[StoredObject]:
        """Replace the index by these objects. Return those that are new in it."""
        new = [file for file in found if file.name not in self._files]
        self._files = {file.name: file for file in found}
        self._scanned_s = time.time()
        self._weights = {name.stem: file.size_bytes for file in found if (name := Path(file.name)).suffix == WEIGHTS}
        stems = [name.stem for file in found if (name := Path(file.name)).suffix == DESCRIPTION]
        self._described = {stem: stem.partition(".")[0] for stem in stems}
        self._descriptions = Counter(self._described.values())
        return new

    def release(self, name: str) -> None:
        """Remove a file from the index, because the catalogue lists it now."""
        self._files.pop(name, None)
        path = Path(name)
        if path.suffix == WEIGHTS:
            self._weights.pop(path.stem, None)
        else:
            self._undescribe(path.stem)

    def _record(self, stem: str) -> CatalogueRecord | None:
        file = self._files.get(f"{stem}{DESCRIPTION}")
        if file is None:  # it was restored meanwhile
            return None
        try:
            size_bytes = min(file.size_bytes, MAX_DESCRIPTION_BYTES + 1)
            return read_description(self._read(file.name, size_bytes), stem)
        except DataLoss:
            return None

    def _since_s(self, name: str) -> float:
        file = self._files.get(name)
        return self._scanned_s - (file.age_s if file is not None else 0.0)

    def _delete(self, name: str) -> None:
        self._remove(name)
        self._files.pop(name, None)


def is_intact(path: Path, digest: str) -> bool:
    """Return whether the SHA-256 of a file is `digest`. Reads the whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest
