"""Looks up names of LoRAs in the fleet's stores over gRPC, and protects LoRAs that jobs need from deletion."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence

import grpc

from bottega import kinds
from bottega.addons.interface.gateway_addon import (
    FleetView,
)
from bottega.addons.interface.views import Access, Member
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, InternalError, LoraNotFound, LoraUnusable, NoLora
from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error
from bottega.v1 import lora_pb2, lora_pb2_grpc
from bottega.v1.generation_pb2 import Lora
from bottega.v1.lora_pb2 import StoredLora

_log = logging.getLogger(__name__)

# A store responds at once, and a request waits for it.
_GET_S = 2.0
_LIST_S = 2.0
# The lists of all tenants are made from one list of the stores, or one refusal, which is kept for 2 s.
_LISTED_S = 2.0
_KEEP_S = 2.0
# A store comes back, or another one joins, within some seconds.
_RETRY_AFTER_S = 3.0
# 3 s: three tries within a store's lease_s (10 s), after which LoRAs may be deleted.
_PROTECT_S = 3.0
# Limit on the digests of one call in lora.proto.
_MAX_DIGESTS = 256


class LoraResolver:
    """A client of all LoRA stores in the fleet.

    Args:
        fleet: The connected services.
        channels: Channels of the gateway's process.
        needed: Returns the digests of the LoRAs of all jobs that have not ended.
    """

    def __init__(self, fleet: FleetView, channels: Channels, *, needed: Callable[[], Iterable[str]]) -> None:
        self._fleet = fleet
        self._channels = channels
        self._clients: dict[str, GrpcLoraClient] = {}
        self._calls = BackgroundTasks("calls of LoRA stores")
        self._needed = needed
        self._started = False
        self._listing = asyncio.Lock()
        self._listed: Sequence[StoredLora] | NoLora = ()
        self._listed_at = -math.inf

    def start(self) -> None:
        """Begin to protect the needed LoRAs from deletion. Later calls do nothing."""
        if not self._started:
            self._started = True
            self._calls.start(self._protect_all())

    async def resolve(self, loras: Sequence[Lora], access: Access) -> list[StoredLora]:
        """Return the stored LoRA for each LoRA of a request. A tenant's own LoRA takes precedence over a shared one.

        Raises LoraNotFound naming all LoRAs that no store has, LoraUnusable if weights differ from the requested ones,
        and NoLora if the stores do not respond.

        Args:
            loras: The request's LoRAs.
            access: What the caller may name.
        """
        names = list(dict.fromkeys(lora.name for lora in loras))
        found = dict(zip(names, await asyncio.gather(*(self._find_any(name, access) for name in names)), strict=True))
        lacking = [name for name, stored in found.items() if stored is None]
        if lacking:
            listed = ",".join(lacking)
            raise LoraNotFound(f"no such LoRA: {', '.join(lacking)}", metadata={"loras": listed})
        stored = [present for lora in loras if (present := found[lora.name]) is not None]
        for lora, present in zip(loras, stored, strict=True):
            if lora.HasField("digest") and lora.digest != present.digest:
                raise LoraUnusable(
                    f"{lora.name} now has other weights than the requested ones, {lora.digest[:12]}",
                    metadata={"lora": lora.name, "digest": present.digest},
                )
        return stored

    async def list_all(self) -> Sequence[StoredLora]:
        """Return the LoRAs of all stores, at most 2 s old. If stores share a name, the first store's LoRA counts.

        Raises NoLora if a store does not respond.
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
        """Return the stores in the fleet; draining ones come last."""
        return sorted(self._fleet.services(kinds.LORAS), key=lambda member: member.load.draining)

    async def close(self) -> None:
        await self._calls.cancel()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _find_any(self, name: str, access: Access) -> StoredLora | None:
        """Return the LoRA that a caller means by a name; None if there is none that the caller may use."""
        own = access.own(name)
        found = await self._find(own) if own else None
        return found or (await self._find(name) if access.has_lora(name) else None)

    async def _find(self, name: str) -> StoredLora | None:
        """Return a LoRA from the first store that has it; None if no store has it.

        Raises NoLora if there is no store, or if the LoRA was not found and a store did not respond.
        """
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
        raise NoLora(f"no LoRA store can look up {name}{why}", metadata={"loras": name}, retry_after_s=_RETRY_AFTER_S)

    async def _ask_all(self) -> Sequence[StoredLora]:
        found: dict[str, StoredLora] = {}
        for store in self.stores():
            try:
                loras = await self._client(store).list_all(deadline_s=_LIST_S)
            except BottegaError as error:
                why = f"LoRA store {store.name} cannot list its LoRAs: {error.message}"
                raise NoLora(why, retry_after_s=_RETRY_AFTER_S) from None
            for lora in loras:
                found.setdefault(lora.name, lora)
        return tuple(found.values())

    def _client(self, store: Member) -> GrpcLoraClient:
        address = store.registration.address
        client = self._clients.get(address)
        if client is None:
            present = {member.registration.address for member in self.stores()}
            for gone in self._clients.keys() - present:
                # A call that still waits for the store gets its response, or an error.
                self._calls.start(self._clients.pop(gone).close(grace_s=max(_GET_S, _KEEP_S)))
            client = self._clients[address] = GrpcLoraClient(store.target, self._channels)
        return client

    async def _protect_all(self) -> None:
        while True:
            digests = sorted(set(self._needed()))
            for store in self.stores() if digests else ():
                self._calls.start(self._protect(store, digests))
            await asyncio.sleep(_PROTECT_S)

    async def _protect(self, store: Member, digests: Sequence[str]) -> None:
        try:
            for first in range(0, len(digests), _MAX_DIGESTS):
                await self._client(store).protect(digests[first : first + _MAX_DIGESTS], deadline_s=_KEEP_S)
        except BottegaError as error:
            # The LoRAs are lost only if somebody deletes them before the next try.
            _log.info(
                "a store could not protect LoRAs from deletion", extra={"member": store.name, "text": error.message}
            )


