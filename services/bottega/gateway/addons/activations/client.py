"""Calls to one activation store over gRPC; every failure comes out as a BottegaError."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error
from bottega.v1 import activations_pb2, activations_pb2_grpc
from bottega.v1.activations_pb2 import PrefetchTemplatesResponse

# Sources of one call, by the contract.
_MOST_SOURCES = 64

OnAnswer = Callable[[str, PrefetchTemplatesResponse], None]
"""Called with the address of the store, and with where it says that templates are."""


class GrpcActivationsClient:
    """The PrefetchClient of activation stores. Connects by itself and reconnects."""

    def __init__(self, target: Target, channels: Channels, on_answer: OnAnswer) -> None:
        self._address = target.address
        self._on_answer = on_answer
        self._channel = channels.open(target)
        self._store: activations_pb2_grpc.ActivationServiceAsyncStub = activations_pb2_grpc.ActivationServiceStub(
            self._channel
        )

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Has it bring templates into its memory, the most wanted first, and say where they are. names: sources."""
        for first in range(0, len(names), _MOST_SOURCES):
            request = activations_pb2.PrefetchTemplatesRequest(sources=names[first : first + _MOST_SOURCES])
            try:
                answer = await self._store.PrefetchTemplates(request, timeout=deadline_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            self._on_answer(self._address, answer)

    async def close(self) -> None:
        """Ends every call."""
        await self._channel.close()
