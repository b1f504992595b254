"""Keeps pinned LoRAs in memory."""

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
    """The LoRAs that are pinned in the catalogue and therefore never evicted from memory.

    Args:
        catalogue: Says which LoRAs are pinned.
        files: Their files.
        cache: Keeps them in memory.
        budget_bytes: Maximum size of all LoRAs in memory.
        max_loras: Maximum number of LoRAs in memory.
    """

    def __init__(
        self, *, catalogue: LoraCatalogue, files: LoraFolder, cache: TieredCache, budget_bytes: int, max_loras: int
    ) -> None:
        self._catalogue = catalogue
        self._files = files
        self._cache = cache
        self._budget_bytes = budget_bytes
        self._max_loras = max_loras

    async def apply(self) -> None:
        """Pin in memory the LoRAs that are pinned in the catalogue."""
        pinned = await self._catalogue.pinned()
        self._cache.pin(pinned)
        # The limits may have been lowered since the LoRAs were pinned.
        if sum(pinned.values()) > self._budget_bytes or len(pinned) > self._max_loras:
            facts = {"pinned_bytes": sum(pinned.values()), "budget_bytes": self._budget_bytes}
            facts |= {"pinned": len(pinned), "max_loras": self._max_loras}
            what = "unpin some, or raise budget_bytes or the limit of open files"
            _log.warning(f"pinned LoRAs do not fit into memory: {what}", extra=facts)

    async def check(self, record: CatalogueRecord) -> None:
        """Raise TooLarge if a LoRA does not fit beside the pinned ones, and DataLoss if its file is gone."""
        if not await asyncio.to_thread(self._files.has, record.digest):
            raise DataLoss(f"the file of {record.name} is gone; upload it again", metadata={"loras": record.name})
        others = await self._catalogue.pinned()
        others.pop(record.digest, None)
        beside_bytes = sum(others.values())
        if beside_bytes + record.size_bytes > self._budget_bytes:
            raise TooLarge(
                f"{record.name} has {record.size_bytes} bytes, other pinned LoRAs {beside_bytes}, and LoRAs in memory "
                f"may have {self._budget_bytes} (budget_bytes): unpin others, or raise budget_bytes",
                metadata={"limit": "budget_bytes"},
            )
        if len(others) >= self._max_loras:
            raise TooLarge(
                f"{len(others)} other LoRAs are pinned, the maximum at the store's limit of open files: unpin others, "
                "or raise the limit",
                metadata={"limit": "open_files"},
            )
