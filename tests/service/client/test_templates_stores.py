"""The SDK, the command and the doctor with templates that activation stores keep: a real gateway, real stores, and
scripted workers that have some of them in their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from bottega import kinds
from bottega.addons.edits.client.sdk import ADD_ON
from bottega.addons.edits.client.types import profile_from
from bottega.client import AsyncClient
from bottega.client.addons.addon import CheckResult, Level
from bottega.errors import InvalidRequest, NoActivationStore
from tests.fakes.templates_worker import TemplatesWorker, block_profile, joined, template
from tests.support.running_activations import Recorded, Running, joined_store
from tests.support.running_gateway import Running as RunningGateway
from tests.support.running_gateway import running_gateway
from tests.support.terminal import run_at

STAR = Recorded(seed=1, steps=3, drawn=False)
RING, HEART = Recorded(seed=2, drawn=False), Recorded(seed=3, drawn=False)


@pytest.fixture
async def gateway(own_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway() as made:
        yield made


@pytest.fixture
async def worker(gateway: RunningGateway) -> TemplatesWorker:
    """It has a template of the store's, and one of its own."""
    return await joined(gateway, "w1", template(STAR.id, in_use=True), template("5c" * 16))


@pytest.fixture
async def store(gateway: RunningGateway, own_folder: Path) -> AsyncIterator[Running]:
    async with joined_store(gateway, own_folder / "activations") as made:
        await made.fill(STAR, RING)
        yield made


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.address, fleet_address=gateway.fleet_address) as made:
        yield made


async def _run(gateway: RunningGateway, *said: object) -> Result:
    return await run_at(gateway, "templates", *said)


async def _doctor(client: AsyncClient) -> list[CheckResult]:
    fleet = await client.fleet()
    check = ADD_ON.check_fleet
    assert check is not None
    return await asyncio.to_thread(lambda: list(check(fleet)))


async def test_a_template_is_one_entry_wherever_it_is(
    gateway: RunningGateway, worker: TemplatesWorker, store: Running, client: AsyncClient
) -> None:
    found = {known.id: known for known in (await client.templates()).templates}
    assert set(found) == {STAR.id, RING.id, "5c" * 16}
    star, ring, own = found[STAR.id], found[RING.id], found["5c" * 16]
    assert (star.store, star.workers, star.in_use) == ("activations", ("w1",), True)
    assert star.steps == STAR.steps, "the store knows best"
    assert (ring.store, ring.workers, ring.in_use) == ("activations", (), False)
    assert (own.store, own.workers) == ("", ("w1",))
    shown = await _run(gateway)
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[-4:] for row in rows if row[:1] == [STAR.id[:12]]] == [["memory,", "w1;", "in", "use"]]
    assert [row[-1] for row in rows if row[:1] == [RING.id[:12]]] == ["memory"]
    assert [row[:3] for row in rows if row[:1] == ["store"]] == [["store", "activations", "2"]]
    assert "No activation store" not in shown.stderr


async def test_several_stores_have_each_its_own(
    gateway: RunningGateway, store: Running, client: AsyncClient, own_folder: Path
) -> None:
    async with joined_store(gateway, own_folder / "annex", name="annex") as annex:
        await annex.fill(HEART)
        overview = await client.templates()
        holders = {known.id: known.store for known in overview.templates}
        assert holders == {STAR.id: "activations", RING.id: "activations", HEART.id: "annex"}
        assert await client.pin_templates(HEART.id[:8]) == 1
        assert (await client.drop_templates()).stored == 3
        await annex.server.stop()
        overview = await client.templates()
        assert [(silent.name, type(silent.error)) for silent in overview.silent] == [("annex", NoActivationStore)]


async def test_pins_are_set_shown_and_taken_back(gateway: RunningGateway, store: Running, client: AsyncClient) -> None:
    assert (await _run(gateway, "pin", RING.id[:12], STAR.id)).stdout == "2 templates pinned\n"
    assert all(known.pinned for known in (await client.templates()).templates)
    assert (await _run(gateway)).stdout.count("pinned") == 2
    assert (await _run(gateway, "unpin", RING.id)).stdout == "1 template unpinned\n"
    assert [known.pinned for known in (await client.templates()).templates if known.id == RING.id] == [False]


async def test_what_no_store_has_is_said_with_who_has_it(
    gateway: RunningGateway, worker: TemplatesWorker, store: Running
) -> None:
    nowhere = await _run(gateway, "pin", HEART.id, RING.id)
    assert (nowhere.exit_code, f"no store has the template {HEART.id}" in nowhere.stderr) == (1, True)
    assert [each.pinned for each in await store.templates() if each.id == RING.id] == [True]
    elsewhere = await _run(gateway, "warm", "5c" * 16)
    assert (elsewhere.exit_code, "is in no store, only in w1" in elsewhere.stderr) == (1, True)
    short = await _run(gateway, "pin", "5c5c")
    assert (short.exit_code != 0, "first 8 to 32 hex digits" in short.stderr) == (True, True)


