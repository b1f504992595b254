"""A LoRA's files on this machine, and how they are uploaded to a store."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bottega import rules
from bottega.client.addons.loras.stores import STORES
from bottega.client.transport.connection import service_channels
from bottega.client.types.messages import describe
from bottega.errors import Violation
from bottega.lora.canonical import COMPONENTS
from bottega.rpc.channel import Target
from bottega.v1.fleet_pb2 import Registration
from bottega.v1.lora_pb2 import StoredLora, UploadLoraHead, UploadLoraRequest
from bottega.v1.lora_pb2_grpc import LoraServiceStub

# An import reads all of a file, which of some GiB takes a while.
IMPORT_S = 600.0
_CHUNK_BYTES = 1 << 20
_PEFT_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")


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


def find_lora_files(path: Path) -> list[LocalLoraFile]:
    """The LoRA at a path: a safetensors file, or a folder of PEFT or Diffusers, which may have one for each component.

    Raises InvalidRequest for what is none, OSError.
    """
    if not path.is_dir():
        return [_lora_file(path)]
    files = sorted(path.glob("*.safetensors"))
    named = [file for name in _WEIGHTS for file in files if file.name == name]
    if named or len(files) == 1:
        return [_lora_file((named or files)[0])]
    parts = [component for component in COMPONENTS if (path / component).is_dir()]
    if not parts:
        folders = f"nor a folder of PEFT's for a component ({', '.join(COMPONENTS)})"
        _refuse_path(f"{path} holds none of {', '.join(_WEIGHTS)}, nor one .safetensors file alone, {folders}")
    return [_lora_file(path / component / _WEIGHTS[0], component) for component in parts]


def read_lora(path: object) -> tuple[list[LocalLoraFile], UploadLoraHead]:
    """The files of a LoRA, and what a store is told of them. Raises InvalidRequest for what cannot be read."""
    if not isinstance(path, str | os.PathLike):
        _refuse_path(f"must be the path of a file or a folder; got {describe(path)}")
    place = Path(cast("str | os.PathLike[str]", path))
    with _readable(place):
        files = find_lora_files(place)
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


def _lora_file(path: Path, component: str = "") -> LocalLoraFile:
    config = path.with_name(_PEFT_CONFIG)
    beside = config.read_bytes() if path.name == _WEIGHTS[0] and config.is_file() else b""
    if not (size_bytes := path.stat().st_size):
        _refuse_path(f"{path} is empty")
    return LocalLoraFile(path=path, size_bytes=size_bytes, adapter_config=beside, component=component)


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
