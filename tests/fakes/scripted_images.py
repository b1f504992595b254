"""Services that do what a request says, on a real server, and calls to it: for tests of bottega.rpc."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from bottega import errors
from bottega.rpc.channel import channel_options, open_channel
from bottega.rpc.operation import logs
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, image_pb2_grpc, lora_pb2, lora_pb2_grpc

NAME = image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name


SMALL_ANSWER = "x" * (60 << 10)
LARGE_ANSWER = "x" * (900 << 10)


class ScriptedImages(image_pb2_grpc.ImageServiceServicer):
    """Does what the request's id says. large_answers: methods that made one. waiting: calls that have waited."""

    def __init__(self) -> None:
        self.seen_request_id = ""
        self.large_answers: set[str] = set()
        self.waiting = 0
        self.stream_ended = asyncio.Event()
        self.release = asyncio.Event()

    async def GetJob(self, request: image_pb2.GetJobRequest, context: object) -> image_pb2.GetJobResponse:
        self.seen_request_id = logs.bound().get("request_id", "")
        match request.job_id:
            case "refuse":
                raise errors.JobNotFound("no such job", metadata={"job_id": "refuse"})
            case "break":
                raise ZeroDivisionError("secret text of a library")
            case "no descriptor":
                raise OSError(errno.EMFILE, "Too many open files")
            case "hang":
                await asyncio.sleep(60)
            case "wait":
                self.waiting += 1
                await self.release.wait()
            case "large" | "huge":
                self.large_answers.add("GetJob")
                size = 2 if request.job_id == "huge" else 1
                return image_pb2.GetJobResponse(job=image_pb2.Job(job_id=size * LARGE_ANSWER))
        return image_pb2.GetJobResponse()

    async def WatchJob(
        self, request: image_pb2.WatchJobRequest, context: object
    ) -> AsyncIterator[image_pb2.WatchJobResponse]:
        try:
            yield image_pb2.WatchJobResponse()
            if request.job_id == "refuse":
                raise errors.JobNotFound("no such job")
            if request.job_id == "large":
                self.large_answers.add("WatchJob")
            while request.job_id in ("small", "large"):
                answer = SMALL_ANSWER if request.job_id == "small" else LARGE_ANSWER
                yield image_pb2.WatchJobResponse(event=image_pb2.JobEvent(job_id=answer))
            await (self.release.wait() if request.job_id == "wait" else asyncio.sleep(60))
        finally:
            self.stream_ended.set()


class ScriptedFleet(fleet_pb2_grpc.FleetServiceServicer):
    """Answers every message, and keeps it; refuses a registration of the name `refuse`."""

    def __init__(self, *, backlog: int = 0) -> None:
        self.reports: asyncio.Queue[fleet_pb2.JoinRequest] = asyncio.Queue()
        self._backlog = backlog

    async def Join(
        self, requests: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        async for request in requests:
            if request.registration.name == "refuse":
                raise errors.InvalidRequest("no such member")
            await self.reports.put(request)
            yield fleet_pb2.JoinResponse(backlog=self._backlog)


class ScriptedLoras(lora_pb2_grpc.LoraServiceServicer):
    """Says how many bytes of chunks have come."""

    async def UploadLora(
        self, requests: AsyncIterator[lora_pb2.UploadLoraRequest], context: object
    ) -> lora_pb2.UploadLoraResponse:
        size_bytes = sum([len(request.chunk) async for request in requests])
        return lora_pb2.UploadLoraResponse(lora=lora_pb2.StoredLora(size_bytes=size_bytes))


Served = tuple[Server, ScriptedImages, grpc.aio.Channel]


@asynccontextmanager
async def scripted_images(**config: Any) -> AsyncIterator[Served]:
    server, servicer = Server("scripted", ServerConfig(**config)), ScriptedImages()  # type: ignore[abstract]
    image_pb2_grpc.add_ImageServiceServicer_to_server(servicer, server.grpc)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(ScriptedFleet(), server.grpc)  # type: ignore[abstract]
    lora_pb2_grpc.add_LoraServiceServicer_to_server(ScriptedLoras(), server.grpc)  # type: ignore[abstract]
    server.add_services([NAME])
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield server, servicer, channel
    finally:
        await server.stop()


@asynccontextmanager
async def narrow_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Over which only a little is sent ahead: of a call that nobody reads, the server soon has the rest."""
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(address, options=[*channel_options(), *narrow]) as channel:
        yield channel


def stub(channel: grpc.aio.Channel) -> image_pb2_grpc.ImageServiceAsyncStub:
    return image_pb2_grpc.ImageServiceStub(channel)


async def failure(channel: grpc.aio.Channel, job_id: str) -> grpc.aio.AioRpcError:
    """What `GetJob` of that id fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(channel).GetJob(image_pb2.GetJobRequest(job_id=job_id))
    return caught.value


async def until(channel: grpc.aio.Channel, *, refused: bool, job_id: str = "") -> errors.BottegaError | None:
    """Call `GetJob` of that id until it is refused for want of room, or until it is not. Return the last refusal."""
    async with asyncio.timeout(60):
        while True:
            try:
                await stub(channel).GetJob(image_pb2.GetJobRequest(job_id=job_id))
                refusal = None
            except grpc.aio.AioRpcError as error:
                refusal = from_rpc_error(error)
            if isinstance(refusal, errors.QueueFull) is refused:
                return refusal
            await asyncio.sleep(0.02)
