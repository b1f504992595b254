"""The SDK, the command and the doctor with templates of edits, against a real gateway with scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import Result

from bottega.client import AsyncClient
from bottega.client.addons.templates.addon import ADD_ON
from bottega.client.types.checks import CheckResult, Level
from bottega.errors import MethodNotServed, NoWorker
from bottega.v1.activations_pb2 import (
    DropTemplateRequest,
    DropTemplateResponse,
    ListTemplatesRequest,
    ListTemplatesResponse,
    Template,
)
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_gateway import Running, running_gateway
from tests.support.terminal import run_at

STAR, RING = "5a" * 16, "5b" * 16
MIB = 1 << 20


class RecordingWorker(ScriptedWorker):
    """A worker that has templates, of which those in use stay."""

    held: dict[str, Template]
    budget_bytes: int = 512 * MIB

    async def ListTemplates(
        self,
        request: ListTemplatesRequest,
        context: object,
    ) -> ListTemplatesResponse:
        used = sum(template.size_bytes for template in self.held.values())
        return ListTemplatesResponse(templates=self.held.values(), used_bytes=used, budget_bytes=self.budget_bytes)

    async def DropTemplate(self, request: DropTemplateRequest, context: object) -> DropTemplateResponse:
        gone = [id for id, held in self.held.items() if id.startswith(request.id) and not held.in_use]
        for id in gone:
            del self.held[id]
        return DropTemplateResponse(dropped=len(gone))


class OldWorker(ScriptedWorker):
    """A worker of a version that has no templates."""

    async def ListTemplates(
        self,
        request: ListTemplatesRequest,
        context: object,
    ) -> ListTemplatesResponse:
        raise MethodNotServed("there is no such method")

    async def DropTemplate(
        self,
        request: DropTemplateRequest,
        context: object,
    ) -> DropTemplateResponse:
        raise MethodNotServed("there is no such method")


@pytest.fixture
async def gateway(own_folder: Path) -> AsyncIterator[Running]:
    async with running_gateway() as made:
        yield made


async def joined(gateway: Running, name: str, *templates: Template) -> RecordingWorker:
    worker = RecordingWorker(name, gateway.fleet_address)
    worker.held = {template.id: template for template in templates}
    gateway.workers.append(worker)
    await worker.start()
    return worker


async def old(gateway: Running, name: str) -> None:
    worker = OldWorker(name, gateway.fleet_address)
    gateway.workers.append(worker)
    await worker.start()


def template(id: str, *, in_use: bool = False, recording: bool = False, valid_share: float = 1.0) -> Template:
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


async def _run(gateway: Running, *said: object) -> Result:
    return await run_at(gateway, "templates", *said)


async def test_templates_of_all_workers_are_listed(gateway: Running) -> None:
    await joined(gateway, "w1", template(STAR, valid_share=0.75), template(RING, in_use=True, recording=True))
    await joined(gateway, "w2", template(STAR))
    result = await _run(gateway)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    facts = ["miniature", "64x48", "30", "3.00", "MiB", "4", "2", "min", "ago"]
    assert [STAR[:12], "w1", *facts, "75", "%", "of", "the", "image"] in rows
    assert [RING[:12], "w1", *facts, "being", "recorded,", "in", "use"] in rows
    assert [STAR[:12], "w2", *facts] in rows
    assert "w1: 6.00 MiB of 512 MiB; w2: 3.00 MiB of 512 MiB" in result.stdout


async def test_what_is_dropped_is_gone_from_all_workers(gateway: Running) -> None:
    first = await joined(gateway, "w1", template(STAR), template(RING, in_use=True))
    second = await joined(gateway, "w2", template(STAR))
    result = await _run(gateway, "drop", STAR[:12])
    assert (result.exit_code, result.stdout) == (0, "2 templates dropped\n")
    assert (list(first.held), list(second.held)) == ([RING], [])
    used = await _run(gateway, "drop", RING[:12])
    assert (used.exit_code, "is used by an edit now" in used.stderr) == (1, True)
    missing = await _run(gateway, "drop", STAR[:12])
    assert (missing.exit_code, f"no worker has the template {STAR[:12]}" in missing.stderr) == (1, True)
    first.held[RING].in_use = False
    assert (await _run(gateway, "drop", "--all", "--yes")).stdout == "1 template dropped\n"


async def test_dropping_asks_which_and_whether(gateway: Running) -> None:
    worker = await joined(gateway, "w1", template(STAR))
    for said in ((), (STAR, "--all")):
        assert "say which" in (await _run(gateway, "drop", *said)).stderr
    assert (await _run(gateway, "drop", "--all")).exit_code == 1
    assert list(worker.held) == [STAR]


async def test_nothing_recorded_is_said_with_what_would_be(gateway: Running) -> None:
    worker = await joined(gateway, "w1")
    assert "the first edit of an image is" in (await _run(gateway)).stderr
    worker.budget_bytes = 0
    assert "activations_mib" in (await _run(gateway)).stderr


async def test_a_worker_that_is_not_there_or_older_is_said(gateway: Running) -> None:
    async with AsyncClient(gateway.address, fleet_address=gateway.fleet_address) as client:
        with pytest.raises(NoWorker, match="no worker has joined"):
            await client.templates()
        await old(gateway, "old")
    result = await _run(gateway)
    assert (result.exit_code, "older than this command" in result.stderr) == (1, True)


async def test_the_doctor_says_who_has_recorded_and_who_cannot(gateway: Running) -> None:
    await joined(gateway, "w1", template(STAR))
    (await joined(gateway, "w2")).budget_bytes = 0
    await joined(gateway, "w3")
    await old(gateway, "w4")
    found = await _doctor(gateway)
    assert [(result.level, result.what.partition(" ")[0]) for result in found] == [
        (Level.OK, "w1"),
        (Level.WARN, "w2"),
        (Level.WARN, "w4"),
    ]
    assert "1 template of edits" in found[0].what
    assert "activations_mib" in found[1].todo


async def _doctor(gateway: Running) -> list[CheckResult]:
    check = ADD_ON.check_fleet
    assert check is not None
    async with AsyncClient(gateway.address, fleet_address=gateway.fleet_address) as client:
        fleet = await client.fleet()
    return await asyncio.to_thread(lambda: list(check(fleet)))
