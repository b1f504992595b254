"""The LoRAs that a suite has, and how its store is given more of them. Knows gRPC, and nothing of pictures."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from bottega import rules
from bottega.client.types.messages import filled, shown
from bottega.errors import BottegaError, InternalError, LoraNotFound, NoLora, Violation
from bottega.lora.canonical import COMPONENTS
from bottega.rpc.channel import channel_options, open_channel
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import fleet_pb2, lora_pb2, lora_pb2_grpc
from bottega.v1.fleet_pb2 import Registration
from bottega.v1.lora_pb2 import StoredLora

# An import reads all of a file, which of some GiB takes a while.
_ADD_S = 600.0
_ASK_S = 20.0
_PAGE = 500
_MOST_PAGES = 200
_CHUNK_BYTES = 1 << 20
_PEFT_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A LoRA's file on this machine, or one of its files.

    adapter_config: what PEFT wrote beside it; empty where it did not. component: of the base model, all of the file is
    for that one; empty where that is not known.
    """

    path: Path
    size_bytes: int
    adapter_config: bytes = b""
    component: str = ""


def lora_files(path: Path) -> list[LoraFile]:
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


def _lora_file(path: Path, component: str = "") -> LoraFile:
    config = path.with_name(_PEFT_CONFIG)
    beside = config.read_bytes() if path.name == _WEIGHTS[0] and config.is_file() else b""
    if not (size_bytes := path.stat().st_size):
        _refuse_path(f"{path} is empty")
    return LoraFile(path=path, size_bytes=size_bytes, adapter_config=beside, component=component)


def _refuse_path(rule: str) -> None:
    rules.refuse([Violation(field="path", description=rule)])


class LoraStores:
    """The LoRA stores of a fleet, in the gateway's order: of several that have a name, the first counts."""

    def __init__(self, fleet: fleet_pb2.ListMembersResponse) -> None:
        here = [member for member in fleet.members if member.registration.kind == fleet_pb2.SERVICE_KIND_LORAS]
        self._stores = [member.registration for member in sorted(here, key=lambda member: member.load.draining)]

    async def all(self) -> tuple[StoredLora, ...]:
        """All LoRAs, by name. Raises NoLora where there is no store, or one does not answer."""
        found: dict[str, StoredLora] = {}
        for store in self.here():
            async for page in _pages(store):
                for lora in page.loras:
                    found.setdefault(lora.name, lora)
        return tuple(found[name] for name in sorted(found))

    async def get(self, name: str) -> StoredLora:
        """Raises LoraNotFound."""
        _, lora = await self._find(name)
        return lora

    async def add(self, name: str, path: Path, *, base: str | None, trigger_words: Sequence[str]) -> StoredLora:
        """Uploads a LoRA of this machine. base: absent where the stores have one alone. Raises BadLora among others."""
        filled(lora_pb2.UploadLoraHead(), name=name, trigger_words=trigger_words)  # before anything is read
        files, head = await asyncio.to_thread(_read, _path(path))
        place, base = await self._place(name, base)
        filled(head, name=name, base=base, trigger_words=trigger_words)
        with _typed(place):
            return (await _uploaded(place.address, _messages(head, files))).lora

    async def register(self, name: str, path: str, *, base: str | None, trigger_words: Sequence[str]) -> StoredLora:
        """Has a store take in what is on its own machine."""
        request = filled(lora_pb2.RegisterLoraRequest(), name=name, path=path, trigger_words=trigger_words)
        place, base = await self._place(name, base)
        filled(request, base=base)
        async with asked(place) as store:
            return (await store.RegisterLora(request, timeout=_ADD_S)).lora

    async def remove(self, name: str) -> None:
        """Raises LoraNotFound, LoraInUse."""
        place, _ = await self._find(name)
        async with asked(place) as store:
            await store.DeleteLora(lora_pb2.DeleteLoraRequest(name=name), timeout=_ASK_S)

    async def pin(self, name: str, pinned: bool) -> StoredLora:
        """Keeps it in memory, or no longer. Raises LoraNotFound."""
        request = filled(lora_pb2.PinLoraRequest(), name=name, pinned=pinned)
        place, _ = await self._find(name)
        async with asked(place) as store:
            return (await store.PinLora(request, timeout=_ASK_S)).lora

    async def note_bounds(self, name: str, digest: str, bounds: Mapping[int, int]) -> StoredLora:
        """Has its store remember how late it may come, by number of steps; of others it keeps what it knows.

        digest: of the weights that were measured. Raises LoraNotFound, also where it has other ones now.
        """
        place, known = await self._find(name)
        merged = {bound.num_inference_steps: bound.max_step for bound in known.bounds} | dict(bounds)
        request = lora_pb2.SetLoraProfileRequest(name=name, digest=digest)
        for steps, step in sorted(merged.items()):
            request.bounds.add(num_inference_steps=steps, max_step=step)
        async with asked(place) as store:
            return (await store.SetLoraProfile(request, timeout=_ASK_S)).lora

    async def _find(self, name: str) -> tuple[Registration, StoredLora]:
        """The store that has it, and what it has. Raises LoraNotFound, NoLora where one that may have it is silent."""
        request = filled(lora_pb2.GetLoraRequest(), name=name)
        failure: BottegaError = LoraNotFound(f"no such LoRA: {name}", metadata={"loras": name})
        for store in self.here():
            try:
                async with asked(store) as stub:
                    return store, (await stub.GetLora(request, timeout=_ASK_S)).lora
            except LoraNotFound:
                continue
            except NoLora as error:
                failure = error
        raise failure

    async def _place(self, name: str, base: str | None) -> tuple[Registration, str]:
        """Where one of that name belongs, and its base: where the name is already, else where the base is known."""
        bases = {store.name: await _bases(store) for store in self.here()}
        known = sorted({each for of in bases.values() for each in of})
        if base is None and len(known) != 1:
            rule = f"say which one: {', '.join(known) or 'the store has none'}"
            rules.refuse([Violation(field="base", description=rule)])
        base = known[0] if base is None else base
        if len(self._stores) > 1:
            with suppress(LoraNotFound):
                return (await self._find(name))[0], base
        return next((store for store in self._stores if base in bases[store.name]), self._stores[0]), base

    def here(self) -> Sequence[Registration]:
        """The stores. Raises NoLora where there is none."""
        if not self._stores:
            raise NoLora("no LoRA store has joined; bottega fleet shows who has")
        return self._stores


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        _refuse_path(f"must be the path of a file or a folder; got {shown(path)}")
    return Path(cast("str | os.PathLike[str]", path))


