"""The clients' methods about templates: the images of which workers have recorded what their edits can use again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bottega.client.addons.templates.workers import CALL_S, WORKERS, workers_of
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.blocking import blocking
from bottega.client.sdk.sync import GatewayClient
from bottega.client.types.messages import build_message
from bottega.errors import NoWorker
from bottega.v1.activations_pb2 import DropTemplateRequest, ListTemplatesRequest, Template
from bottega.v1.fleet_pb2 import Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplates:
    """What one worker has recorded, as the contract describes it, the one used last first.

    worker: its name in the fleet. used_bytes: of all its templates. budget_bytes: that they may take; 0 keeps none.
    """

    worker: str
    templates: tuple[Template, ...]
    used_bytes: int
    budget_bytes: int


class AsyncTemplateMethods(AsyncGatewayClient):
    """What AsyncClient offers about templates of edits. Every method raises NoWorker for a worker without an answer."""

    async def templates(self) -> tuple[WorkerTemplates, ...]:
        """What every worker has recorded of images that were edited, or kept for editing."""
        found = []
        for worker in await self._workers():
            async with WORKERS.open(worker) as stub:
                answer = await stub.ListTemplates(ListTemplatesRequest(), timeout=CALL_S)
            templates, used, budget = tuple(answer.templates), answer.used_bytes, answer.budget_bytes
            found.append(WorkerTemplates(worker=worker.name, templates=templates, used_bytes=used, budget_bytes=budget))
        return tuple(found)

    async def drop_templates(self, id: str = "") -> int:
        """Has every worker forget a template, or all; how many are gone. What an edit under way uses stays.

        id: 32 hexadecimal digits, or the first 8 or more of them, for all that begin so; empty drops all.
        """
        request = build_message(DropTemplateRequest(), id=id)
        dropped = 0
        for worker in await self._workers():
            async with WORKERS.open(worker) as stub:
                dropped += (await stub.DropTemplate(request, timeout=CALL_S)).dropped
        return dropped

    async def _workers(self) -> Sequence[Registration]:
        if not (workers := workers_of(await self.fleet())):
            raise NoWorker("no worker has joined")
        return workers


class TemplateMethods(GatewayClient):
    """What Client offers about templates of edits."""

    templates = blocking(AsyncTemplateMethods.templates)
    drop_templates = blocking(AsyncTemplateMethods.drop_templates)
