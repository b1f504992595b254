"""The gRPC service of the activation store: converts ActivationService's messages to calls of the store and back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from bottega import rules
from bottega.activations.profiles import check_profile
from bottega.activations.store.store import ActivationStore
from bottega.addons.interface.store_link import rank_stores
from bottega.errors import Violation
from bottega.v1 import activations_pb2 as pb
from bottega.v1 import activations_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ActivationService"].full_name

# The limits in activations.proto.
_DEFAULT_LIMIT = 100
_MAX_LIMIT = 1000
_MAX_SOURCES = _MAX_STORES = 64
_ID = re.compile(r"[0-9a-f]{8,32}")
_Context = grpc.aio.ServicerContext[Any, Any]


class ActivationService(activations_pb2_grpc.ActivationServiceServicer):
    """The servicer of bottega.v1.ActivationService. `holder` is the store's name in the fleet."""

    def __init__(self, store: ActivationStore, *, holder: str) -> None:
        self._store = store
        self._holder = holder

    async def ListStoredTemplates(
        self, request: pb.ListStoredTemplatesRequest, _context: _Context
    ) -> pb.ListStoredTemplatesResponse:
        """List templates, most recently used first."""
        rules.refuse(list(_check_limit(request.limit)))
        return await asyncio.to_thread(self._list, request.limit or _DEFAULT_LIMIT)

    async def DropStoredTemplate(
        self, request: pb.DropStoredTemplateRequest, _context: _Context
    ) -> pb.DropStoredTemplateResponse:
        """Delete the templates whose IDs begin with a prefix."""
        rules.refuse(list(_check_id(request.id)))
        return pb.DropStoredTemplateResponse(dropped=await asyncio.to_thread(self._store.drop, request.id))

    async def PinTemplate(self, request: pb.PinTemplateRequest, _context: _Context) -> pb.PinTemplateResponse:
        """Pin templates so that they are not evicted, or unpin them."""
        rules.refuse(list(_check_id(request.id, may_be_empty=False)))
        pinned = await asyncio.to_thread(self._store.pin, request.id, request.pinned)
        return pb.PinTemplateResponse(templates=pinned)

    async def WarmTemplate(self, request: pb.WarmTemplateRequest, _context: _Context) -> pb.WarmTemplateResponse:
        """Start to load templates into memory."""
        rules.refuse(list(_check_id(request.id)))
        return await asyncio.to_thread(self._store.warm, request.id)

    async def PrefetchTemplates(
        self, request: pb.PrefetchTemplatesRequest, _context: _Context
    ) -> pb.PrefetchTemplatesResponse:
        """Start to load the templates of upcoming edits into memory."""
        rules.refuse([*_check_sources(request.sources), *_check_stores(request)])
        templates = await asyncio.to_thread(
            self._store.prefetch, list(request.sources), self._ownership(request.stores)
        )
        return pb.PrefetchTemplatesResponse(templates=templates, disk_bytes_per_s=self._store.disk_bytes_per_s)

    def _ownership(self, stores: Sequence[str]) -> Callable[[str], bool]:
        """Return a function that tells whether a template, given by its key, belongs to this one of several stores."""
        names = {*stores, self._holder}
        return lambda key: not stores or rank_stores(names, key)[0] == self._holder

    async def ListBlockProfiles(
        self, _request: pb.ListBlockProfilesRequest, _context: _Context
    ) -> pb.ListBlockProfilesResponse:
        """List the block profiles."""
        return pb.ListBlockProfilesResponse(profiles=await asyncio.to_thread(self._store.profiles))

    async def SetBlockProfile(
        self, request: pb.SetBlockProfileRequest, _context: _Context
    ) -> pb.SetBlockProfileResponse:
        """Set or delete a block profile."""
        rules.refuse(list(check_profile(request.profile)))
        await asyncio.to_thread(self._store.set_profile, request.profile)
        return pb.SetBlockProfileResponse()

    def _list(self, limit: int) -> pb.ListStoredTemplatesResponse:
        figures = self._store.statistics()
        templates = self._store.templates(limit)
        for template in templates:
            template.holder = self._holder
        return pb.ListStoredTemplatesResponse(
            templates=templates,
            total=figures.templates + (figures.shared.alone if figures.shared is not None else 0),
            used_bytes=figures.disk_bytes,
            budget_bytes=figures.disk_budget_bytes,
            memory_bytes=figures.memory_bytes,
            memory_budget_bytes=figures.memory_budget_bytes,
            trouble=figures.trouble,
            template_budget_bytes=figures.template_budget_bytes,
            objects_bytes=figures.shared.size_bytes if figures.shared is not None else 0,
            objects_budget_bytes=figures.shared.budget_bytes if figures.shared is not None else 0,
            objects_trouble=figures.shared_trouble,
        )


def _check_id(template: str, *, may_be_empty: bool = True) -> Iterator[Violation]:
    if (template or not may_be_empty) and _ID.fullmatch(template) is None:
        empty = "empty, or " if may_be_empty else ""
        yield Violation(field="id", description=f"must be {empty}the first 8 to 32 hex digits of a template's ID")


def _check_limit(limit: int) -> Iterator[Violation]:
    if not 0 <= limit <= _MAX_LIMIT:
        yield Violation(field="limit", description=f"must be from 0 to {_MAX_LIMIT}")


def _check_sources(sources: Sequence[str]) -> Iterator[Violation]:
    if len(sources) > _MAX_SOURCES:
        yield Violation(field="sources", description=f"must have at most {_MAX_SOURCES} entries")
    for index, source in enumerate(sources[:_MAX_SOURCES]):
        if not rules.is_digest(source):
            yield Violation(field=f"sources[{index}]", description="must be 64 hex digits, in lower case")


def _check_stores(request: pb.PrefetchTemplatesRequest) -> Iterator[Violation]:
    if len(request.stores) > _MAX_STORES:
        yield Violation(field="stores", description=f"must have at most {_MAX_STORES} entries")
