"""A LoRA's files on this machine, and how they are uploaded to a store."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bottega import kinds, rules
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.transport.connection import service_channels
from bottega.client.types.messages import build_message, describe
from bottega.errors import BadLora, LoraNotFound, NoLora, Violation
from bottega.lora.weights_files import LoraFile, find_weights
from bottega.rpc.channel import Target
from bottega.v1.fleet_pb2 import Registration
from bottega.v1.lora_pb2 import GetLoraRequest, ListLorasRequest, StoredLora, UploadLoraHead, UploadLoraRequest
from bottega.v1.lora_pb2_grpc import LoraServiceStub

if TYPE_CHECKING:
    from bottega.v1.lora_pb2_grpc import LoraServiceAsyncStub

CALL_S = 20.0
STORES: ServiceCalls[LoraServiceAsyncStub] = ServiceCalls(
    kind=kinds.LORAS, title="LoRA store", stub=LoraServiceStub, unavailable=NoLora
)


def missing_lora(name: str) -> LoraNotFound:
    """What is raised where no store has it."""
    return LoraNotFound(f"no such LoRA: {name}", metadata={"loras": name})


async def find_lora(stores: Sequence[Registration], name: str) -> tuple[Registration, StoredLora]:
    """The store that has the LoRA, and what it says of it. Raises LoraNotFound, NoLora."""
    request = build_message(GetLoraRequest(), name=name)
    store, answer = await STORES.call_owner(
        stores, lambda stub: stub.GetLora(request, timeout=CALL_S), missing=missing_lora(name)
    )
    return store, answer.lora


async def choose_store(stores: Sequence[Registration], name: str, base: str | None) -> tuple[Registration, str]:
    """Where a LoRA of that name belongs, and its base: the store that has the name, else one that knows the base.

    base: absent where the stores know one alone; else InvalidRequest is raised.
    """
    bases = {store.name: await _bases(store) for store in stores}
    known = sorted({each for of_store in bases.values() for each in of_store})
    if base is None and len(known) != 1:
        rule = f"say which one: {', '.join(known) or 'the store has none'}"
        rules.refuse([Violation(field="base", description=rule)])
    base = known[0] if base is None else base
    if len(stores) > 1:
        with suppress(LoraNotFound):
            return (await find_lora(stores, name))[0], base
    return next((store for store in stores if base in bases[store.name]), stores[0]), base


async def _bases(store: Registration) -> Sequence[str]:
    async with STORES.open(store) as stub:
        return (await stub.ListLoras(ListLorasRequest(page_size=1), timeout=CALL_S)).bases


# An import reads all of a file, which of some GiB takes a while.
IMPORT_S = 600.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLoraFile:
    """A LoRA's file on this machine, or one of its files.

    adapter_config: what PEFT wrote beside it; empty where it did not. component: of the base model, all of the file is
    for that one; empty where that is not known.
    """

    path: Path
    size_bytes: int
    adapter_config: bytes = b""
    component: str = ""


def read_lora(path: object) -> tuple[list[LocalLoraFile], UploadLoraHead]:
    """The files of a LoRA, and what a store is told of them. Raises InvalidRequest for what cannot be read."""
    if not isinstance(path, str | os.PathLike):
        _refuse_path(f"must be the path of a file or a folder; got {describe(path)}")
    place = Path(cast("str | os.PathLike[str]", path))
    with _readable(place):
        files = [_lora_file(file) for file in _found(place)]
        return files, _head(files, _sha256(files))


async def upload(store: Registration, head: UploadLoraHead, files: Sequence[LocalLoraFile]) -> StoredLora:
    """Sends the files, and returns what the store made of them.

    The call is gRPC's blocking one, in its own threads: that of asyncio loses what a server says that refuses before
    it has read everything.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end(_: object) -> None:
        loop.call_soon_threadsafe(ended.set)

    target = Target(address=store.address, role=store.kind, name=store.name)
    with STORES.errors(store), service_channels().open_blocking(target) as channel:
        call = LoraServiceStub(channel).UploadLora.future(_messages(head, files), timeout=IMPORT_S)
        call.add_done_callback(end)
        try:
            await ended.wait()
        finally:
            call.cancel()
        return call.result().lora


def _found(path: Path) -> list[LoraFile]:
    try:
        return find_weights(path)
    except BadLora as error:
        rules.refuse([Violation(field="path", description=error.message)])
        raise


def _lora_file(file: LoraFile) -> LocalLoraFile:
    if not (size_bytes := file.path.stat().st_size):
        _refuse_path(f"{file.path} is empty")
    beside = file.config.read_bytes() if file.config is not None else b""
    return LocalLoraFile(path=file.path, size_bytes=size_bytes, adapter_config=beside, component=file.component or "")


def _refuse_path(rule: str) -> None:
    rules.refuse([Violation(field="path", description=rule)])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises InvalidRequest where the block cannot read it."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is no path"
        _refuse_path(f"{getattr(error, 'filename', None) or path} cannot be read: {why}")


def _head(files: Sequence[LocalLoraFile], sha256: str) -> UploadLoraHead:
    head = UploadLoraHead(sha256=sha256, size_bytes=sum(file.size_bytes for file in files))
    if not files[0].component:
        head.adapter_config = files[0].adapter_config
        return head
    for file in files:
        head.parts.add(component=file.component, size_bytes=file.size_bytes, adapter_config=file.adapter_config)
    return head


def _messages(head: UploadLoraHead, files: Sequence[LocalLoraFile]) -> Iterator[UploadLoraRequest]:
    yield UploadLoraRequest(head=head)
    for chunk in _chunks(files):
        yield UploadLoraRequest(chunk=chunk)


def _sha256(files: Sequence[LocalLoraFile]) -> str:
    """Of all their bytes, one file after the other."""
    hashed = hashlib.sha256()
    for chunk in _chunks(files):
        hashed.update(chunk)
    return hashed.hexdigest()


def _chunks(files: Sequence[LocalLoraFile]) -> Iterator[bytes]:
    for each in files:
        with each.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
