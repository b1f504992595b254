"""The LoRA store itself: catalogue, files, cache and links in one, and its place in the fleet.

`service.py` translates between it and gRPC.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client import Counter

from bottega import kinds, rules
from bottega.background_tasks import BackgroundTasks
from bottega.caching import Tier, TieredCache
from bottega.errors import Draining, LoraInUse, LoraNotFound, Unavailable
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.config import LoraConfig
from bottega.loras.files import LoraFolder
from bottega.loras.importer import LoraImporter
from bottega.loras.importing.import_processes import ImportProcesses
from bottega.loras.metrics import StoreStatistics
from bottega.loras.own_loras import base_folders, check_own_loras, import_own_loras
from bottega.loras.pinning import PinnedLoras
from bottega.loras.records import CatalogueRecord
from bottega.loras.recovery import LoraRecovery, RestoredLora
from bottega.loras.worker_link import LoraLinks
from bottega.process import open_files
from bottega.process.memory import MemoryMeter
from bottega.rpc.fleet_membership import FleetMembership, Listening
from bottega.rpc.operation.link_metrics import link_counts
from bottega.storage import folders, os_errors
from bottega.storage.process_lock import HeldElsewhere, ProcessLock
from bottega.transport import offer_to_wire
from bottega.v1 import fleet_pb2
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest

_log = logging.getLogger(__name__)

# That LoRAs in memory may have. The others are for up to 256 workers' links, of two sockets each, callers, uploads, the
# catalogue, import processes, and LoRAs that memory has no room for: without one left the store could not even refuse.
_SHARE_OF_OPEN_FILES = 0.5
# LoRAs that jobs need; those of a full queue have some thousand different ones at most.
_MOST_NEEDED = 65_536


class LoraStore:
    """Start it with `start`, end it with `drain` and `stop`.

    imports: counts imports by outcome. listening: its server.

    Raises ConfigError where a base model cannot be found, or a LoRA of its own is for none of them.
    """

    def __init__(self, config: LoraConfig, *, folder: Path, imports: Counter, listening: Listening) -> None:
        self.name = config.name or f"loras-{os.getpid()}"
        self.bases = base_folders(config)
        check_own_loras(config)
        self._config = config
        self._listening = listening
        self._version = importlib.metadata.version("bottega-services")
        self._folder = folder
        self._lock = ProcessLock(folder)
        self.catalogue = LoraCatalogue(folder / "catalogue.db")
        self._files = LoraFolder(
            folder / "files",
            quarantine=folder / "quarantine",
            budget_bytes=config.disk_bytes,
            min_free_bytes=config.min_free_bytes,
        )
        most_in_memory = max(1, int(_SHARE_OF_OPEN_FILES * open_files.limit()))
        self._cache = TieredCache(
            self._files.path,
            what="LoRA",
            missing=missing_lora,
            budget_bytes=config.budget_bytes,
            max_entries=most_in_memory,
            max_loads=config.loads_at_once,
        )
        self._links = LoraLinks(config.links, cache=self._cache)
        self._pins = PinnedLoras(
            catalogue=self.catalogue,
            files=self._files,
            cache=self._cache,
            budget_bytes=config.budget_bytes,
            most=most_in_memory,
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
            imports=imports,
        )
        self.recovery = LoraRecovery(
            bases=self.bases, catalogue=self.catalogue, files=self._files, write_lock=self.importer.write_lock
        )
        self._left_out = dict(config.left_out)
        self._needed_until: dict[str, float] = {}
        self._membership: FleetMembership | None = None
        self._memory = MemoryMeter(lambda: [os.getpid()])
        self._tasks = BackgroundTasks("measuring of memory")
        self._draining = False

    async def start(self) -> None:
        """Opens catalogue and files, brings its own LoRAs, loads what is pinned, and joins the fleet.

        Raises what they do, and Unavailable where another process has the folder.
        """
        await asyncio.to_thread(self._hold_folder)
        await self.catalogue.open()
        await asyncio.to_thread(self._files.open)
        lost = (await self.recovery.sort_out()).lost
        self._left_out |= await import_own_loras(
            self._config.loras,
            importer=self.importer,
            catalogue=self.catalogue,
            at_once=self._config.imports.at_once,
            lost=lost,
        )
        await self._pins.apply()
        self._tasks.start(self._memory.run())
        if self._config.gateway:
            self._membership = self._join()
            self._membership.start()

    def state(self, record: CatalogueRecord) -> bool | None:
        """Whether it is in memory; False while it is on its way there, None where it is not."""
        return self._cache.state(record.digest)

    async def remove(self, name: str) -> None:
        """Forgets a LoRA. Raises LoraNotFound, LoraInUse while it is being sent, or may be at any moment."""
        async with self.importer.write_lock:
            record = await self.catalogue.get(name)
            left_s = max(0.0, self._needed_until.get(record.digest, 0.0) - time.monotonic())
            if self._cache.leases(record.digest) or left_s:
                wait_s = max(1.0, left_s)
                raise LoraInUse(
                    f"{name} is in use: it is being sent to workers, or a job needs it or did a moment ago; "
                    f"try again in {wait_s:.0f} s",
                    metadata={"loras": name},
                    retry_after_s=wait_s,
                )
            only_name = await self.catalogue.names(record.digest) == [name]
            # First: a name that is forgotten must not come back from its description.
            await asyncio.to_thread(self._files.undescribe, record.digest, name)
            if only_name:
                self._cache.forget(record.digest)
                # Before the row: on a full disk that makes the room which forgetting the name needs.
                await asyncio.to_thread(self._files.remove, record.digest)
            await self.catalogue.remove(name)
            if not only_name and record.pinned:
                await self._pins.apply()  # for the names that are left it need not stay in memory
        _log.info("a LoRA is removed", extra={"lora": name, "digest": record.digest})

    async def prefetch(self, digests: Sequence[str], *, only_keep: bool = False) -> list[str]:
        """Has these in memory soon, as far as they are known and have room; which will be. They cannot be deleted for
        a while. only_keep: loads none of them."""
        known = await self.catalogue.known(digests)
        wanted = [digest for digest in dict.fromkeys(digests) if digest in known]
        now = time.monotonic()
        if len(self._needed_until) > _MOST_NEEDED:
            self._needed_until = {digest: until for digest, until in self._needed_until.items() if until > now}
        self._needed_until.update(dict.fromkeys(wanted, now + self._config.lease_s))
        if only_keep:
            return [digest for digest in wanted if self._cache.state(digest) is not None]
        return [digest for digest in wanted if self._cache.prefetch(digest)]

    async def pin(self, name: str, pinned: bool) -> CatalogueRecord:
        """Keeps it in memory, as soon as that has room, or no longer.

        Raises LoraNotFound, TooLarge where it would not fit beside others that are pinned, DataLoss without its file.
        """
        async with self.importer.write_lock:  # of two at once, the second one sees the first
            if pinned:
                await self._pins.check(await self.catalogue.get(name))
            record = await self.catalogue.change(name, lambda there: replace(there, pinned=pinned))
            await asyncio.to_thread(self._files.describe, record)
            await self._pins.apply()  # last, so that the answer says that it is being loaded
        return record

    async def set_bounds(self, name: str, digest: str, bounds: tuple[tuple[int, int], ...]) -> CatalogueRecord:
        """Records its profile. Raises LoraNotFound, also where the name has other weights now."""

        def measured(there: CatalogueRecord) -> CatalogueRecord:
            if there.digest != digest:
                said = f"{name} has other weights now than those that were measured"
                raise LoraNotFound(said, metadata={"loras": name})
            return replace(there, bounds=tuple(sorted(bounds)))

        async with self.importer.write_lock:
            record = await self.catalogue.change(name, measured)
            await asyncio.to_thread(self._files.describe, record)
        return record

    async def restore(self, id: str, *, name: str, base: str) -> RestoredLora:
        """Brings a LoRA back from quarantine, see LoraRecovery.restore; what was pinned is loaded again."""
        restored = await self.recovery.restore(id, name=name, base=base)
        if restored.record.pinned:
            await self._pins.apply()
        return restored

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """A link's offer for a worker. caller: host of the worker. Raises Draining, LinksFull, InvalidRequest."""
        if self._draining:
            raise Draining("the LoRA store is stopping")
        return offer_to_wire(self._links.offer(request.worker, request.link_id, caller=caller))

    def load(self) -> fleet_pb2.Load:
        """How busy it is."""
        # What lies in memory without a name is no resident memory of this process; a worker that shares some of it has
        # that in its own figure, too.
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
        """Offers no links any more, and returns when nothing is being sent."""
        self._draining = True
        self._links.drain()
        if self._membership:
            self._membership.report_soon()
        await asyncio.to_thread(self._cache.wait_idle, self._config.server.drain_grace_s)

    async def stop(self) -> None:
        """Leaves the fleet and ends every link."""
        if self._membership:
            await self._membership.stop()
        await self._tasks.cancel()
        await self._import_processes.stop()
        await asyncio.to_thread(self._links.close)
        await asyncio.to_thread(self._cache.close)
        await self.catalogue.close()
        self._lock.release()

    def _hold_folder(self) -> None:
        with os_errors.translated():
            folders.make(self._folder)
            try:
                self._lock.acquire()
            except HeldElsewhere as held:
                raise Unavailable(f"{held} (key folder)") from None

    def _join(self) -> FleetMembership:
        registration = fleet_pb2.Registration(
            kind=kinds.LORAS,
            name=self.name,
            address=self._listening.address,
            version=self._version,
            metrics_address=self._listening.metrics_address,
        )
        return FleetMembership(self._config.gateway, registration, load=self.load, channels=self._listening.channels)

    def statistics(self) -> StoreStatistics:
        """Its figures of this moment. Any thread may ask."""
        return StoreStatistics(
            counts=self._cache.counts,
            memory_bytes=self._cache.used_bytes,
            memory_budget_bytes=self._config.budget_bytes,
            disk_bytes=self._files.used_bytes,
            disk_budget_bytes=self._config.disk_bytes,
            quarantined_bytes=self._files.quarantine.used_bytes,
            reserved_bytes=self._files.room.reserved_bytes,
            links=link_counts(self._links.counters, open_links=len(self._links.handlers)),
        )


def missing_lora(digest: str) -> LoraNotFound:
    """The error for weights that the store does not have."""
    return LoraNotFound("the store has no LoRA of that digest", metadata={"loras": digest})
