"""Files of the store that its catalogue does not know: moved here, listed, and brought back or deleted by an operator.

    quarantine/<digest>.safetensors           weights
    quarantine/<digest>.<16 digits>.json      a description of them; they may also be in their place among the files

Its calls may wait for the disk and raise OSError; one thread at a time may make them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import DataLoss, LoraNotFound
from bottega.loras import sidecar_files
from bottega.loras.records import CatalogueRecord
from bottega.storage import folders

WEIGHTS = ".safetensors"
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedLora:
    """Something that can be brought back. id: its digest, or the stem of its description. since_s: Unix time.

    record: what its description says; None without one that can be read. size_bytes: of its weights; None where they
    are gone.
    """

    id: str
    digest: str
    record: CatalogueRecord | None
    size_bytes: int | None
    since_s: float


def is_id(text: str) -> bool:
    """Whether something in quarantine may have that id."""
    return _DIGEST.fullmatch(text) is not None or sidecar_files.digest_of(text) is not None


class QuarantineFolder:
    """folder: of its files. in_place: the bytes of a digest's weights that are not in quarantine; None without any."""

    def __init__(self, folder: Path, *, in_place: Callable[[str], int | None]) -> None:
        self.folder = folder
        self._in_place = in_place
        # Weights by digest with their bytes; digests by the stem of a description, and how often each is described.
        self._weights: dict[str, int] = {}
        self._described: dict[str, str] = {}
        self._descriptions: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        """Of all weights here."""
        return sum(self._weights.values())

    def __len__(self) -> int:
        return len(self._ids())

    def open(self) -> None:
        """Learns what is there. What is not ours is left alone and not counted."""
        folders.make(self.folder)
        self._weights.clear()
        self._described.clear()
        for path in self.folder.iterdir():
            if path.suffix == WEIGHTS and _DIGEST.fullmatch(path.stem):
                self._weights[path.stem] = path.stat().st_size
            elif path.suffix == sidecar_files.SUFFIX and (digest := sidecar_files.digest_of(path.stem)):
                self._described[path.stem] = digest
        self._descriptions = Counter(self._described.values())

    def has_weights(self, digest: str) -> bool:
        """Whether weights of that digest are here."""
        return digest in self._weights

    def describes(self, digest: str) -> bool:
        """Whether a description of that digest is here."""
        return digest in self._descriptions

    def weights(self, digest: str) -> Path:
        """Where the weights of a digest are, if they are here."""
        return self.folder / f"{digest}{WEIGHTS}"

    def move_in_weights(self, path: Path) -> None:
        """Moves weights here. Their folder is to be synced by the caller, and this one with `sync`.

        Of two with one digest, one that is intact stays.
        """
        target = self.folder / path.name
        if target.exists() and is_intact(target, path.stem):
            path.unlink()
            return
        size_bytes = path.stat().st_size
        path.replace(target)
        self._weights[path.stem] = size_bytes

    def move_in_description(self, path: Path) -> None:
        """Moves a description here, as `move_in_weights` does, in the place of an older one."""
        path.replace(self.folder / path.name)
        if path.stem not in self._described:
            digest = self._described[path.stem] = path.stem.partition(".")[0]
            self._descriptions[digest] += 1

    def sync(self) -> None:
        """Returns when what was moved here is on the disk."""
        folders.sync(self.folder)

    def forget_weights(self, digest: str) -> None:
        """The weights of a digest have been moved away from here."""
        self._weights.pop(digest, None)
        folders.sync(self.folder)

    def page(self, *, size: int, after: str) -> list[QuarantinedLora]:
        """Up to `size` of what comes after that id, by id."""
        return [self.find(each) for each in sorted(each for each in self._ids() if each > after)[:size]]

    def find(self, id: str) -> QuarantinedLora:
        """Raises LoraNotFound."""
        described = id in self._described
        if not described and (id not in self._weights or id in self._descriptions):
            raise LoraNotFound(f"nothing in quarantine has the id {id}", metadata={"loras": id})
        path = self.folder / f"{id}{sidecar_files.SUFFIX if described else WEIGHTS}"
        digest = self._described.get(id, id)
        here = self._weights.get(digest)
        return QuarantinedLora(
            id=id,
            digest=digest,
            record=_description(path) if described else None,
            size_bytes=self._in_place(digest) if here is None else here,
            since_s=path.stat().st_ctime,
        )

    def forget(self, id: str) -> None:
        """Its LoRA is back or discarded: its description is deleted. Harmless for an id without one."""
        digest = self._described.pop(id, None)
        if digest is not None:
            self._descriptions[digest] -= 1
            if not self._descriptions[digest]:
                del self._descriptions[digest]
            (self.folder / f"{id}{sidecar_files.SUFFIX}").unlink(missing_ok=True)
            folders.sync(self.folder)

    def discard(self, id: str) -> int:
        """Deletes it for good, with its weights where nothing else here describes them. How many bytes became free.

        Raises LoraNotFound.
        """
        digest = self.find(id).digest
        self.forget(id)
        if self.describes(digest) or digest not in self._weights:
            return 0
        self.weights(digest).unlink(missing_ok=True)
        folders.sync(self.folder)
        return self._weights.pop(digest)

    def _ids(self) -> set[str]:
        """Of descriptions, and of weights without any."""
        return {*self._described, *(self._weights.keys() - self._descriptions.keys())}


def _description(path: Path) -> CatalogueRecord | None:
    """None for a damaged one: restoring it says what is not known."""
    try:
        return sidecar_files.read(path)
    except DataLoss:
        return None


def is_intact(path: Path, digest: str) -> bool:
    """Whether a file has its digest. Reads all of it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest
