"""The LoRA store: its catalogue, files, cache and connections, and its membership in the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from bottega import kinds, rules
from bottega.background_tasks import BackgroundTasks
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import Tier
from bottega.errors import BottegaError, DataLoss, LoraInUse, LoraNotFound, TooLarge, Unavailable
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.config import LoraConfig, check_configured
from bottega.loras.files import LORA_FILES, LoraFolder
from bottega.loras.importer import LoraImporter
from bottega.loras.importing.import_processes import ImportProcesses
from bottega.loras.object_files import LoraFiles, LoraObjects
from bottega.loras.records import MAX_LISTED_IGNORED, CatalogueRecord
from bottega.loras.recovery import LoraRecovery, RestoredLora
from bottega.loras.worker_link import LoraLinks
from bottega.process import open_files
from bottega.rpc.fleet_membership import Listening
from bottega.rpc.operation.metrics import counter_by, counters, gauge_by, gauges
from bottega.rpc.store_server import StoreServer
from bottega.storage import folders, os_errors
from bottega.storage.folders import HeldElsewhere, ProcessLock
from bottega.storage.objects import s3_location
from bottega.v1 import fleet_pb2

if TYPE_CHECKING:  # psycopg is optional
    from bottega.loras.shared_catalogue import SharedCatalogue

_log = logging.getLogger(__name__)

_PREFIX = "bottega_lora"

# Share of the process's open files that LoRAs in memory may use. The rest is for up to 256 workers' connections of two
# sockets each, callers, uploads, the catalogue, import processes, and LoRAs that do not fit into memory. Without a free
# descriptor the store could not even refuse a call.
_SHARE_OF_OPEN_FILES = 0.5
# The jobs of a full queue need at most some thousand different LoRAs.
_MAX_NEEDED = 65_536
# Seconds between two looks at the pins that callers of other stores set.
_FOLLOW_S = 15.0


class LoraStore(StoreServer):
    """A store of LoRAs for base models, from which workers fetch them.

    Call `start` first, and `drain` and `stop` at the end. Raises ConfigError if a base model cannot be found, or a
    configured LoRA is invalid.
    """

    def __init__(self, config: LoraConfig, *, folder: Path, listening: Listening) -> None:
        self.bases = check_configured(config)
        self._config = config
        self._folder = folder
        self._lock = ProcessLock(folder)
        self.catalogue = _catalogue(config, folder)
        self._files = _files(config, folder)
        self._max_in_memory = max(1, int(_SHARE_OF_OPEN_FILES * open_files.limit()))
        self._cache = TieredCache(
            self._files,
            what="LoRA",
            missing=missing_lora,
            budget_bytes=config.budget_bytes,
            max_entries=self._max_in_memory,
            max_loads=config.loads_at_once,
        )
        super().__init__(
            config,
            kind=kinds.LORAS,
            what="the LoRA store",
            listening=listening,
            links=LoraLinks(config.links, cache=self._cache),
        )
        limits = config.imports
        self._import_processes = ImportProcesses(
            at_once=limits.at_once, deadline_s=limits.deadline_s, cpu_s=limits.cpu_s
        )
        self.importer = LoraImporter(
            bases=self.bases,
            config=limits,
            files=self._files,
            catalogue=self.catalogue,
            processes=self._import_processes,
        )
        self.recovery = LoraRecovery(bases=self.bases, catalogue=self.catalogue, files=self._files)
        self._tasks = BackgroundTasks("the LoRA store")
        self._left_out = dict(config.left_out)
        self._needed_until: dict[str, float] = {}

    async def _open(self) -> None:
        await asyncio.to_thread(self._hold_folder)
        await self.catalogue.open()
        await asyncio.to_thread(self._files.open)
        lost = (await self.recovery.reconcile()).lost
        self._left_out |= await self.importer.import_configured(
            self._config.loras, at_once=self._config.imports.at_once, lost=lost
        )
        await self._apply_pins()
        if self._config.database:
            self._tasks.start(self._follow_pins())

    def state(self, record: CatalogueRecord) -> bool | None:
        """Return True if a LoRA is in memory, False while it is being loaded, and None if it is only on disk."""
        return self._cache.state(record.digest)

    async def ignored(self, record: CatalogueRecord) -> Sequence[str]:
        """Return all layers of a LoRA's file that were ignored; those of its record if its weights are gone."""
        if len(record.ignored) < MAX_LISTED_IGNORED:
            return record.ignored
        try:
            return (await asyncio.to_thread(self._files.read, record.digest)).ignored
        except (BottegaError, OSError):
            return record.ignored

    async def remove(self, name: str) -> None:
        """Delete a LoRA. Raises LoraNotFound, and LoraInUse while it is being sent or a job needs it."""
        async with self.catalogue.write_lock:
            record = await self.catalogue.get(name)
            left_s = max(0.0, self._needed_until.get(record.digest, 0.0) - time.monotonic())
            if self._cache.leases(record.digest) or left_s:
                wait_s = max(1.0, left_s)
                raise LoraInUse(
                    f"{name} is in use: it is being sent to workers, or a job needs it or needed it recently; "
                    f"try again in {wait_s:.0f} s",
                    metadata={"loras": name},
                    retry_after_s=wait_s,
                )
            only_name = await self.catalogue.names(record.digest) == [name]
            # The description goes first: a deleted name must not come back from it.
            await asyncio.to_thread(self._files.undescribe, record.digest, name)
            if only_name:
                self._cache.forget(record.digest)
                # The weights go before the row: on a full disk, the catalogue needs the space that they free.
                await asyncio.to_thread(self._files.remove, record.digest)
            await self.catalogue.remove(name)
            if not only_name and record.pinned:
                await self._apply_pins()  # another LoRA with the same digest may not be pinned
        _log.info("a LoRA was removed", extra={"lora": name, "digest": record.digest})

    async def prefetch(self, digests: Sequence[str], *, only_keep: bool = False) -> list[str]:
        """Load known LoRAs into memory as far as they fit, and protect them from deletion for `lease_s`.

        Returns the digests that are in memory or being loaded.

        Args:
            digests: SHA-256 of their canonical forms, in hex.
            only_keep: Whether to protect them without loading them.
        """
        known = await self.catalogue.known(digests)
        if isinstance(self._files, LoraObjects):
            self._files.learn(known)
        wanted = [digest for digest in dict.fromkeys(digests) if digest in known]
        now = time.monotonic()
        if len(self._needed_until) > _MAX_NEEDED:
            self._needed_until = {digest: until for digest, until in self._needed_until.items() if until > now}
        self._needed_until.update(dict.fromkeys(wanted, now + self._config.lease_s))
        if only_keep:
            return [digest for digest in wanted if self._cache.state(digest) is not None]
        return [digest for digest in wanted if self._cache.prefetch(digest)]

    async def pin(self, name: str, pinned: bool) -> CatalogueRecord:
        """Pin a LoRA in memory so that it is not evicted, or unpin it.

        Raises LoraNotFound, TooLarge if it does not fit beside the pinned ones, and DataLoss if its file is missing.
        """
        async with self.catalogue.write_lock:  # so that the second of two concurrent calls counts the first
            if pinned:
                await self._check_pin(await self.catalogue.get(name))
            record = await self.catalogue.change(name, lambda present: replace(present, pinned=pinned))
            await asyncio.to_thread(self._files.describe, record)
            await self._apply_pins()  # before the response, which then reports that the LoRA is being loaded
        return record

    async def set_bounds(self, name: str, digest: str, bounds: tuple[tuple[int, int], ...]) -> CatalogueRecord:
        """Store the step bounds that were measured for a LoRA. Raises LoraNotFound, also if its digest has changed."""

        def with_bounds(present: CatalogueRecord) -> CatalogueRecord:
            if present.digest != digest:
                raise LoraNotFound(
                    f"{name} has other weights now than those that were measured", metadata={"loras": name}
                )
            return replace(present, bounds=tuple(sorted(bounds)))

        async with self.catalogue.write_lock:
            record = await self.catalogue.change(name, with_bounds)
            await asyncio.to_thread(self._files.describe, record)
        return record

    async def restore(self, id: str, *, name: str, base: str) -> RestoredLora:
        """Restore a LoRA from quarantine, see LoraRecovery.restore, and load it if it is pinned."""
        restored = await self.recovery.restore(id, name=name, base=base)
        if restored.record.pinned:
            await self._apply_pins()
        return restored

    def load(self) -> fleet_pb2.Load:
        """Return the load to report to the gateway."""
        # LoRAs lie in anonymous files in memory, which this process's resident memory does not include. A worker that
        # shares some of them counts them, too.
        memory_bytes = self._memory.resident_bytes + self._cache.used_bytes
        by_tier = self._cache.counts.by_tier
        activity = fleet_pb2.Activity(lookups=sum(by_tier[tier] for tier in Tier), hits=by_tier[Tier.MEMORY])
        return fleet_pb2.Load(
            draining=self._draining,
            memory_bytes=memory_bytes,
            activity=activity,
            left_out=rules.report_left_out(kinds.LORAS, self._left_out),
        )

    async def drain(self) -> None:
        """Refuse new connections, and wait until nothing is being sent."""
        await super().drain()
        await asyncio.to_thread(self._cache.wait_idle, self._config.server.drain_grace_s)

    async def _close(self) -> None:
        await self._tasks.cancel()
        await self._import_processes.stop()
        await asyncio.to_thread(self._cache.close)
        await self.catalogue.close()
        self._lock.release()

    async def _follow_pins(self) -> None:
        """Apply the pins that callers of other stores set."""
        while True:
            await asyncio.sleep(_FOLLOW_S)
            with contextlib.suppress(BottegaError):  # the next time
                await self._apply_pins()

    async def _apply_pins(self) -> None:
        """Pin in memory the LoRAs that are pinned in the catalogue, so that they are not evicted."""
        pinned = await self.catalogue.pinned()
        if isinstance(self._files, LoraObjects):
            self._files.learn(pinned)
        self._cache.pin(pinned)
        budget_bytes, max_loras = self._config.budget_bytes, self._max_in_memory
        # The limits may have been lowered since the LoRAs were pinned.
        if sum(pinned.values()) > budget_bytes or len(pinned) > max_loras:
            facts = {"pinned_bytes": sum(pinned.values()), "budget_bytes": budget_bytes}
            facts |= {"pinned": len(pinned), "max_loras": max_loras}
            what = "unpin some, or raise budget_bytes or the limit on open files"
            _log.warning(f"pinned LoRAs do not fit into memory: {what}", extra=facts)

    async def _check_pin(self, record: CatalogueRecord) -> None:
        """Raise TooLarge if a LoRA does not fit beside the pinned ones, and DataLoss if its file is missing."""
        if not await asyncio.to_thread(self._files.has, record.digest):
            raise DataLoss(
                f"the file of {record.name} is missing; upload the LoRA again", metadata={"loras": record.name}
            )
        others = await self.catalogue.pinned()
        others.pop(record.digest, None)
        beside_bytes, budget_bytes = sum(others.values()), self._config.budget_bytes
        if beside_bytes + record.size_bytes > budget_bytes:
            raise TooLarge(
                f"{record.name} has {record.size_bytes} bytes, other pinned LoRAs {beside_bytes}, and LoRAs in memory "
                f"may have {budget_bytes} (budget_bytes): unpin others, or raise budget_bytes",
                metadata={"limit": "budget_bytes"},
            )
        if len(others) >= self._max_in_memory:
            raise TooLarge(
                f"{len(others)} other LoRAs are pinned, as many as the limit on open files allows: unpin others, "
                "or raise the limit",
                metadata={"limit": "open_files"},
            )

    def _hold_folder(self) -> None:
        with os_errors.translated():
            folders.make(self._folder)
            try:
                self._lock.acquire()
            except HeldElsewhere as held:
                raise Unavailable(f"{held} (key folder)") from None

    def _metrics(self) -> Iterator[Metric]:
        counts, files = self._cache.counts, self._files
        yield from self.importer.imports.collect()
        text = "LoRAs that workers fetched, by source: in memory, prefetched into memory, or on disk."
        yield counter_by("tier", f"{_PREFIX}_fetches", text, {tier.value: counts.by_tier[tier] for tier in Tier})
        yield from counters(
            _PREFIX,
            ("loads", "LoRAs that were loaded into memory.", counts.loads),
            ("loaded_bytes", "Bytes that were loaded into memory.", counts.loaded_bytes),
            ("load_seconds", "Seconds that loading LoRAs into memory took.", counts.load_s),
            ("load_failures", "Loads of LoRAs that failed.", counts.failures),
            ("evictions", "LoRAs that were evicted from memory.", counts.evictions),
        )
        budgets = {"memory": self._config.budget_bytes, "disk": self._config.disk_bytes}
        yield gauge_by("tier", f"{_PREFIX}_budget_bytes", "Upper bound on the bytes of LoRAs, by tier.", budgets)
        yield from gauges(
            _PREFIX,
            ("memory_bytes", "Bytes of LoRAs in memory, which workers on the same host share.", self._cache.used_bytes),
            ("disk_bytes", "Bytes of LoRAs on the disk, without the quarantine.", files.used_bytes),
            ("quarantined_bytes", "Bytes of files in quarantine.", files.quarantine.used_bytes),
            ("reserved_bytes", "Bytes of the disk reserved for uploads and imports.", files.room.reserved_bytes),
        )


