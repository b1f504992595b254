"""The LoRAs that a suite has, and how its store is given more of them. Knows gRPC, and nothing of pictures."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from bottega.errors import InvalidRequest, NoLora, Violation
from bottega.rpc.channel import open_channel
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import fleet_pb2, lora_pb2, lora_pb2_grpc
from bottega.v1.lora_pb2 import StoredLora

# An import reads all of a file, which of some GiB takes a while.
_ADD_S = 600.0
_ASK_S = 20.0
_PAGE = 500
_CHUNK_BYTES = 1 << 20
_PEFT_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A LoRA on this machine. adapter_config: what PEFT wrote beside it; empty where it did not."""

    path: Path
    adapter_config: bytes = b""


def lora_file(path: Path) -> LoraFile:
    """The LoRA at a path: a safetensors file, or a folder of PEFT or Diffusers.

    Raises InvalidRequest for what is none, OSError.
    """
    if not path.is_dir():
        config = path.with_name(_PEFT_CONFIG)
        beside = config.read_bytes() if path.name == _WEIGHTS[0] and config.is_file() else b""
        return LoraFile(path=path, adapter_config=beside)
    files = sorted(path.glob("*.safetensors"))
    named = [file for name in _WEIGHTS for file in files if file.name == name]
    if not named and len(files) != 1:
        rule = f"{path} holds none of {', '.join(_WEIGHTS)}, nor one .safetensors file alone"
        raise InvalidRequest(rule, violations=[Violation(field="path", description=rule)])
    return lora_file((named or files)[0])


class LoraStores:
    """The LoRA stores of a fleet; what is asked of them goes to the first."""

    def __init__(self, fleet: fleet_pb2.ListMembersResponse) -> None:
        self._stores = [m.registration for m in fleet.members if m.registration.kind == fleet_pb2.SERVICE_KIND_LORAS]

    async def all(self) -> tuple[StoredLora, ...]:
        """All LoRAs, by name. Raises NoLora where there is no store."""
        return tuple([lora async for lora in self._pages()])

    async def get(self, name: str) -> StoredLora:
        """Raises LoraNotFound."""
        async with self._asked() as store:
            return (await store.GetLora(lora_pb2.GetLoraRequest(name=name), timeout=_ASK_S)).lora

    async def add(self, name: str, path: Path, *, base: str | None, trigger_words: Sequence[str]) -> StoredLora:
        """Uploads a LoRA of this machine. base: absent where the store has one alone. Raises BadLora among others."""
        file = await asyncio.to_thread(lora_file, path)
        sha256 = await asyncio.to_thread(_sha256, file.path)
        head = lora_pb2.UploadLoraHead(
            name=name,
            base=await self._base(base),
            sha256=sha256,
            size_bytes=file.path.stat().st_size,
            adapter_config=file.adapter_config,
            trigger_words=trigger_words,
        )
        async with self._asked() as store:
            return (await store.UploadLora(_messages(head, file.path), timeout=_ADD_S)).lora

    async def register(self, name: str, path: str, *, base: str | None, trigger_words: Sequence[str]) -> StoredLora:
        """Has the store take in what is on its own machine."""
        request = lora_pb2.RegisterLoraRequest(
            name=name, base=await self._base(base), path=path, trigger_words=trigger_words
        )
        async with self._asked() as store:
            return (await store.RegisterLora(request, timeout=_ADD_S)).lora

    async def remove(self, name: str) -> None:
        """Raises LoraNotFound, LoraInUse."""
        async with self._asked() as store:
            await store.DeleteLora(lora_pb2.DeleteLoraRequest(name=name), timeout=_ASK_S)

    async def pin(self, name: str, pinned: bool) -> StoredLora:
        """Keeps it in memory, or no longer. Raises LoraNotFound."""
        async with self._asked() as store:
            return (await store.PinLora(lora_pb2.PinLoraRequest(name=name, pinned=pinned), timeout=_ASK_S)).lora

    async def note_bounds(self, name: str, digest: str, bounds: Mapping[int, int]) -> StoredLora:
        """Has it remember how late the LoRA may come, by number of steps; of other numbers it keeps what it knows.

        digest: of the weights that were measured. Raises LoraNotFound, also where it has other ones now.
        """
        async with self._asked() as store:
            known = (await store.GetLora(lora_pb2.GetLoraRequest(name=name), timeout=_ASK_S)).lora.bounds
            merged = {bound.num_inference_steps: bound.max_step for bound in known} | dict(bounds)
            request = lora_pb2.SetLoraProfileRequest(name=name, digest=digest)
            for steps, step in sorted(merged.items()):
                request.bounds.add(num_inference_steps=steps, max_step=step)
            return (await store.SetLoraProfile(request, timeout=_ASK_S)).lora

    async def _base(self, base: str | None) -> str:
        if base is not None:
            return base
        async with self._asked() as store:
            bases = (await store.ListLoras(lora_pb2.ListLorasRequest(page_size=1), timeout=_ASK_S)).bases
        if len(bases) != 1:
            rule = f"say which one: {', '.join(bases) or 'the store has none'}"
            raise InvalidRequest(f"base: {rule}", violations=[Violation(field="base", description=rule)])
        return bases[0]

    async def _pages(self) -> AsyncIterator[StoredLora]:
        token = ""
        while True:
            request = lora_pb2.ListLorasRequest(page_size=_PAGE, page_token=token)
            async with self._asked() as store:
                page = await store.ListLoras(request, timeout=_ASK_S)
            for lora in page.loras:
                yield lora
            token = page.next_page_token
            if not token:
                return

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[lora_pb2_grpc.LoraServiceAsyncStub]:
        """The first store. Raises NoLora where there is none, or it does not answer."""
        if not self._stores:
            raise NoLora("no LoRA store has joined; bottega fleet shows who has")
        store = self._stores[0]
        async with open_channel(store.address) as channel:
            try:
                yield lora_pb2_grpc.LoraServiceStub(channel)
            except grpc.aio.AioRpcError as error:
                if not was_answered(error):
                    raise NoLora(f"LoRA store {store.name} does not answer at {store.address}") from None
                raise from_rpc_error(error) from None


def _messages(head: lora_pb2.UploadLoraHead, path: Path) -> Iterator[lora_pb2.UploadLoraRequest]:
    yield lora_pb2.UploadLoraRequest(head=head)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield lora_pb2.UploadLoraRequest(chunk=chunk)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
