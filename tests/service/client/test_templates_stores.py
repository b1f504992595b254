"""The SDK, the command and the doctor with templates that activation stores keep: a real gateway, real stores, and
scripted workers that have some of them in their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from bottega.addons.edits.client.sdk import ADD_ON
from bottega.addons.edits.client.types import profile_from
from bottega.client import AsyncClient
from bottega.client.addons.addon import CheckResult, Level
from bottega.errors import InvalidRequest, NoActivationStore
from tests.fakes.templates_worker import TemplatesWorker, block_profile, joined, template
from tests.support.running_activations import Recorded, Running, joined_store
from tests.support.running_gateway import Running as House
from tests.support.terminal import run_at

STAR = Recorded(seed=1, steps=3, drawn=False)
RING, HEART = Recorded(seed=2, drawn=False), Recorded(seed=3, drawn=False)


@pytest.fixture
async def worker(house: House) -> TemplatesWorker:
    """It has a template of the store's, and one of its own."""
    return await joined(house, "w1", template(STAR.id, in_use=True), template("5c" * 16))


@pytest.fixture
async def store(house: House, own_folder: Path) -> AsyncIterator[Running]:
    async with joined_store(house, own_folder / "activations") as made:
        await made.fill(STAR, RING)
        yield made


async def _run(house: House, *said: object) -> Result:
    return await run_at(house, "templates", *said)


async def _doctor(client: AsyncClient) -> list[CheckResult]:
    fleet = await client.fleet()
    check = ADD_ON.check_fleet
    assert check is not None
    return await asyncio.to_thread(lambda: list(check(fleet)))


async def test_a_template_is_one_entry_wherever_it_is(
    house: House, worker: TemplatesWorker, store: Running, client: AsyncClient
) -> None:
    found = {known.id: known for known in (await client.templates()).templates}
    assert set(found) == {STAR.id, RING.id, "5c" * 16}
    star, ring, own = found[STAR.id], found[RING.id], found["5c" * 16]
    assert (star.store, star.workers, star.in_use) == ("activations", ("w1",), True)
    assert star.steps == STAR.steps, "the store knows best"
    assert (ring.store, ring.workers, ring.in_use) == ("activations", (), False)
    assert (own.store, own.workers) == ("", ("w1",))
    shown = await _run(house)
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[-4:] for row in rows if row[:1] == [STAR.id[:12]]] == [["memory,", "w1;", "in", "use"]]
    assert [row[-1] for row in rows if row[:1] == [RING.id[:12]]] == ["memory"]
    assert [row[:3] for row in rows if row[:1] == ["store"]] == [["store", "activations", "2"]]
    assert "No activation store" not in shown.stderr


async def test_several_stores_have_each_its_own(
    house: House, store: Running, client: AsyncClient, own_folder: Path
) -> None:
    async with joined_store(house, own_folder / "annex", name="annex") as annex:
        await annex.fill(HEART)
        overview = await client.templates()
        holders = {known.id: known.store for known in overview.templates}
        assert holders == {STAR.id: "activations", RING.id: "activations", HEART.id: "annex"}
        assert await client.pin_templates(HEART.id[:8]) == 1
        assert (await client.drop_templates()).stored == 3
        await annex.server.stop()
        overview = await client.templates()
        assert [(silent.name, type(silent.error)) for silent in overview.silent] == [("annex", NoActivationStore)]


async def test_what_is_on_the_disk_alone_is_warmed(house: House, own_folder: Path) -> None:
    async with joined_store(house, own_folder / "activations") as before:
        await before.fill(STAR, RING)
    async with joined_store(house, own_folder / "activations") as store:
        assert [each.memory_bytes for each in await store.templates()] == [0, 0]
        listed = (await _run(house)).stdout.splitlines()
        on_disk = {line.split()[0] for line in listed if line.rstrip().endswith("disk")}
        assert {STAR.id[:12], RING.id[:12]} <= on_disk
        assert (await _run(house, "warm", STAR.id[:12])).stdout == "1 template in memory\n"
        warm = {each.id: each.memory_bytes == each.size_bytes for each in await store.templates()}
        assert warm == {STAR.id: True, RING.id: False}
        assert (await _run(house, "warm", "--all")).stdout == "2 templates in memory\n"


async def test_what_is_dropped_is_gone_from_stores_and_workers(
    house: House, worker: TemplatesWorker, store: Running
) -> None:
    stays = await _run(house, "drop", STAR.id)
    assert (stays.exit_code, stays.stdout) == (1, "1 template dropped\n")
    assert "now, so it was not dropped from w1" in stays.stderr
    assert [each.id for each in await store.templates()] == [RING.id]
    worker.held[STAR.id].in_use = False
    every = await _run(house, "drop", "--all", "--yes")
    assert every.stdout == "1 template dropped, and 2 copies in workers' memory\n"
    assert (worker.held, await store.templates()) == ({}, [])
    empty = await _run(house)
    assert (empty.exit_code, "Nothing is recorded yet" in empty.stderr) == (0, True)
    assert ["store", "activations", "0"] in [line.split()[:3] for line in empty.stdout.splitlines()]


async def test_a_store_without_an_answer_is_said_and_workers_are_listed(
    house: House, worker: TemplatesWorker, store: Running
) -> None:
    await store.server.stop()
    shown = await _run(house)
    assert (shown.exit_code, "5c5c5c5c5c5c" in shown.stdout) == (0, True)
    assert "The templates of the store activations are not listed" in shown.stderr
    assert "No activation store has joined" not in shown.stderr
    refused = await _run(house, "pin", STAR.id)
    assert (refused.exit_code, "activation store activations does not answer" in refused.stderr) == (1, True)
    assert "Edits are drawn meanwhile" in refused.stderr
    dropped = await _run(house, "drop", "5c" * 16)
    assert (dropped.exit_code, "5c" * 16 in worker.held) == (1, False), "who can answer has forgotten it"


async def test_a_profile_is_measured_kept_and_shown_again(
    house: House, worker: TemplatesWorker, store: Running, client: AsyncClient
) -> None:
    nothing = await _run(house, "profile", "--kept")
    assert (nothing.exit_code, "no store keeps a profile" in nothing.stderr) == (1, True)
    measured = await _run(house, "profile")
    assert (measured.exit_code, "Kept by activations" in measured.stderr) == (0, True), measured.output
    assert await client.block_profiles() == (profile_from(block_profile(64, 48)),)
    shown = await _run(house, "profile", "--kept")
    assert shown.stdout == measured.stdout
    assert "512 MiB for a template keeps 3 of 3 blocks" in shown.stdout
    assert "w1 has 512 MiB for recordings (engine.edits.activations_mib)" in shown.stderr
    worker.budget_bytes = 4 << 30
    assert "2.60 GiB for a template keeps 3 of 3 blocks" in (await _run(house, "profile", "--kept")).stdout
    await client.set_block_profile(replace(profile_from(block_profile(64, 48)), blocks=()))
    assert await client.block_profiles() == ()
    broken = replace(profile_from(block_profile(64, 48)), dtype="float12")
    with pytest.raises(InvalidRequest, match="dtype"):
        await client.set_block_profile(broken)


async def test_the_doctor_says_of_a_store_how_it_is(
    house: House, worker: TemplatesWorker, own_folder: Path, client: AsyncClient
) -> None:
    (told,) = await _doctor(client)
    assert told.what == "w1 has recorded 2 templates of edits", "nobody needs a store"
    async with joined_store(house, own_folder / "activations", template_mib=1, disk_bytes=1 << 20) as store:
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
