"""The SDK and the command against a gateway that answers without bounds, or with what cannot be."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bottega.client import AsyncClient
from bottega.client.transport import calls, credentials
from bottega.errors import InternalError
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.fleet_pb2 import ListMembersResponse, Member
from tests.fakes.scripted_gateway import ScriptedGateway
from tests.support.terminal import run

MIB = 1 << 20


class EndlessImages(image_pb2_grpc.ImageServiceServicer):
    """A gateway whose image announces a size, and does not end."""

    def __init__(self, announced: int) -> None:
        self._announced = announced
        self.sent_bytes = 0

    async def GetImage(
        self, request: image_pb2.GetImageRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[image_pb2.GetImageResponse]:
        yield image_pb2.GetImageResponse(image=image_pb2.Image(size_bytes=self._announced))
        while True:
            self.sent_bytes += MIB
            yield image_pb2.GetImageResponse(chunk=bytes(MIB))


@pytest.mark.parametrize("announced", [3 * MIB, 1 << 50])
async def test_an_image_that_does_not_end_is_left_at_its_announced_size_or_the_bound(
    announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls.fetch_image, "__kwdefaults__", {"max_bytes": 4 * MIB})
    gateway, server = EndlessImages(announced), grpc.aio.server()  # type: ignore[abstract]
    image_pb2_grpc.add_ImageServiceServicer_to_server(gateway, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with AsyncClient(address) as client:
            with pytest.raises(InternalError, match=r"image 0 has more than the \d+ bytes that were announced"):
                await asyncio.wait_for(client.job("f" * 32).image(), 60)
        assert gateway.sent_bytes < 64 * MIB, "the call was ended"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([], "without an image"),
        ([image_pb2.Image(size_bytes=1 << 40)], "more than 1024 images of one job, or more than 512 MiB"),
        ([image_pb2.Image()] * 1025, "more than 1024 images of one job"),
    ],
)
def test_a_job_that_completes_with_no_image_or_with_too_much_is_an_error(
    gateway: ScriptedGateway, address: str, own_folder: Path, images: list[image_pb2.Image], said: str
) -> None:
    gateway.scripts = [[image_pb2.JobEvent(job_id="job-1", completed=image_pb2.Completed(images=images))]]
    done = run("generate", "a star", "-o", "star.png", address=address)
    assert (done.exit_code, said in re.sub(r"\s+", " ", done.output)) == (1, True), done.output
    assert not (own_folder / "star.png").exists()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\x0a\x00" * 10_000_000, "the server's answer to ListMembers has more than 1,048,576 fields"),
        (b"\x0a\x7f", "the server's answer to ListMembers cannot be read"),
    ],
    ids=["ten-million-members", "no-message"],
)
async def test_an_answer_that_would_become_large_is_refused_before_it_is_parsed(raw: bytes, said: str) -> None:
    server, address = await _serve(raw)
    try:
        async with AsyncClient(address, fleet_address=address) as client:
            with pytest.raises(InternalError, match=said):
                await client.fleet()
        done = await asyncio.to_thread(run, "fleet", address=address)
        assert (done.exit_code, said in re.sub(r"\s+", " ", done.output)) == (1, True), done.output
    finally:
        await server.stop(None)


async def _serve(raw: bytes) -> tuple[grpc.aio.Server, str]:
    """Return a server, and its address, that answers ListMembers with these bytes."""

    async def answer(request: bytes, context: object) -> bytes:
        return raw

    server = grpc.aio.server(options=[("grpc.max_send_message_length", 32 * MIB)])
    handlers: dict[str, Any] = {"ListMembers": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bottega.v1.FleetService", handlers)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    return server, address


def test_an_answer_with_as_many_fields_as_a_large_fleet_is_read() -> None:
    parse = credentials._bounded(ListMembersResponse.FromString, "/bottega.v1.FleetService/ListMembers")
    assert parse is not None
    raw = ListMembersResponse(members=[Member()] * 100_000).SerializeToString()
    assert len(parse(raw).members) == 100_000
