"""The SDK, the command and the doctor with approximate caches, against a real gateway with one cache or two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import PIL.Image
import pytest
from click.testing import Result

from bottega import errors
from bottega.addons.cache.client.sdk import ADD_ON
from bottega.addons.cache.client.types import profile_from
from bottega.client import AsyncClient
from bottega.client.addons.addon import CheckResult, Level
from tests.support.running_cache import MODEL_HASH, Running, joined_cache, profile
from tests.support.running_gateway import Running as House
from tests.support.terminal import run_at

OTHER = "cd" * 32


@pytest.fixture
async def house(house: House) -> House:
    await house.worker()
    return house


@pytest.fixture
async def cache(house: House, own_folder: Path) -> AsyncIterator[Running]:
    async with joined_cache(house, own_folder / "cache") as made:
        await made.fill("a red star", "a blue star")
        yield made


@pytest.fixture
async def annex(house: House, own_folder: Path) -> AsyncIterator[Running]:
    async with joined_cache(house, own_folder / "annex", name="second") as made:
        await made.fill("a ring", model_hash=OTHER)
        yield made


async def _run(house: House, *said: object) -> Result:
    return await run_at(house, "cache", *said)


async def _doctor(client: AsyncClient) -> list[CheckResult]:
    fleet = await client.fleet()
    assert ADD_ON.check_fleet is not None
    check = ADD_ON.check_fleet
    return await asyncio.to_thread(lambda: list(check(fleet)))


async def test_what_several_caches_have_is_one_list(cache: Running, annex: Running, client: AsyncClient) -> None:
    assert {figures.cache for figures in await client.cache_stats()} == {"cache", "second"}
    newest = await client.cache_entries()
    assert [entry.parameters.prompt for entry in newest] == ["a ring", "a blue star", "a red star"]
    assert [*await client.cache_entries(limit=1)] == [newest[0]]
    found = await client.cache_entry(f"{newest[0].entry}@4")
    assert replace(found, picture=b"") == newest[0]
    assert found.picture.startswith(b"\x89PNG")
    with pytest.raises(errors.CacheEntryNotFound):
        await client.cache_entry("0f" * 16)
    assert await client.clear_cache(OTHER) == 1
    assert len(await client.cache_entries()) == 2


async def test_a_cache_that_joins_gets_the_profiles_of_the_others(
    house: House, cache: Running, annex: Running, client: AsyncClient
) -> None:
    await cache.call("SetCacheProfile", profile=profile())
    await annex.call("SetCacheProfile", profile=profile(OTHER))
    advice = [found.todo for found in await _doctor(client) if "second has no profile" in found.what]
    assert advice == ["Another cache has it: bottega cache profiles --share copies it."]
    shown = await _run(house, "profiles", "--share")
    assert (shown.exit_code, "2 profiles copied" in shown.stderr) == (0, True)
    for each in (cache, annex):
        assert {kept.model_hash for kept in each.cache.store.profiles()} == {MODEL_HASH, OTHER}
    assert "0 profiles copied" in (await _run(house, "profiles", "--share")).stderr


async def test_the_others_are_shown_while_a_cache_is_lost_which_is_named(
    house: House, cache: Running, annex: Running, client: AsyncClient
) -> None:
    await annex.call("SetCacheProfile", profile=profile(OTHER))
    await cache.call("SetCacheProfile", profile=profile())
    (ring,) = await client.cache_entries(OTHER)
    await annex.server.stop()
    with pytest.raises(errors.NoCache, match="second"):
        await client.cache_entry(ring.entry)
    failures = {figures.cache: bool(figures.failure) for figures in await client.cache_stats()}
    assert failures == {"cache": False, "second": True}
    assert [entry.parameters.prompt for entry in await client.cache_entries()] == ["a blue star", "a red star"]
    assert [known.model_hash for known in await client.cache_profiles()] == [MODEL_HASH]
    shown = await _run(house)
    assert (shown.exit_code, "miniature" in shown.stdout) == (0, True)
    assert "The cache second is not shown: approximate cache second does not answer at 127.0.0.1:" in shown.stderr
    with pytest.raises(errors.NoCache, match="second"):
        await client.clear_cache()
    assert not cache.cache.store.entries("", 9), "those that answer are cleared before the failure is told"
    await cache.server.stop()
    with pytest.raises(errors.NoCache, match="does not answer"):
        await client.cache_stats()
    assert (await _run(house)).exit_code == 1


async def test_the_command_says_what_is_there_shows_one_and_empties_it(
    house: House, cache: Running, own_folder: Path
) -> None:
    shown = await _run(house)
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["miniature", "2", "10", "1", "none"] in rows
    assert ["trouble"] not in [row[:1] for row in rows]
    assert "A model without a profile reuses nothing" in shown.stderr
    (newest, _) = cache.cache.store.entries(MODEL_HASH, 2)
    said = await _run(house, "inspect", f"{newest.entry}@10", "-o", "entry.png")
    assert said.exit_code == 0, said.output
    for fact in ("a blue star", "20 steps, guidance 0, 64x64, seed 1", "after 2, 4, 6, 8, 10 steps", "0 times"):
        assert fact in said.stdout
    with PIL.Image.open(own_folder / "entry.png") as image:
        assert image.size == (6, 8)
    assert (await _run(house, "inspect", newest.entry)).stdout.splitlines()[-1] == f"{newest.entry}.png"
    asked = await _run(house, "clear")
    assert (asked.exit_code, "Delete all entries of the cache for good?" in asked.stderr) == (1, True)
    assert (await _run(house, "clear", "--yes", "--model", "nobody")).exit_code == 2
    # As the table shows the hash of a model that is not served any more.
    assert (await _run(house, "clear", "--yes", "--model", MODEL_HASH[:12])).stdout == "2 entries deleted\n"
    assert (await _run(house, "clear", "--yes", "--model", "miniature")).stdout == "0 entries deleted\n"
    assert "The cache is empty" in (await _run(house, "stats")).stderr
    gone = await _run(house, "inspect", newest.entry)
    assert (gone.exit_code, "It was evicted or cleared" in gone.stderr) == (1, True)


async def test_the_doctor_says_for_which_models_nothing_is_reused_and_how_to_change_that(
    cache: Running, client: AsyncClient
) -> None:
    found, missing = await _doctor(client)
    assert (found.level, found.what) == (Level.OK, "approximate cache cache joined, with 2 entries")
    assert (missing.level, "no profile of miniature" in missing.what) == (Level.WARN, True)
    assert missing.todo.startswith("bottega cache profile --model miniature measures")
    await client.set_cache_profile(profile_from(profile()))
    assert [result.level for result in await _doctor(client)] == [Level.OK]
    await cache.server.stop()
    (gone,) = await _doctor(client)
    assert (gone.level, "does not answer" in gone.what) == (Level.WARN, True)
