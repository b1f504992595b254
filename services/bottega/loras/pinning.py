"""Which LoRAs stay in memory whatever else is needed: those that the catalogue says are pinned."""

from __future__ import annotations

import asyncio
import logging

from bottega.caching import TieredCache
from bottega.errors import DataLoss, TooLarge
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.files import LoraFolder
from bottega.loras.records import CatalogueRecord

_log = logging.getLogger(__name__)


class PinnedLoras:
    """budget_bytes, most: of LoRAs in memory."""

    def __init__(
        self, *, catalogue: LoraCatalogue, files: LoraFolder, cache: TieredCache, budget_bytes: int, most: int
    ) -> None:
        self._catalogue = catalogue
        self._files = files
        self._cache = cache
        self._budget_bytes = budget_bytes
        self._most = most

    async def apply(self) -> None:
        """Has memory keep what the catalogue says is pinned."""
        pinned = await self._catalogue.pinned()
        self._cache.pin(pinned)
        # There was more room when they were pinned.
        if sum(pinned.values()) > self._budget_bytes or len(pinned) > self._most:
            facts = {"pinned_bytes": sum(pinned.values()), "budget_bytes": self._budget_bytes}
            facts |= {"pinned": len(pinned), "most": self._most}
            what = "unpin some, or raise budget_bytes or the limit of open files"
            _log.warning(f"pinned LoRAs do not fit into memory: {what}", extra=facts)

    async def check(self, record: CatalogueRecord) -> None:
        """Raises TooLarge where it would not fit beside others that are pinned, DataLoss without its file."""
        if not await asyncio.to_thread(self._files.has, record.digest):
            raise DataLoss(f"the file of {record.name} is gone; bring it again", metadata={"loras": record.name})
        others = await self._catalogue.pinned()
        others.pop(record.digest, None)
        beside_bytes = sum(others.values())
        if beside_bytes + record.size_bytes > self._budget_bytes:
            raise TooLarge(
                f"{record.name} has {record.size_bytes} bytes, and {beside_bytes} of others are pinned; memory holds "
                f"budget_bytes, {self._budget_bytes}: unpin others, or raise it",
                metadata={"limit": "budget_bytes"},
            )
        if len(others) >= self._most:
            raise TooLarge(
                f"{len(others)} others are pinned, as many as memory holds at the store's limit of open files: unpin "
                "others, or raise it",
                metadata={"limit": "open_files"},
            )
