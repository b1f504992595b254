"""Calls to one ControlNet server over gRPC. Every failure becomes a BottegaError."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error
from bottega.v1 import controlnet_pb2, controlnet_pb2_grpc


class GrpcControlNetClient:
    """The PrefetchClient of a ControlNet server. gRPC connects and reconnects its channel."""

    def __init__(self, target: Target, channels: Channels) -> None:
        self._channel = channels.open(target)
        self._server: controlnet_pb2_grpc.ControlNetServiceAsyncStub = controlnet_pb2_grpc.ControlNetServiceStub(
            self._channel
        )

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Ask the server to load these ControlNets, in this order."""
        try:
            await self._server.Prefetch(controlnet_pb2.PrefetchRequest(names=names), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        await self._channel.close()
