"""The store's files: canonical LoRAs by digest, and what is on its way to become one. Knows no catalogue.

Its calls may wait for the disk. Half a file never has a digest's name.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

from bottega.errors import TooLarge
from bottega.lora import canonical
from bottega.lora.canonical import Canonical
from bottega.storage import faults, folders

_SUFFIX = ".safetensors"
_DIGEST = re.compile("[0-9a-f]{64}")
_PIECE_BYTES = 4 << 20


class LoraFiles:
    """budget_bytes: of all together. Every method may raise StorageUnavailable."""

    def __init__(self, folder: Path, *, budget_bytes: int) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._budget_bytes = budget_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Of all LoRAs."""
        return self._used_bytes

    def open(self, wanted: Collection[str]) -> list[str]:
        """Takes over the folder and removes what no digest wants; returns those of `wanted` that are not there."""
        with faults.translated():
            folders.make(self._incoming)
            for left in self._incoming.iterdir():
                left.unlink()
            there = {path.stem: path for path in self._folder.glob(f"??/*{_SUFFIX}")}
            for digest in there.keys() - set(wanted):
                there.pop(digest).unlink()
            self._used_bytes = sum(path.stat().st_size for path in there.values())
        return sorted(set(wanted) - there.keys())

    def path(self, digest: str) -> Path:
        """Where the LoRA of a digest is, if it is there. A digest that is none of ours has no path elsewhere."""
        assert _DIGEST.fullmatch(digest), "digests are checked before"
        return self._folder / digest[:2] / f"{digest}{_SUFFIX}"

    def has(self, digest: str) -> bool:
        """Whether the LoRA of a digest is there."""
        with faults.translated():
            return self.path(digest).is_file()

    def spool(self) -> Path:
        """A new empty file, for what is on its way. Whoever asked removes it."""
        with faults.translated():
            descriptor, name = tempfile.mkstemp(dir=self._incoming)
            os.close(descriptor)
        return Path(name)

    def adopt(self, spool: Path) -> tuple[str, Canonical]:
        """Keeps a canonical file under its digest, in place of one that is there: that one may have been damaged.

        Raises BadLora for what is none, TooLarge beyond the budget.
        """
        with faults.translated(), spool.open("rb") as file:
            lora = canonical.read(file)
            file.seek(0)
            hashed = hashlib.sha256()
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
        digest = hashed.hexdigest()
        target = self.path(digest)
        with faults.translated():
            before_bytes = target.stat().st_size if target.exists() else 0
            if self._used_bytes - before_bytes + lora.file_bytes > self._budget_bytes:
                raise TooLarge(
                    f"the store's files would take more than its disk_bytes, {self._budget_bytes}; remove some",
                    metadata={"limit": "disk_bytes"},
                )
            folders.make(target.parent)
            spool.replace(target)
            folders.sync(target.parent)
        self._used_bytes += lora.file_bytes - before_bytes
        return digest, lora

    def remove(self, digest: str) -> None:
        """Removes a LoRA. Harmless where it is not."""
        path = self.path(digest)
        with faults.translated():
            try:
                size_bytes = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                return
            folders.sync(path.parent)
        self._used_bytes -= size_bytes
