"""What the doctor says of templates: which workers have some, and which keep none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from bottega.client.addons.templates.workers import WORKERS, workers_of
from bottega.client.types.checks import CheckResult, ok, warn
from bottega.errors import BottegaError
from bottega.v1.activations_pb2 import ListTemplatesRequest, ListTemplatesResponse
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration

_ANSWER_S = 5.0


def check_templates(fleet: ListMembersResponse) -> Iterator[CheckResult]:
    """Asks every worker. Not in an event loop."""
    for worker in workers_of(fleet):
        try:
            answer = asyncio.run(_ask(worker))
        except BottegaError as error:
            yield warn(f"{worker.name} does not say what it has recorded of edits: {error.message}", _MORE)
            continue
        if not answer.budget_bytes:
            yield warn(f"{worker.name} records nothing of edits, so all of them compute the whole picture", _BUDGET)
        elif answer.templates:
            count = len(answer.templates)
            yield ok(f"{worker.name} has recorded {count} template{'' if count == 1 else 's'} of edits")


_MORE = "bottega logs says more."
_BUDGET = "activations_mib, of the engine in its configuration, says how much memory recordings may take."


async def _ask(worker: Registration) -> ListTemplatesResponse:
    async with WORKERS.open(worker) as stub:
        return await stub.ListTemplates(ListTemplatesRequest(), timeout=_ANSWER_S)