def _read(path: Path) -> tuple[list[LoraFile], lora_pb2.UploadLoraHead]:
    """The files of a LoRA, and what is said of them. Raises InvalidRequest for one that cannot be read."""
    with _reading(path):
        files = lora_files(path)
        head = _head(files, _sha256(files))
    return files, head


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises InvalidRequest where the block cannot read it."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is no path"
        _refuse_path(f"{getattr(error, 'filename', None) or path} cannot be read: {why}")


async def _bases(store: Registration) -> Sequence[str]:
    async with asked(store) as stub:
        return (await stub.ListLoras(lora_pb2.ListLorasRequest(page_size=1), timeout=_ASK_S)).bases


async def _pages(store: Registration) -> AsyncIterator[lora_pb2.ListLorasResponse]:
    async with asked(store) as stub:
        page = await stub.ListLoras(lora_pb2.ListLorasRequest(page_size=_PAGE), timeout=_ASK_S)
        yield page
        for _ in range(_MOST_PAGES):
            if not (token := page.next_page_token):
                return
            request = lora_pb2.ListLorasRequest(page_size=_PAGE, page_token=token)
            page = await stub.ListLoras(request, timeout=_ASK_S)
            yield page
    raise InternalError(
        f"LoRA store {store.name} lists more than {_MOST_PAGES * _PAGE} LoRAs, or does not come to an end"
    )


@asynccontextmanager
async def asked(store: Registration) -> AsyncIterator[lora_pb2_grpc.LoraServiceAsyncStub]:
    """Calls to one store. Raises as `_typed`."""
    async with open_channel(store.address) as channel:
        with _typed(store):
            yield lora_pb2_grpc.LoraServiceStub(channel)


@contextmanager
def _typed(store: Registration) -> Iterator[None]:
    """Raises NoLora where the store does not answer, else what it says; metadata "service" says that it was a store."""
    try:
        yield
    except grpc.RpcError as error:
        if not was_answered(error):
            raise NoLora(f"LoRA store {store.name} does not answer at {store.address}") from None
        failure = from_rpc_error(error)
        failure.metadata["service"] = "loras"
        raise failure from None


async def _uploaded(address: str, messages: Iterator[lora_pb2.UploadLoraRequest]) -> lora_pb2.UploadLoraResponse:
    """The answer of a store. The call is gRPC's blocking one, in its own threads: that of asyncio loses what a server
    says that refuses before it has heard everything. Raises grpc.RpcError."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end(_: object) -> None:
        loop.call_soon_threadsafe(ended.set)

    with grpc.insecure_channel(address, options=channel_options()) as channel:
        call = lora_pb2_grpc.LoraServiceStub(channel).UploadLora.future(messages, timeout=_ADD_S)
        call.add_done_callback(end)
        try:
            await ended.wait()
        finally:
            call.cancel()
        return call.result()


def _head(files: Sequence[LoraFile], sha256: str) -> lora_pb2.UploadLoraHead:
    head = lora_pb2.UploadLoraHead(sha256=sha256, size_bytes=sum(file.size_bytes for file in files))
    if not files[0].component:
        head.adapter_config = files[0].adapter_config
        return head
    for file in files:
        head.parts.add(component=file.component, size_bytes=file.size_bytes, adapter_config=file.adapter_config)
    return head


def _messages(head: lora_pb2.UploadLoraHead, files: Sequence[LoraFile]) -> Iterator[lora_pb2.UploadLoraRequest]:
    yield lora_pb2.UploadLoraRequest(head=head)
    for each in files:
        with each.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield lora_pb2.UploadLoraRequest(chunk=chunk)


def _sha256(files: Sequence[LoraFile]) -> str:
    """Of all their bytes, one file after the other."""
    hashed = hashlib.sha256()
    for each in files:
        with each.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hashed.update(chunk)
    return hashed.hexdigest()
