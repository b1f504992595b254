"""The quarantine: files that the catalogue does not list, until an operator restores or deletes them.

    quarantine/<digest>.safetensors           weights
    quarantine/<digest>.<16 digits>.json      a description of weights, which are here or among the store's files

Calls may wait for the disk and raise OSError. Only one thread at a time may make them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import DataLoss, LoraNotFound
from bottega.loras.records import DESCRIPTION, CatalogueRecord, described_digest, read_description
from bottega.storage import folders

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
    """Unix time in seconds at which it was moved into quarantine."""


def is_id(text: str) -> bool:
    """Return whether a text has the form of an ID in quarantine."""
    return _DIGEST.fullmatch(text) is not None or described_digest(text) is not None


class QuarantineFolder:
    """The folder of files in quarantine, with an index of them in memory.

    Args:
        in_place: Returns the bytes of the weights that the store has outside of quarantine under a digest; None if it
            has none.
    """

    def __init__(self, folder: Path, *, in_place: Callable[[str], int | None]) -> None:
        self.folder = folder
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

    def has_weights(self, digest: str) -> bool:
        """Return whether weights with this digest are in quarantine."""
        return digest in self._weights

    def describes(self, digest: str) -> bool:
        """Return whether a description of weights with this digest is in quarantine."""
        return digest in self._descriptions

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
        if path.stem not in self._described:
            digest = self._described[path.stem] = path.stem.partition(".")[0]
            self._descriptions[digest] += 1

    def sync(self) -> None:
        """Wait until the files that were moved here are on the disk."""
        folders.sync(self.folder)

    def forget_weights(self, digest: str) -> None:
        """Update the index after the caller has moved weights out of quarantine."""
        self._weights.pop(digest, None)
        folders.sync(self.folder)

    def page(self, *, size: int, after: str) -> list[QuarantinedLora]:
        """Return up to `size` LoRAs sorted by ID, starting after the ID `after`."""
        return [self.find(id) for id in sorted(id for id in self._ids() if id > after)[:size]]

    def find(self, id: str) -> QuarantinedLora:
        """Return the LoRA with this ID. Raises LoraNotFound."""
        described = id in self._described
        if not described and (id not in self._weights or id in self._descriptions):
            raise LoraNotFound(f"nothing in quarantine has the ID {id}", metadata={"loras": id})
        path = self.folder / f"{id}{DESCRIPTION if described else WEIGHTS}"
        digest = self._described.get(id, id)
        quarantined_bytes = self._weights.get(digest)
        return QuarantinedLora(
            id=id,
            digest=digest,
            record=_description(path) if described else None,
            size_bytes=self._in_place(digest) if quarantined_bytes is None else quarantined_bytes,
            since_s=path.stat().st_ctime,
        )

    def forget(self, id: str) -> None:
        """Delete the description with this ID, if there is one."""
        digest = self._described.pop(id, None)
        if digest is not None:
            self._descriptions[digest] -= 1
            if not self._descriptions[digest]:
                del self._descriptions[digest]
            (self.folder / f"{id}{DESCRIPTION}").unlink(missing_ok=True)
            folders.sync(self.folder)

    def discard(self, id: str) -> int:
        """Delete a LoRA permanently, and return how many bytes that freed. Raises LoraNotFound.

        Its weights stay while another description in quarantine refers to them.
        """
        digest = self.find(id).digest
        self.forget(id)
        if self.describes(digest) or digest not in self._weights:
            return 0
        self.weights(digest).unlink(missing_ok=True)
        folders.sync(self.folder)
        return self._weights.pop(digest)

    def _ids(self) -> set[str]:
        """Return the IDs of descriptions, and of weights without a description."""
        return {*self._described, *(self._weights.keys() - self._descriptions.keys())}


def _description(path: Path) -> CatalogueRecord | None:
    """Return the record in a description, or None if it is damaged: its weights can still be restored."""
    try:
        return read_description(path)
    except DataLoss:
        return None


def is_intact(path: Path, digest: str) -> bool:
    """Return whether the SHA-256 of a file is `digest`. Reads the whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest
