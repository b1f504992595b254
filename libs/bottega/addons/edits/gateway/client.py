"""Calls to one activation store over gRPC. Every failure becomes a BottegaError."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error
from bottega.v1 import activations_pb2, activations_pb2_grpc
from bottega.v1.activations_pb2 import PrefetchTemplatesResponse

# Limit on the sources of one call in activations.proto.
_MAX_SOURCES = 64

OnResponse = Callable[[str, PrefetchTemplatesResponse], None]
"""Called with the address of a store and its response, which says which templates it has."""


class GrpcActivationsClient:
    """The PrefetchClient of an activation store. gRPC connects and reconnects its channel."""

    def __init__(self, target: Target, channels: Channels, on_response: OnResponse) -> None:
        self._address = target.address
        self._on_response = on_response
        self._channel = channels.open(target)
        self._store: activations_pb2_grpc.ActivationServiceAsyncStub = activations_pb2_grpc.ActivationServiceStub(
            self._channel
        )

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Let the store load the templates of these sources into memory, in this order, and report where they are."""
        for first in range(0, len(names), _MAX_SOURCES):
            request = activations_pb2.PrefetchTemplatesRequest(sources=names[first : first + _MAX_SOURCES])
            try:
                response = await self._store.PrefetchTemplates(request, timeout=deadline_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            self._on_response(self._address, response)

    async def close(self) -> None:
        await self._channel.close()
