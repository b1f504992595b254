"""The gRPC service of the LoRA store: converts between LoraService's messages and the store's types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc

from bottega import rules
from bottega.errors import InvalidRequest, Violation
from bottega.loras.importer import ImportedLora, ImportRequest
from bottega.loras.quarantine import QuarantinedLora
from bottega.loras.records import CatalogueRecord
from bottega.loras.store import LoraStore
from bottega.loras.upload import Upload, UploadPart
from bottega.rpc.address import host_of
from bottega.v1 import lora_pb2 as pb
from bottega.v1 import lora_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["LoraService"].full_name

# Limits in lora.proto.
_MAX_DIGESTS = 256
_MAX_PAGE = 1000
_DEFAULT_PAGE = 100
_MAX_BOUNDS = 16
_MAX_NAME_CHARACTERS = 200

_STATES = {None: pb.LORA_STATE_ON_DISK, False: pb.LORA_STATE_LOADING, True: pb.LORA_STATE_IN_MEMORY}
_Context = grpc.aio.ServicerContext[Any, Any]


class LoraService(lora_pb2_grpc.LoraServiceServicer):
    """The servicer of bottega.v1.LoraService."""

    def __init__(self, store: LoraStore) -> None:
        self._store = store

    async def UploadLora(
        self, requests: AsyncIterator[pb.UploadLoraRequest], context: _Context
    ) -> pb.UploadLoraResponse:
        first = await anext(requests, pb.UploadLoraRequest())
        if not first.HasField("head"):
            rules.refuse([Violation(field="head", description="must be the first message")])
        head = first.head
        import_request = ImportRequest(
            name=head.name,
            base=head.base,
            trigger_words=tuple(head.trigger_words),
            base_model=head.base_model,
            allow_partial=head.allow_partial,
        )
        host = host_of(context.peer())
        imported = await self._store.importer.upload(import_request, _upload(head), _chunks(requests), host=host)
        return pb.UploadLoraResponse(lora=await self._imported(imported))

    async def RegisterLora(self, request: pb.RegisterLoraRequest, _context: _Context) -> pb.RegisterLoraResponse:
        import_request = ImportRequest(
            name=request.name,
            base=request.base,
            trigger_words=tuple(request.trigger_words),
            allow_partial=request.allow_partial,
        )
        return pb.RegisterLoraResponse(
            lora=await self._imported(await self._store.importer.register(import_request, request.path))
        )

    async def ListLoras(self, request: pb.ListLorasRequest, _context: _Context) -> pb.ListLorasResponse:
        rules.refuse(list(_check_page(request)))
        size = request.page_size or _DEFAULT_PAGE
        records = await self._store.catalogue.page(size=size + 1, after=request.page_token, base=request.base)
        shown = records[:size]
        return pb.ListLorasResponse(
            loras=[self._stored(record, record.ignored) for record in shown],
            next_page_token=shown[-1].name if len(records) > size else "",
            bases=sorted(self._store.bases),
            quarantined=len(self._store.recovery.quarantine),
            quarantined_bytes=self._store.recovery.quarantine.used_bytes,
        )

    async def GetLora(self, request: pb.GetLoraRequest, _context: _Context) -> pb.GetLoraResponse:
        _check_name(request.name)
        return pb.GetLoraResponse(lora=await self._whole(await self._store.catalogue.get(request.name)))

    async def DeleteLora(self, request: pb.DeleteLoraRequest, _context: _Context) -> pb.DeleteLoraResponse:
        _check_name(request.name)
        await self._store.remove(request.name)
        return pb.DeleteLoraResponse()

    async def PrefetchLoras(self, request: pb.PrefetchLorasRequest, _context: _Context) -> pb.PrefetchLorasResponse:
        rules.refuse(list(_check_digests(request.digests)))
        accepted = await self._store.prefetch(list(request.digests), only_keep=request.only_keep)
        return pb.PrefetchLorasResponse(accepted=accepted)

    async def PinLora(self, request: pb.PinLoraRequest, _context: _Context) -> pb.PinLoraResponse:
        _check_name(request.name)
        return pb.PinLoraResponse(lora=await self._whole(await self._store.pin(request.name, request.pinned)))

    async def SetLoraProfile(self, request: pb.SetLoraProfileRequest, _context: _Context) -> pb.SetLoraProfileResponse:
        _check_name(request.name)
        rules.refuse(list(_check_bounds(request.bounds)))
        bounds = tuple((bound.num_inference_steps, bound.max_step) for bound in request.bounds)
        record = await self._store.set_bounds(request.name, request.digest, bounds)
        return pb.SetLoraProfileResponse(lora=await self._whole(record))

    async def ListQuarantine(self, request: pb.ListQuarantineRequest, _context: _Context) -> pb.ListQuarantineResponse:
        rules.refuse(list(_check_page(request)))
        size = request.page_size or _DEFAULT_PAGE
        found = await self._store.recovery.page(size=size + 1, after=request.page_token)
        shown = found[:size]
        return pb.ListQuarantineResponse(
            loras=[_quarantined(lora) for lora in shown],
            next_page_token=shown[-1].id if len(found) > size else "",
            folder=self._store.recovery.quarantine.place,
        )

    async def RestoreLora(self, request: pb.RestoreLoraRequest, _context: _Context) -> pb.RestoreLoraResponse:
        restored = await self._store.restore(request.id, name=request.name, base=request.base)
        return pb.RestoreLoraResponse(lora=await self._whole(restored.record), unknown=restored.unknown)

    async def DiscardLora(self, request: pb.DiscardLoraRequest, _context: _Context) -> pb.DiscardLoraResponse:
        return pb.DiscardLoraResponse(freed_bytes=await self._store.recovery.discard(request.id))

    async def _imported(self, imported: ImportedLora) -> pb.StoredLora:
        lora = await self._whole(imported.record)
        lora.family, lora.note = imported.family, imported.note
        return lora

    async def _whole(self, record: CatalogueRecord) -> pb.StoredLora:
        """Return the message of a LoRA with all of its ignored layers."""
        return self._stored(record, await self._store.ignored(record))

    def _stored(self, record: CatalogueRecord, ignored: Sequence[str]) -> pb.StoredLora:
        return pb.StoredLora(
            name=record.name,
            digest=record.digest,
            base=record.base,
            rank=record.rank,
            modules=record.modules,
            size_bytes=record.size_bytes,
            text_bytes=record.text_bytes,
            trigger_words=record.trigger_words,
            format=record.format,
            bounds=[pb.LoraBound(num_inference_steps=steps, max_step=step) for steps, step in record.bounds],
            pinned=record.pinned,
            added_s=record.added_s,
            state=_STATES[self._store.state(record)],
            token=record.token,
            ignored=ignored,
        )


def _quarantined(found: QuarantinedLora) -> pb.QuarantinedLora:
    return pb.QuarantinedLora(
        id=found.id,
        digest=found.digest,
        name=found.record.name if found.record else "",
        base=found.record.base if found.record else "",
        size_bytes=found.size_bytes,
        since_s=found.since_s,
    )


def _upload(head: pb.UploadLoraHead) -> Upload:
    parts = (
        UploadPart(component=part.component, size_bytes=part.size_bytes, adapter_config=part.adapter_config)
        for part in head.parts
    )
    return Upload(
        sha256=head.sha256, size_bytes=head.size_bytes, adapter_config=head.adapter_config, parts=tuple(parts)
    )


async def _chunks(requests: AsyncIterator[pb.UploadLoraRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if request.WhichOneof("message") != "chunk":
            rule = "only chunks may follow the head"
            raise InvalidRequest(rule, violations=[Violation(field="chunk", description=rule)])
        yield request.chunk


def _check_name(name: str) -> None:
    if not rules.is_adapter_name(name):
        rules.refuse([Violation(field="name", description=f"must be {rules.ADAPTER_NAMES}")])


def _check_page(request: pb.ListLorasRequest | pb.ListQuarantineRequest) -> Iterator[Violation]:
    if not 0 <= request.page_size <= _MAX_PAGE:
        yield Violation(field="page_size", description=f"must be from 0 to {_MAX_PAGE}")
    for field in ("page_token", "base"):
        if len(getattr(request, field, "")) > _MAX_NAME_CHARACTERS:
            yield Violation(field=field, description=f"must be at most {_MAX_NAME_CHARACTERS} characters")


def _check_digests(digests: Sequence[str]) -> Iterator[Violation]:
    if len(digests) > _MAX_DIGESTS:
        yield Violation(field="digests", description=f"must have at most {_MAX_DIGESTS} entries")


def _check_bounds(bounds: Sequence[pb.LoraBound]) -> Iterator[Violation]:
    if len({bound.num_inference_steps for bound in bounds}) < len(bounds) or len(bounds) > _MAX_BOUNDS:
        yield Violation(
            field="bounds", description=f"must be at most {_MAX_BOUNDS}, each for a different number of steps"
        )
    for index, bound in enumerate(bounds[:_MAX_BOUNDS]):
        if not 1 <= bound.num_inference_steps <= rules.MAX_STEPS:
            yield Violation(field=f"bounds[{index}].num_inference_steps", description=f"must be 1 to {rules.MAX_STEPS}")
        if not 0 <= bound.max_step <= bound.num_inference_steps:
            yield Violation(field=f"bounds[{index}].max_step", description="must be from 0 to the number of steps")
