"""A scripted worker that has templates of edits in its memory, and measures its model's blocks."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.v1.activations_pb2 import (
    BlockProfile,
    DropTemplateRequest,
    DropTemplateResponse,
    ListTemplatesRequest,
    ListTemplatesResponse,
    ProfileBlocksRequest,
    ProfileBlocksResponse,
    Template,
)
from bottega.v1.fleet_pb2 import Registration
from tests.fakes.scripted_worker import MODEL, ScriptedWorker
from tests.support.running_gateway import Running

MIB = 1 << 20


class TemplatesWorker(ScriptedWorker):
    """Of its templates those in use stay when they are dropped."""

    held: dict[str, Template]
    budget_bytes: int = 512 * MIB
    uses: Sequence[str] = ()

    def registration(self) -> Registration:
        registration = super().registration()
        registration.uses.extend(self.uses)
        return registration

    async def ListTemplates(self, request: ListTemplatesRequest, context: object) -> ListTemplatesResponse:
        used = sum(template.size_bytes for template in self.held.values())
        return ListTemplatesResponse(templates=self.held.values(), used_bytes=used, budget_bytes=self.budget_bytes)

    async def DropTemplate(self, request: DropTemplateRequest, context: object) -> DropTemplateResponse:
        gone = [id for id, held in self.held.items() if id.startswith(request.id) and not held.in_use]
        for id in gone:
            del self.held[id]
        return DropTemplateResponse(dropped=len(gone))

    async def ProfileBlocks(self, request: ProfileBlocksRequest, context: object) -> ProfileBlocksResponse:
        return ProfileBlocksResponse(profile=block_profile(request.width or 64, request.height or 48))


async def joined(gateway: Running, name: str, *templates: Template) -> TemplatesWorker:
    """One of a gateway's fleet, which ends with it."""
    worker = TemplatesWorker(name, gateway.fleet_address)
    worker.held = {template.id: template for template in templates}
    gateway.workers.append(worker)
    await worker.start()
    return worker


def template(id: str, *, in_use: bool = False, recording: bool = False, valid_share: float = 1.0) -> Template:
    """As a worker describes one of 3 MiB."""
    return Template(
        id=id,
        model="miniature",
        width=64,
        height=48,
        size_bytes=3 * MIB,
        steps=30,
        uses=4,
        idle_s=90.0,
        in_use=in_use,
        recording=recording,
        valid_share=valid_share,
    )


def block_profile(width: int, height: int) -> BlockProfile:
    """Two blocks of a transformer that save 6 ms a MiB at a fifth, and a resnet that saves 1."""
    profile = BlockProfile(
        model_hash=MODEL.model_hash, dtype="float32", width=width, height=height, shares=[0.2], forward_s=0.030
    )
    for place in range(2):
        name = f"down_blocks.1.attentions.0.transformer_blocks.{place}"
        profile.blocks.add(name=name, size_bytes=MIB, full_s=0.008, masked_s=[0.002])
    profile.blocks.add(name="up_blocks.0.resnets.0", size_bytes=4 * MIB, full_s=0.006, masked_s=[0.002])
    return profile
