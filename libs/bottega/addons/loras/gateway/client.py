"""Calls to one LoRA store over gRPC. Every failure becomes a BottegaError."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from bottega.errors import InternalError, NoLora
from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error
from bottega.v1 import lora_pb2, lora_pb2_grpc
from bottega.v1.lora_pb2 import StoredLora

_PAGE_SIZE = 1000
_MAX_PAGES = 100


class GrpcLoraClient:
    """The client of one LoRA store, which is also its PrefetchClient. gRPC connects and reconnects its channel."""

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

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Ask the store to load LoRAs by digest, in this order, and to protect them from deletion for a while."""
        await self._prefetch(lora_pb2.PrefetchLorasRequest(digests=names), deadline_s)

    async def protect(self, digests: Sequence[str], *, deadline_s: float) -> None:
        """Ask the store to protect LoRAs from deletion for a while, without loading them."""
        await self._prefetch(lora_pb2.PrefetchLorasRequest(digests=digests, only_keep=True), deadline_s)

    async def close(self, *, grace_s: float = 0.0) -> None:
        """End all calls that do not end by themselves within `grace_s`."""
        await self._channel.close(grace_s or None)

    async def _prefetch(self, request: lora_pb2.PrefetchLorasRequest, deadline_s: float) -> None:
        try:
            await self._store.PrefetchLoras(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
