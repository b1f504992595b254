"""The gRPC service of a ControlNet server: it converts between messages and the server's types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from bottega import rules
from bottega.adapter_rules import check_residual_profile
from bottega.controlnet.server import ControlNetServer
from bottega.errors import Violation
from bottega.v1 import controlnet_pb2 as pb
from bottega.v1 import controlnet_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ControlNetService"].full_name

# The limit in controlnet.proto.
_MAX_NAMES = 256

_Context = grpc.aio.ServicerContext[Any, Any]


class ControlNetService(controlnet_pb2_grpc.ControlNetServiceServicer):
    """The servicer of bottega.v1.ControlNetService."""

    def __init__(self, server: ControlNetServer) -> None:
        self._server = server

    async def Prefetch(self, request: pb.PrefetchRequest, _context: _Context) -> pb.PrefetchResponse:
        """Load ControlNets before they are needed."""
        rules.refuse(list(_check_names(request)))
        names, unneeded = list(request.names), list(request.unneeded)
        accepted = self._server.prefetch(names, unneeded=unneeded, copies=request.copies, retry=request.retry)
        return pb.PrefetchResponse(accepted=accepted)

    async def ListControlNets(
        self, _request: pb.ListControlNetsRequest, _context: _Context
    ) -> pb.ListControlNetsResponse:
        """Return the hosted ControlNets."""
        server = self._server
        return pb.ListControlNetsResponse(
            controlnets=server.hosted,
            budget_bytes=server.budget_bytes,
            root=server.root,
            catalogue=server.shared_catalogue.identity if server.shared_catalogue else "",
        )

    async def AddControlNet(self, request: pb.AddControlNetRequest, _context: _Context) -> pb.AddControlNetResponse:
        """Host another ControlNet."""
        return pb.AddControlNetResponse(controlnet=await self._server.add(request.name, request.folder))

    async def SetProfile(self, request: pb.SetProfileRequest, _context: _Context) -> pb.SetProfileResponse:
        """Store a measured profile."""
        rules.refuse([*_check_name("name", request.name), *check_residual_profile("profile", request.profile)])
        hosted = await self._server.set_profile(request.name, request.digest, request.profile)
        return pb.SetProfileResponse(controlnet=hosted)

    async def PinControlNet(self, request: pb.PinControlNetRequest, _context: _Context) -> pb.PinControlNetResponse:
        """Pin or unpin a ControlNet."""
        rules.refuse(list(_check_name("name", request.name)))
        return pb.PinControlNetResponse(controlnet=await self._server.pin(request.name, pinned=request.pinned))


def _check_name(field: str, name: str) -> Iterator[Violation]:
    if not rules.is_adapter_name(name):
        yield Violation(field=field, description=f"must be {rules.ADAPTER_NAMES}")


def _check_names(request: pb.PrefetchRequest) -> Iterator[Violation]:
    for field, names in (("names", request.names), ("unneeded", request.unneeded)):
        if len(names) > _MAX_NAMES:
            yield Violation(field=field, description=f"must have at most {_MAX_NAMES} entries")
        for index, name in enumerate(names[:_MAX_NAMES]):
            yield from _check_name(f"{field}[{index}]", name)
