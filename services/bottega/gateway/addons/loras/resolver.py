"""Calls the LoRA stores of the fleet: which weights a name stands for, and to keep what jobs need."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence

from bottega import kinds
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, LoraNotFound, LoraUnusable, NoLora
from bottega.gateway.addons.loras.client import GrpcLoraClient
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.tenants.access import Access
from bottega.rpc.channel import Channels
from bottega.v1.generation_pb2 import Lora
from bottega.v1.lora_pb2 import StoredLora

_log = logging.getLogger(__name__)

# A store answers at once; a request waits for it.
_GET_S = 2.0
_LIST_S = 2.0
# Lists of tenants are made from one list of the stores, however many ask. So is the refusal where a store is silent.
_LISTED_S = 2.0
_KEEP_S = 2.0
# A store comes back, or another one joins, within some seconds.
_RETRY_AFTER_S = 3.0
# A store whose leases are not renewed for its lease_s (10 s) lets LoRAs be deleted: three tries are within that.
_PROTECT_S = 3.0
# Digests of one call, by the contract.
_MOST_DIGESTS = 256


class LoraResolver:
    """`start` it where jobs may wait. channels: of the gateway's process."""

    def __init__(self, fleet: Fleet, channels: Channels) -> None:
        self._fleet = fleet
        self._channels = channels
        self._clients: dict[str, GrpcLoraClient] = {}
        self._calls = BackgroundTasks("calls of LoRA stores")
        self._listing = asyncio.Lock()
        self._listed: Sequence[StoredLora] | NoLora = ()
        self._listed_at = -math.inf

    def start(self, needed: Callable[[], Iterable[str]]) -> None:
        """From now on no store deletes what is needed. needed: digests of LoRAs of all jobs that have not ended."""
        self._calls.start(self._protect_all(needed))

    async def resolve(self, loras: Sequence[Lora], access: Access) -> list[StoredLora]:
        """What the stores have of each LoRA. access: of who names them; its tenant's own come before those for all.

        Raises LoraNotFound naming all that no store has, LoraUnusable where one has other weights than were pinned,
        NoLora where no store can be asked.
        """
        names = list(dict.fromkeys(lora.name for lora in loras))
        found = dict(zip(names, await asyncio.gather(*(self._find_any(name, access) for name in names)), strict=True))
        lacking = [name for name, stored in found.items() if stored is None]
        if lacking:
            listed = ",".join(lacking)
            raise LoraNotFound(f"no such LoRA: {', '.join(lacking)}", metadata={"loras": listed})
        stored = [each for lora in loras if (each := found[lora.name]) is not None]
        for lora, each in zip(loras, stored, strict=True):
            if lora.HasField("digest") and lora.digest != each.digest:
                raise LoraUnusable(
                    f"{lora.name} has other weights now than those that were asked for, {lora.digest[:12]}",
                    metadata={"lora": lora.name, "digest": each.digest},
                )
        return stored

    async def list_all(self) -> Sequence[StoredLora]:
        """Return the LoRAs of all stores, of each name that of the first, as they were within the last seconds.

        Raise NoLora where a store does not answer.
        """
        loop = asyncio.get_running_loop()
        async with self._listing:
            if loop.time() - self._listed_at > _LISTED_S:
                try:
                    self._listed = await self._ask_all()
                except NoLora as error:
                    self._listed = error
                self._listed_at = loop.time()
        if isinstance(self._listed, NoLora):
            raise self._listed.with_traceback(None)
        return self._listed

    def stores(self) -> list[Member]:
        """Those that are here, one that is about to stop last."""
        return sorted(self._fleet.services(kinds.LORAS), key=lambda member: member.load.draining)

    async def close(self) -> None:
        """Ends every call."""
        await self._calls.cancel()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _find_any(self, name: str, access: Access) -> StoredLora | None:
        """Asks no store for what its caller may not name, as it asks none where that is not there."""
        own = access.own(name)
        found = await self._find(own) if own else None
        return found or (await self._find(name) if access.has_lora(name) else None)

    async def _find(self, name: str) -> StoredLora | None:
        """From the first store that has it; None where all that answer have not. Raises NoLora where none answers."""
        failed: BottegaError | None = None
        answered = False
        for store in self.stores():
            try:
                return await self._client(store).get(name, deadline_s=_GET_S)
            except LoraNotFound:
                answered = True
            except BottegaError as error:
                failed = error
        if answered and failed is None:
            return None
        why = f": {failed.message}" if failed else ", none has joined the fleet"
        raise NoLora(
            f"no LoRA store can be asked for {name}{why}", metadata={"loras": name}, retry_after_s=_RETRY_AFTER_S
        )

    async def _ask_all(self) -> Sequence[StoredLora]:
        found: dict[str, StoredLora] = {}
        for store in self.stores():
            try:
                loras = await self._client(store).list_all(deadline_s=_LIST_S)
            except BottegaError as error:
                why = f"LoRA store {store.name} cannot be asked for what it has: {error.message}"
                raise NoLora(why, retry_after_s=_RETRY_AFTER_S) from None
            for lora in loras:
                found.setdefault(lora.name, lora)
        return tuple(found.values())

    def _client(self, store: Member) -> GrpcLoraClient:
        address = store.registration.address
        client = self._clients.get(address)
        if client is None:
            here = {member.registration.address for member in self.stores()}
            for gone in self._clients.keys() - here:
                # A caller that still waits for it gets its answer, or the error.
                self._calls.start(self._clients.pop(gone).close(grace_s=max(_GET_S, _KEEP_S)))
            client = self._clients[address] = GrpcLoraClient(store.target, self._channels)
        return client

    async def _protect_all(self, needed: Callable[[], Iterable[str]]) -> None:
        while True:
            digests = sorted(set(needed()))
            for store in self.stores() if digests else ():
                self._calls.start(self._protect(store, digests))
            await asyncio.sleep(_PROTECT_S)

    async def _protect(self, store: Member, digests: Sequence[str]) -> None:
        try:
            for first in range(0, len(digests), _MOST_DIGESTS):
                await self._client(store).keep(digests[first : first + _MOST_DIGESTS], deadline_s=_KEEP_S)
        except BottegaError as error:
            # They are there still unless somebody deletes them now.
            _log.info("LoRAs are not kept", extra={"member": store.name, "text": error.message})
