"""A LoRA store on a real gRPC server in the test's own event loop, and what its callers do: bring files, fetch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format

from bottega import kinds
from bottega.addons.loras.wire import canonical, messages
from bottega.errors import BottegaError
from bottega.loras.__main__ import build
from bottega.loras.config import ImportConfig, LoraConfig
from bottega.loras.importing import process
from bottega.loras.importing.import_processes import ImportProcesses
from bottega.loras.store import LoraStore
from bottega.process.process_pool import CallNeed, PreparedCall
from bottega.rpc.channel import open_channel
from bottega.rpc.server import Server
from bottega.rpc.server_config import LimitedLinksConfig, ServerConfig
from bottega.rpc.status import from_job_error, from_rpc_error
from bottega.transport import Deadline, Limits, Link, connect, kind_of, offer_from_wire, read_number
from bottega.v1 import link_pb2_grpc, lora_pb2_grpc
from bottega.v1 import lora_pb2 as pb
from bottega.v1.error_pb2 import JobError
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from bottega.v1.lora_import_pb2 import LoraImportCall
from tests.samples.lora_files import Part, kohya, peft, save

PATIENCE_S = 20.0
MODULE = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
TEXT_MODULE = "encoder.layers.0.self_attn.q_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A store that serves, and a stub to call it."""

    server: Server
    store: LoraStore
    stub: lora_pb2_grpc.LoraServiceAsyncStub
    links: link_pb2_grpc.LinkServiceAsyncStub

    async def call(self, method: str, **fields: Any) -> Any:
        """What LoraService answers to a request of these fields."""
        request = getattr(pb, f"{method}Request")(**fields)
        return await getattr(self.stub, method)(request, timeout=PATIENCE_S)

    async def upload(self, name: str, path: Path, **head: Any) -> pb.StoredLora:
        requests = upload_requests(name, await asyncio.to_thread(path.read_bytes), **head)
        response: pb.UploadLoraResponse = await self.stub.UploadLora(requests, timeout=PATIENCE_S)
        return response.lora

    async def open_link(self, worker: str = "w") -> LinkOffer:
        response = await self.links.OpenLink(OpenLinkRequest(kind=kinds.LORAS, worker=worker), timeout=PATIENCE_S)
        return response.offer

    async def link(self, worker: str = "w") -> Link:
        offer = offer_from_wire(await self.open_link(worker))
        limits = Limits(slots=2, slot_bytes=64 << 20)
        return await asyncio.to_thread(connect, offer, Deadline.after(PATIENCE_S), limits=limits)


class _ImportsInThread(ImportProcesses):
    """Imports as its processes do, without the time that Python takes to start in each, and without their limits."""

    async def call(self, prepare: Callable[[], Awaitable[PreparedCall]], *, need: CallNeed | None = None) -> bytes:
        call = LoraImportCall.FromString((await prepare()).frame)
        return (await asyncio.to_thread(process._answer, call)).SerializeToString()


def config(**overrides: object) -> LoraConfig:
    """Of a store on free ports that joins no fleet."""
    server = ServerConfig(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", drain_grace_s=2.0)
    settings = LoraConfig(gateway="", server=server, links=LimitedLinksConfig(socket=None), imports=ImportConfig())
    return replace(settings, **overrides)  # type: ignore[arg-type]  # the test's own names


@contextlib.asynccontextmanager
async def running(
    folder: Path, settings: LoraConfig | None = None, *, import_processes: bool = False
) -> AsyncIterator[Running]:
    """A store whose state is in that folder. import_processes: whether each LoRA is imported by a process of its own,
    as it is outside of tests; else by a thread of this one."""
    server, store = build(settings or config(), folder)
    if not import_processes:
        store.importer._processes = _ImportsInThread(at_once=1, deadline_s=PATIENCE_S, cpu_s=1)
    await server.start()
    channel = open_channel(server.address)
    try:
        await store.start()
        stub = lora_pb2_grpc.LoraServiceStub(channel)
        yield Running(server=server, store=store, stub=stub, links=link_pb2_grpc.LinkServiceStub(channel))
    finally:
        await channel.close()
        await server.stop()
        await store.stop()


def lora_file(folder: Path, *, seed: int = 0, rank: int = 2, text: bool = False) -> Path:
    """A small LoRA of the miniature, in kohya's naming."""
    parts = {("unet", MODULE): Part(rank=rank, alpha=1.0)}
    if text:
        parts["text_encoder", TEXT_MODULE] = Part(rank=rank, alpha=2.0)
    tensors, _ = kohya(parts, seed=seed)
    return save(tensors, folder / f"lora-{seed}-{rank}-{text}.safetensors")


def peft_folders(folder: Path) -> Path:
    """A LoRA of the miniature's UNet and a text encoder, in a folder of PEFT's for each."""
    peft({("unet", MODULE): Part(rank=2, alpha=1.0), ("text_encoder", TEXT_MODULE): Part(rank=3, alpha=6.0)}, folder)
    return folder


def upload_requests(
    name: str, data: bytes, *, chunk_bytes: int = 1 << 20, base: str = "miniature", **head: Any
) -> Iterator[pb.UploadLoraRequest]:
    given = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data), **head}
    yield pb.UploadLoraRequest(head=pb.UploadLoraHead(name=name, base=base, **given))
    for start in range(0, len(data), chunk_bytes):
        yield pb.UploadLoraRequest(chunk=data[start : start + chunk_bytes])


def fetch(link: Link, digest: str, number: int = 1) -> bytes:
    """The canonical file of a digest, over a link. Raises what the store refuses it with."""
    asked = messages.fetch_message(number, digest)
    link.send(asked.layout, asked.buffers, Deadline.after(PATIENCE_S))
    began = _head(link, number)
    if isinstance(began, bytes):
        return began
    head, text, denoiser_bytes = began
    # An empty section is a zero byte on the link: the file has none.
    data = head + (text if len(text) > 1 else b"")
    whole_bytes = len(data) + denoiser_bytes
    while len(data) < whole_bytes:
        with link.recv(Deadline.after(PATIENCE_S)) as incoming:
            incoming.wait_all(Deadline.after(PATIENCE_S))
            messages.check_piece(incoming.layout, max_bytes=whole_bytes - len(data))
            assert read_number(incoming.layout, [incoming.view(0)]) == number
            data += bytes(incoming.view(messages.PIECE))
    canonical.parse(head, file_bytes=len(data))
    return data


async def served(store: Running, digest: str) -> bool:
    """Whether a worker gets the LoRA with its digest. Raises what the store refuses it with."""
    with await store.link() as link:
        return hashlib.sha256(await asyncio.to_thread(fetch, link, digest)).hexdigest() == digest


def _head(link: Link, number: int) -> bytes | tuple[bytes, bytes, int]:
    """The whole file where it came with its message; else its head, its first section and the second one's size."""
    with link.recv(Deadline.after(PATIENCE_S)) as incoming:
        incoming.wait_all(Deadline.after(PATIENCE_S))
        views = [incoming.view(index) for index in range(len(incoming.layout.specs))]
        if kind_of(incoming.layout) == messages.LoraMessageKind.REFUSED:
            _, packed = messages.read_refusal(incoming.layout, views)
            raise from_job_error(json_format.Parse(packed, JobError()))
        assert read_number(incoming.layout, views) == number
        if kind_of(incoming.layout) == messages.LoraMessageKind.WHOLE:
            assert incoming.file is not None
            return bytes(incoming.file)
        denoiser_bytes = messages.read_denoiser_bytes(
            views[messages.DENOISER_BYTES], max_bytes=canonical.MAX_FILE_BYTES
        )
        return bytes(views[messages.HEADER]), bytes(views[messages.TEXT]), denoiser_bytes


async def refused(call: object) -> BottegaError:
    """The error of a call that fails."""
    try:
        await call  # type: ignore[misc]  # a call of grpc.aio
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was answered")
