"""Files in two tiers, small and made up, whose loads and disk a test can hold up."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import CacheLease, FilesByPath, KnownFile, Tier
from bottega.errors import LoraNotFound

SIZE = 1000
FILE = KnownFile(size_bytes=SIZE)
WAIT_S = 10.0


class Shelf:
    """Tiers over files of `SIZE` bytes each, with room for two in memory. most: in number. checks: every read."""

    def __init__(
        self,
        folder: Path,
        *,
        room: int = 2,
        most: int = 100,
        checks: bool = False,
        spared: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self.folder = folder
        self.opened: list[str] = []
        self.damaged: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        # While it is not set, whoever looks for a file waits, but for those who load.
        self.hangs = threading.Event()
        self.hangs.set()
        # Called by whoever loads, when it opens the file.
        self.before_load: Callable[[], object] = lambda: self.gate.wait(WAIT_S)
        self.tiers = TieredCache(
            FilesByPath(self._file),
            what="LoRA",
            missing=lambda digest: LoraNotFound("there is none", metadata={"loras": digest}),
            budget_bytes=room * SIZE,
            max_entries=most,
            max_loads=4,
            on_damaged=self.damaged.append if checks else None,
            spared=spared,
        )

    def put(self, number: int) -> str:
        """A file that no other number has; its digest."""
        data = bytes([number]) * SIZE
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / digest).write_bytes(data)
        return digest

    def lease(self, digest: str) -> CacheLease:
        """Of a file, once it can be read."""
        return self.tiers.borrow(digest).result(WAIT_S)

    @contextmanager
    def leased(self, *digests: str) -> Iterator[list[CacheLease]]:
        leases = [self.lease(digest) for digest in digests]
        yield leases
        for lease in leases:
            self.tiers.give_back(lease)

    def use(self, digest: str) -> Tier:
        """Borrows it and gives it back; where it was."""
        with self.leased(digest) as (lease,):
            assert os.pread(lease.descriptor, SIZE, 0) == (self.folder / digest).read_bytes()
        return lease.tier

    def _file(self, digest: str) -> Path:
        if threading.current_thread().name.startswith("LoRA loads"):
            self.before_load()
            self.opened.append(digest)
        else:
            self.hangs.wait(WAIT_S)
        return self.folder / digest