async def test_what_is_on_the_disk_alone_is_warmed(gateway: RunningGateway, own_folder: Path) -> None:
    async with joined_store(gateway, own_folder / "activations") as before:
        await before.fill(STAR, RING)
    async with joined_store(gateway, own_folder / "activations") as store:
        assert [each.memory_bytes for each in await store.templates()] == [0, 0]
        listed = (await _run(gateway)).stdout.splitlines()
        assert (
            sum(
                line.rstrip().endswith("disk")
                for line in listed
                if line.split()[:1] in ([STAR.id[:12]], [RING.id[:12]])
            )
            == 2
        )
        assert (await _run(gateway, "warm", STAR.id[:12])).stdout == "1 template in memory\n"
        warm = {each.id: each.memory_bytes == each.size_bytes for each in await store.templates()}
        assert warm == {STAR.id: True, RING.id: False}
        assert (await _run(gateway, "warm", "--all")).stdout == "2 templates in memory\n"


async def test_what_is_dropped_is_gone_from_stores_and_workers(
    gateway: RunningGateway, worker: TemplatesWorker, store: Running
) -> None:
    stays = await _run(gateway, "drop", STAR.id)
    assert (stays.exit_code, stays.stdout) == (1, "1 template dropped\n")
    assert "now, so it was not dropped from w1" in stays.stderr
    assert [each.id for each in await store.templates()] == [RING.id]
    worker.held[STAR.id].in_use = False
    every = await _run(gateway, "drop", "--all", "--yes")
    assert every.stdout == "1 template dropped, and 2 copies in workers' memory\n"
    assert (worker.held, await store.templates()) == ({}, [])
    empty = await _run(gateway)
    assert (empty.exit_code, "Nothing is recorded yet" in empty.stderr) == (0, True)
    assert ["store", "activations", "0"] in [line.split()[:3] for line in empty.stdout.splitlines()]


async def test_a_store_without_an_answer_is_said_and_workers_are_listed(
    gateway: RunningGateway, worker: TemplatesWorker, store: Running
) -> None:
    await store.server.stop()
    shown = await _run(gateway)
    assert (shown.exit_code, "5c5c5c5c5c5c" in shown.stdout) == (0, True)
    assert "The templates of the store activations are not listed" in shown.stderr
    assert "No activation store has joined" not in shown.stderr
    refused = await _run(gateway, "pin", STAR.id)
    assert (refused.exit_code, "activation store activations does not answer" in refused.stderr) == (1, True)
    assert "Edits are drawn meanwhile" in refused.stderr
    dropped = await _run(gateway, "drop", "5c" * 16)
    assert (dropped.exit_code, "5c" * 16 in worker.held) == (1, False), "who can answer has forgotten it"


async def test_a_profile_is_measured_kept_and_shown_again(
    gateway: RunningGateway, worker: TemplatesWorker, store: Running, client: AsyncClient
) -> None:
    nothing = await _run(gateway, "profile", "--kept")
    assert (nothing.exit_code, "no store keeps a profile" in nothing.stderr) == (1, True)
    measured = await _run(gateway, "profile")
    assert (measured.exit_code, "Kept by activations" in measured.stderr) == (0, True), measured.output
    assert await client.block_profiles() == (profile_from(block_profile(64, 48)),)
    shown = await _run(gateway, "profile", "--kept")
    assert shown.stdout == measured.stdout
    assert "512 MiB for a template keeps 3 of 3 blocks" in shown.stdout
    assert "w1 has 512 MiB for recordings (engine.edits.activations_mib)" in shown.stderr
    worker.budget_bytes = 4 << 30
    assert "2.60 GiB for a template keeps 3 of 3 blocks" in (await _run(gateway, "profile", "--kept")).stdout
    await client.set_block_profile(replace(profile_from(block_profile(64, 48)), blocks=()))
    assert await client.block_profiles() == ()
    broken = replace(profile_from(block_profile(64, 48)), dtype="float12")
    with pytest.raises(InvalidRequest, match="dtype"):
        await client.set_block_profile(broken)


async def test_the_doctor_says_of_a_store_how_it_is(
    gateway: RunningGateway, worker: TemplatesWorker, own_folder: Path, client: AsyncClient
) -> None:
    (told,) = await _doctor(client)
    assert told.what == "w1 has recorded 2 templates of edits", "nobody needs a store"
    async with joined_store(gateway, own_folder / "activations", template_mib=1, disk_bytes=1 << 20) as store:
        await store.fill(STAR, RING)
        joined_line, unmeasured, _ = await _doctor(client)
        assert (joined_line.level, "with 2 templates" in joined_line.what) == (Level.OK, True)
        assert (unmeasured.level, "no profile of miniature" in unmeasured.what) == (Level.WARN, True)
        assert "bottega templates profile --model miniature" in unmeasured.todo
        await client.profile_blocks()
        assert [result.level for result in await _doctor(client)] == [Level.OK, Level.OK]
        await store.server.stop()
        gone, _ = await _doctor(client)
        assert (gone.level, "does not answer" in gone.what) == (Level.WARN, True)


async def test_the_doctor_counts_the_memory_of_workers_where_it_is_less_than_a_template_may_take(
    gateway: RunningGateway, worker: TemplatesWorker, store: Running, client: AsyncClient
) -> None:
    assert not any("no profile" in result.what for result in await _doctor(client))
    worker.budget_bytes = 1 << 20
    assert any("no profile of miniature" in result.what for result in await _doctor(client))


async def test_the_doctor_misses_a_store_where_workers_look_for_one(
    gateway: RunningGateway, client: AsyncClient
) -> None:
    await joined(gateway, "w1", uses=(kinds.ACTIVATIONS,))
    (missing,) = await _doctor(client)
    assert (missing.level, "no activation store has joined" in missing.what) == (Level.WARN, True)
