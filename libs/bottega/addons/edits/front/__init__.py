"""Edits in the front process of a worker: RPCs about templates, and the used recordings in pictures' parameters."""

from __future__ import annotations

import re
from typing import Any

import grpc

from bottega import kinds, rules
from bottega.addons.edits.wire.messages import taken_from
from bottega.addons.interface.front_addon import Ask, FrontAddOn
from bottega.errors import Violation
from bottega.rpc.server import Server
from bottega.rules import computes_part
from bottega.v1 import activations_pb2 as pb
from bottega.v1.activations_pb2_grpc import TemplateServiceServicer, add_TemplateServiceServicer_to_server
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest

_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TemplateService"].full_name

# Seconds that the engine may take. Templates are listed between two turns, and those of a large model take a while; a
# profile takes some tens of forwards, however slow the device is.
_TEMPLATES_S = 60.0
_PROFILE_S = 600.0

_TEMPLATE_ID = re.compile("([0-9a-f]{8,32})?")

_Context = grpc.aio.ServicerContext[Any, Any]


class EditsFront(FrontAddOn):
    """The FrontAddOn for edits."""

    kind = kinds.ACTIVATIONS

    def add_rpcs(self, server: Server, ask: Ask) -> None:
        add_TemplateServiceServicer_to_server(TemplateService(ask), server.grpc)
        server.add_services([_SERVICE_NAME])

    def pin(self, spec: GenerationSpec, index: int | None, request: RunAttemptRequest, decision: bytes | None) -> None:
        """Write into a picture's parameters which recording the edit reused, or that it reused none."""
        if index is not None:
            pin_edit(spec, taken_from(pb.EditDecision.FromString(decision or b"")))


class TemplateService(TemplateServiceServicer):
    """The servicer of bottega.v1.TemplateService, which checks requests and passes them to the engine's add-on.

    Args:
        ask: Sends a query to the engine's add-on for edits.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def ListTemplates(self, request: pb.ListTemplatesRequest, context: _Context) -> pb.ListTemplatesResponse:
        answer = await self._answer(pb.TemplateCall(list=request), _TEMPLATES_S)
        return pb.ListTemplatesResponse.FromString(answer)

    async def DropTemplate(self, request: pb.DropTemplateRequest, context: _Context) -> pb.DropTemplateResponse:
        if not _TEMPLATE_ID.fullmatch(request.id):
            rule = "must be empty, or the first 8 to 32 hex digits of an id"
            rules.refuse([Violation(field="id", description=rule)])
        answer = await self._answer(pb.TemplateCall(drop=request), _TEMPLATES_S)
        return pb.DropTemplateResponse.FromString(answer)

    async def ProfileBlocks(self, request: pb.ProfileBlocksRequest, context: _Context) -> pb.ProfileBlocksResponse:
        """Serve ProfileBlocks. The engine checks whether the model can draw the size."""
        rules.refuse(
            [
                Violation(field=field, description=f"must be 0, or 1 to {rules.MAX_SIDE} pixels")
                for field, side in (("width", request.width), ("height", request.height))
                if not 0 <= side <= rules.MAX_SIDE
            ]
        )
        answer = await self._answer(pb.TemplateCall(profile=request), _PROFILE_S)
        return pb.ProfileBlocksResponse.FromString(answer)

    async def _answer(self, call: pb.TemplateCall, timeout_s: float) -> bytes:
        return await self._ask(call.SerializeToString(), timeout_s)


def pin_edit(spec: GenerationSpec, recording: str) -> None:
    """Write the recording that an edit reused into its parameters, so that a repetition is exact or refused.

    An edit that reused nothing is exact, so its repetition must not use recordings. A repetition of an edit that reused
    a recording is refused. The spec of an edit that cannot reuse recordings stays unchanged.

    Args:
        recording: See `taken_from`.
    """
    if not computes_part(spec):
        return
    if recording:
        spec.techniques.recording = recording
    else:
        spec.techniques.masked_blocks = False