def _catalogue(config: LoraConfig, folder: Path) -> LoraCatalogue | SharedCatalogue:
    """Return the catalogue, in the store's folder or in PostgreSQL. Raises ConfigError if that cannot be used."""
    if not config.database:
        return LoraCatalogue(folder / "catalogue.db")
    from bottega.loras.shared_catalogue import SharedCatalogue

    return SharedCatalogue(config.database)


def _files(config: LoraConfig, folder: Path) -> LoraFiles:
    """Return the store's files, in its folder or in S3. Raises ConfigError if S3 cannot be used."""
    if not config.objects:
        return LoraFolder(
            folder / "files",
            quarantine=folder / "quarantine",
            budget_bytes=config.disk_bytes,
            min_free_bytes=config.min_free_bytes,
        )
    from bottega.storage.s3 import S3Objects

    return LoraObjects(
        S3Objects(s3_location(config.objects), names=LORA_FILES),
        config.objects,
        folder,
        budget_bytes=config.objects_bytes,
        local_bytes=config.disk_bytes,
        min_free_bytes=config.min_free_bytes,
    )


def missing_lora(digest: str) -> LoraNotFound:
    """Return the error for a digest that the store does not have."""
    return LoraNotFound("the store has no LoRA with that digest", metadata={"loras": digest})
