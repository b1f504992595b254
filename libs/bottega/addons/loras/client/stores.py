"""Calls to LoRA stores: finding the store of a LoRA, and uploading files of this machine."""

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
from bottega.addons.loras.wire.lora_files import MAX_CARD_BYTES, LoraFile, card_base_model, find_weights, model_card
from bottega.client.addons.addon import ServiceCalls
from bottega.client.transport.connection import service_channels
from bottega.client.types.fleet import FleetMember
from bottega.client.types.messages import build_message, describe
from bottega.errors import BadLora, LoraNotFound, NoLora, Violation
from bottega.rpc.channel import Target
from bottega.v1.lora_pb2 import GetLoraRequest, ListLorasRequest, StoredLora, UploadLoraHead, UploadLoraRequest
from bottega.v1.lora_pb2_grpc import LoraServiceStub

if TYPE_CHECKING:
    from bottega.v1.lora_pb2_grpc import LoraServiceAsyncStub

CALL_S = 20.0
STORES: ServiceCalls[LoraServiceAsyncStub] = ServiceCalls(
    kind=kinds.LORAS, title="LoRA store", stub=LoraServiceStub, unavailable=NoLora
)


def missing_lora(name: str) -> LoraNotFound:
    """Return the error for a name that no store has."""
    return LoraNotFound(f"no such LoRA: {name}", metadata={"loras": name})


async def find_lora(stores: Sequence[FleetMember], name: str) -> tuple[FleetMember, StoredLora]:
    """Return the first store that has the LoRA, and its description. Raise LoraNotFound if there is none."""
    request = build_message(GetLoraRequest(), name=name)
    store, answer = await STORES.call_owner(
        stores, lambda stub: stub.GetLora(request, timeout=CALL_S), missing=missing_lora(name)
    )
    return store, answer.lora


async def choose_store(stores: Sequence[FleetMember], name: str, base: str | None) -> tuple[FleetMember, str]:
    """Return the store and the base model for a new LoRA: the store that has the name, else one that has the base.

    Args:
        base: None if the stores have only one base model; InvalidRequest is raised if they have more.
    """
    bases = {store.name: await _bases(store) for store in stores}
    known = sorted(set().union(*bases.values()))
    if base is None and len(known) != 1:
        rule = f"name one of: {', '.join(known) or 'the store knows none'}"
        rules.refuse([Violation(field="base", description=rule)])
    base = known[0] if base is None else base
    if len(stores) > 1:
        with suppress(LoraNotFound):
            return (await find_lora(stores, name))[0], base
    return next((store for store in stores if base in bases[store.name]), stores[0]), base


async def _bases(store: FleetMember) -> Sequence[str]:
    async with STORES.open(store) as stub:
        return (await stub.ListLoras(ListLorasRequest(page_size=1), timeout=CALL_S)).bases


# An import reads the whole file, which takes a while for some GiB.
IMPORT_S = 600.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLoraFile:
    """A file of a LoRA on this machine."""

    path: Path
    size_bytes: int
    adapter_config: bytes = b""
    """PEFT's configuration file from the same folder; empty if there is none."""
    component: str = ""
    """The component of the base model that the file belongs to, such as unet; empty if that is not known."""


def read_lora(path: object) -> tuple[list[LocalLoraFile], UploadLoraHead]:
    """Return the files of a LoRA and the first message of their upload. Raise InvalidRequest if they cannot be read."""
    if not isinstance(path, str | os.PathLike):
        _refuse_path(f"must be the path of a file or a folder; got {describe(path)}")
    place = Path(cast("str | os.PathLike[str]", path))
    with _readable(place):
        files = [_lora_file(file) for file in _found(place)]
        head = _head(files, _sha256(files))
        with suppress(OSError), model_card(place).open("rb") as card:
            head.base_model = card_base_model(card.read(MAX_CARD_BYTES), file="" if place.is_dir() else place.name)
        return files, head


async def upload(store: FleetMember, head: UploadLoraHead, files: Sequence[LocalLoraFile]) -> StoredLora:
    """Send the files to a store, and return the imported LoRA.

    This uses gRPC's blocking call in a thread, because the one of asyncio loses the response of a server that refuses
    an upload before it has read everything.
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
    """Convert an OSError about reading the path, in the `with` block, to InvalidRequest."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no valid path"
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
    hashed = hashlib.sha256()
    for chunk in _chunks(files):
        hashed.update(chunk)
    return hashed.hexdigest()


def _chunks(files: Sequence[LocalLoraFile]) -> Iterator[bytes]:
    for file in files:
        with file.path.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                yield chunk
