"""Links of a LoRA store over real gRPC: offers that nobody takes up, and other users of its machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from bottega.errors import LinksFull
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.rpc.status import from_rpc_error
from bottega.transport.handshake.listener import MAX_OFFERS_OF_ONE
from tests.support.other_user import needs_root, run_as_another
from tests.support.running_loras import config, lora_file, running

# A worker of another user's, which asks for a link and for a LoRA as any worker does.
_IMPORTS = """
import encodings.ascii
import grpc
from bottega.errors import BottegaError
from bottega.addons.loras.wire import messages
from bottega.transport import Backend, Deadline, Limits, connect, offer_from_wire
from bottega.v1 import link_pb2, link_pb2_grpc
"""
_FETCH = """
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = link_pb2.OpenLinkRequest(kind="loras", worker="another user")
    offer = offer_from_wire(link_pb2_grpc.LinkServiceStub(channel).OpenLink(request, timeout=10).offer)
limits = Limits(slots=2, slot_bytes=64 << 20)
try:
    with connect(offer, Deadline.after(10), limits=limits, backends=(Backend.MEMFD,)) as link:
        asked = messages.fetch_message(1, sys.argv[2])
        link.send(asked.layout, asked.buffers, Deadline.after(10))
        with link.recv(Deadline.after(10)) as incoming:
            incoming.wait_all(Deadline.after(10))
            print("was given", len(incoming.file or b""), "bytes of memory")
except BottegaError as error:
    print(type(error).__name__, error.message)
"""


@needs_root
async def test_another_user_is_never_given_the_memory_of_a_lora(tmp_path: Path, public_folder: Path) -> None:
    path = public_folder / "links.sock"
    async with running(tmp_path / "store", config(links=LimitedLinksConfig(socket=str(path)))) as store:
        lora = await store.upload("ink", lora_file(tmp_path, rank=400))  # more than goes by copies
        for mode in (0o600, 0o666):  # as it is made, and as if that hurdle were not there
            if mode != 0o600:
                path.chmod(mode)
            assert path.stat().st_mode & 0o777 == mode
            told = await asyncio.to_thread(run_as_another, _FETCH, store.server.address, lora.digest, imports=_IMPORTS)
            assert told.startswith(("PeerDead", "AuthFailed")), told


async def test_a_store_that_is_full_of_offers_says_when_to_ask_again(tmp_path: Path) -> None:
    async with running(tmp_path / "store") as store:

        async def crowd() -> None:
            for _ in range(2 * MAX_OFFERS_OF_ONE):
                await store.open_link("stranger")

        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await crowd()
        error = from_rpc_error(refusal.value)
        assert isinstance(error, LinksFull)
        assert (refusal.value.code(), error.metadata) == (grpc.StatusCode.UNAVAILABLE, {"limit": "offers"})
        assert error.message == refusal.value.details()
        assert error.retry_after_s
