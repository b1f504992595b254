"""Brings offers of links from ControlNet servers, LoRA stores and the peer to the engine, which speaks no gRPC.

Tensors never come this way.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from bottega.errors import BottegaError, Unavailable
from bottega.rpc.channel import open_channel
from bottega.rpc.status import from_rpc_error, to_job_error, was_answered
from bottega.v1 import (
    controlnet_pb2,
    controlnet_pb2_grpc,
    engine_pb2,
    lora_pb2,
    lora_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from bottega.worker.engine_client import CommandSender

_log = logging.getLogger(__name__)

_Response = controlnet_pb2.OpenLinkResponse | lora_pb2.OpenLoraLinkResponse | worker_pb2.OpenPeerLinkResponse

# A server answers at once; the engine waits a little longer than this.
_DEADLINE_S = 4.0
# Servers of a fleet ask for a link each, once.
_MOST_AT_ONCE = 256


class LinkResolver:
    """worker: name that servers are told."""

    def __init__(self, engine: CommandSender, *, worker: str) -> None:
        self._engine = engine
        self._worker = worker
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, request: engine_pb2.EngineLinkRequest) -> None:
        """The engine needs a link; it is answered in any case."""
        if len(self._tasks) >= _MOST_AT_ONCE:
            self._answer(request.request, Unavailable("the worker asks too many servers for links at once"))
            return
        task = asyncio.create_task(self._bring(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Asks no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _bring(self, request: engine_pb2.EngineLinkRequest) -> None:
        try:
            response = await self._ask(request)
        except grpc.aio.AioRpcError as error:
            _log.info("no link was offered", extra={"address": request.address, "text": error.details()})
            self._answer(request.request, _typed(error))
        else:
            self._answer(request.request, response)

    async def _ask(self, request: engine_pb2.EngineLinkRequest) -> _Response:
        channel = open_channel(request.address)
        try:
            if request.HasField("peer"):
                peer: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
                wanted = worker_pb2.OpenPeerLinkRequest(
                    worker=self._worker, terms=request.peer, link_id=request.link_id
                )
                return await peer.OpenPeerLink(wanted, timeout=_DEADLINE_S)
            if request.lora_store:
                store: lora_pb2_grpc.LoraServiceAsyncStub = lora_pb2_grpc.LoraServiceStub(channel)
                fetching = lora_pb2.OpenLoraLinkRequest(worker=self._worker, link_id=request.link_id)
                return await store.OpenLoraLink(fetching, timeout=_DEADLINE_S)
            server: controlnet_pb2_grpc.ControlNetServiceAsyncStub = controlnet_pb2_grpc.ControlNetServiceStub(channel)
            asked = controlnet_pb2.OpenLinkRequest(worker=self._worker, link_id=request.link_id)
            return await server.OpenLink(asked, timeout=_DEADLINE_S)
        finally:
            await channel.close()

    def _answer(self, number: int, outcome: _Response | BottegaError) -> None:
        answer = engine_pb2.EngineLinkOffer(request=number)
        if isinstance(outcome, BottegaError):
            answer.error.CopyFrom(to_job_error(outcome))
        else:
            answer.offer.CopyFrom(outcome.offer)
            answer.worker = outcome.worker if isinstance(outcome, worker_pb2.OpenPeerLinkResponse) else ""
        try:
            self._engine.send(engine_pb2.EngineCommand(link_offer=answer))
        except BottegaError:
            return  # the engine that asked is gone


def _typed(failure: grpc.aio.AioRpcError) -> BottegaError:
    """What gRPC itself says of a call names hosts, and what becomes of this goes as far as those who want pictures."""
    error = from_rpc_error(failure)
    return error if was_answered(failure) else type(error)(f"the call for a link failed: {failure.code().name}")
