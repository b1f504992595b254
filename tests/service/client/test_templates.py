"""The SDK, the command and the doctor with templates of edits that are in workers alone: a real gateway, scripted
workers, no store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import Result

from bottega.addons.edits.client.sdk import ADD_ON
from bottega.client import AsyncClient
from bottega.client.addons.addon import CheckResult, Level
from bottega.errors import MethodNotServed, NoWorker
from bottega.v1.activations_pb2 import (
    DropTemplateRequest,
    DropTemplateResponse,
    ListTemplatesRequest,
    ListTemplatesResponse,
)
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.templates_worker import joined, template
from tests.support.running_gateway import Running, running_gateway
from tests.support.terminal import run_at
from tests.support.waiting import eventually

STAR, RING = "5a" * 16, "5b" * 16


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


async def old(gateway: Running, name: str) -> None:
    worker = OldWorker(name, gateway.fleet_address)
    gateway.workers.append(worker)
    await worker.start()


async def _run(gateway: Running, *said: object) -> Result:
    return await run_at(gateway, "templates", *said)


async def test_templates_of_all_workers_are_listed_each_once(gateway: Running) -> None:
    await joined(gateway, "w1", template(STAR, valid_share=0.75), template(RING, in_use=True, recording=True))
    await joined(gateway, "w2", template(STAR))
    result = await _run(gateway)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    facts = ["64x48", "30", "3.00", "MiB", "4", "90", "s"]
    assert [STAR[:12], *facts, "w1,", "w2;", "75", "%", "of", "the", "image"] in rows
    assert [RING[:12], *facts, "w1;", "in", "use;", "recording"] in rows
    assert ["worker", "w1", "2", "6.00", "MiB", "of", "512", "MiB"] in rows
    assert ["worker", "w2", "1", "3.00", "MiB", "of", "512", "MiB"] in rows
    assert "No activation store has joined" in result.stderr
    limited = await _run(gateway, "-n", "1")
    assert "1 more, used longer ago" in limited.stdout


async def test_a_worker_without_an_answer_hides_no_other_ones_templates(gateway: Running) -> None:
    await joined(gateway, "w1", template(STAR))
    await old(gateway, "w2")
    result = await _run(gateway)
    assert (result.exit_code, STAR[:12] in result.stdout) == (0, True)
    assert "The templates of the worker w2 are not listed: there is no such method" in result.stderr


async def test_what_is_dropped_is_gone_from_all_workers(gateway: Running) -> None:
    first = await joined(gateway, "w1", template(STAR), template(RING, in_use=True))
    second = await joined(gateway, "w2", template(STAR))
    result = await _run(gateway, "drop", STAR[:12])
    assert (result.exit_code, result.stdout) == (0, "2 copies in workers' memory dropped\n")
    assert (list(first.held), list(second.held)) == ([RING], [])
    used = await _run(gateway, "drop", RING[:12])
    assert (used.exit_code, "now, so it was not dropped from w1" in used.stderr) == (1, True)
    missing = await _run(gateway, "drop", STAR[:12])
    assert (missing.exit_code, f"no service has the template {STAR[:12]}" in missing.stderr) == (1, True)
    every = await _run(gateway, "drop", "--all", "--yes")
    assert (every.exit_code, every.stdout) == (0, "0 templates dropped\n")
    assert "1 template remain" in every.stderr
    first.held[RING].in_use = False
    assert (await _run(gateway, "drop", "--all", "--yes")).stdout == "1 copy in workers' memory dropped\n"


async def test_all_workers_are_asked_to_drop_before_one_that_cannot_is_said(gateway: Running) -> None:
    await old(gateway, "w1")
    worker = await joined(gateway, "w2", template(STAR))
    assert (await _run(gateway, "drop", STAR[:12])).exit_code == 1
    assert worker.held == {}


@pytest.mark.parametrize(
    "command", [("pin", STAR), ("unpin", STAR), ("warm", STAR), ("warm", "--all"), ("profile", "--kept")]
)
async def test_what_only_a_store_can_do_says_that_there_is_none(gateway: Running, command: tuple[str, ...]) -> None:
    await joined(gateway, "w1", template(STAR))
    result = await _run(gateway, *command)
    assert (result.exit_code, "no activation store has joined" in result.stderr) == (1, True)
    assert "bottega logs activations" in result.stderr


async def test_a_profile_that_nobody_keeps_is_shown_all_the_same(gateway: Running) -> None:
    await joined(gateway, "w1")
    result = await _run(gateway, "profile", "--steps", "10", "--budget-mib", "60", "--width", "128")
    assert (result.exit_code, "No store keeps it" in result.stderr) == (0, True)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["down.1.attentions.0", "x2", "2.00", "MiB", "16", "4", "6", "yes"] in rows
    assert ["up.0.resnets.0", "4.00", "MiB", "6", "2", "1", "no"] in rows
    assert "miniature, 128x48, float32:" in result.stdout
    assert "120 MiB with every block" in result.stdout
    assert "60 MiB for a template keeps 2 of 3 blocks, 40 MiB: 75 % of the possible savings" in result.stdout


async def test_a_worker_that_draws_is_measured_only_where_it_is_named(gateway: Running) -> None:
    worker = await joined(gateway, "w1")
    assert worker.membership is not None
    worker.still_running("job", 1)
    async with AsyncClient(gateway.address, fleet_address=gateway.fleet_address) as client:
        await eventually(lambda: _runs(client))
        busy = await _run(gateway, "profile")
        assert (busy.exit_code, "worker w1 draws now" in busy.stderr, "--worker NAME" in busy.stderr) == (1, True, True)
        assert (await _run(gateway, "profile", "--worker", "w1")).exit_code == 0
        for options, said in ((("--worker", "w9"), "no worker w9"), (("--model", "flux"), "no such model: flux")):
            refused = await _run(gateway, "profile", *options)
            assert (refused.exit_code != 0, said in refused.stderr) == (True, True)


async def _runs(client: AsyncClient) -> bool:
    return any(member.load.running for member in (await client.fleet()).members)


async def test_dropping_asks_which_and_whether(gateway: Running) -> None:
    worker = await joined(gateway, "w1", template(STAR))
    for said in ((), (STAR, "--all")):
        assert "name one or more IDs" in (await _run(gateway, "drop", *said)).stderr
    assert (await _run(gateway, "drop", "--all")).exit_code == 1
    assert list(worker.held) == [STAR]


async def test_nothing_recorded_is_said_with_what_would_be(gateway: Running) -> None:
    worker = await joined(gateway, "w1")
    assert "The first edit of an image is" in (await _run(gateway)).stderr
    worker.budget_bytes = 0
    assert "activations_mib" in (await _run(gateway)).stderr


async def test_a_worker_that_is_not_there_or_older_is_said(gateway: Running) -> None:
    async with AsyncClient(gateway.address, fleet_address=gateway.fleet_address) as client:
        with pytest.raises(NoWorker, match="no worker and no activation store has joined"):
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