_PAGE_SIZE = 1000
_MAX_PAGES = 100


class GrpcLoraClient:
    """The client of one LoRA store over gRPC, which connects and reconnects the channel."""

    def __init__(self, target: Target, channels: Channels) -> None:
        self._channel = channels.open(target)
        self._store: lora_pb2_grpc.LoraServiceAsyncStub = lora_pb2_grpc.LoraServiceStub(self._channel)

    async def get(self, name: str, *, deadline_s: float) -> StoredLora:
        """Return the store's LoRA of this name. Raise LoraNotFound if the store has none."""
        try:
            response = await self._store.GetLora(lora_pb2.GetLoraRequest(name=name), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NoLora(f"the store did not respond within {deadline_s:g} s") from None
            raise from_rpc_error(error) from None
        return response.lora

    async def list_all(self, *, deadline_s: float) -> list[StoredLora]:
        """Return all LoRAs of the store. Raise InternalError if the list does not end.

        Args:
            deadline_s: Deadline of each page.
        """
        request = lora_pb2.ListLorasRequest(page_size=_PAGE_SIZE)
        found: list[StoredLora] = []
        for _ in range(_MAX_PAGES):
            try:
                page = await self._store.ListLoras(request, timeout=deadline_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            found.extend(page.loras)
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token
        raise InternalError(f"the store lists more than {_MAX_PAGES * _PAGE_SIZE} LoRAs, or its list does not end")

    async def protect(self, digests: Sequence[str], *, deadline_s: float) -> None:
        """Ask the store to protect LoRAs from deletion for a while, without loading them."""
        request = lora_pb2.PrefetchLorasRequest(digests=digests, only_keep=True)
        try:
            await self._store.PrefetchLoras(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def close(self, *, grace_s: float = 0.0) -> None:
        """End all calls that do not end by themselves within `grace_s`."""
        await self._channel.close(grace_s or None)
