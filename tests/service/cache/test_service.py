"""An approximate cache as operators call it: figures, entries and their pictures, profiles; and what it refuses."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from google.protobuf import json_format

from bottega.addons.cache import wire
from bottega.cache.profiles import read_profile
from bottega.errors import BottegaError, CacheEntryNotFound, ConfigError
from bottega.v1 import cache_pb2 as pb
from bottega.v1.cache_pb2 import CacheStarts
from tests.support.deployed_metrics import assert_shows_what_is_named, scrape
from tests.support.running_cache import (
    KEY,
    MODEL_HASH,
    Running,
    ask,
    config,
    embedding,
    picture,
    profile,
    running,
    send,
)
from tests.support.running_loras import refused
from tests.support.waiting import eventually


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "cache") as made:
        yield made


async def _refused(cache: Running, method: str, **fields: Any) -> BottegaError:
    return await refused(cache.call(method, **fields))


async def test_an_entry_is_shown_with_its_picture_whatever_step_of_it_is_named(cache: Running) -> None:
    await cache.fill("a red star", "a blue star")
    newest, oldest = (await cache.call("ListCacheEntries")).entries
    assert (newest.parameters.prompt, oldest.parameters.prompt) == ("a blue star", "a red star")
    assert ([*newest.steps], newest.model_hash, newest.hits) == ([2, 4, 6, 8, 10], MODEL_HASH, 0)
    for name in (newest.entry, f"{newest.entry}@10"):
        answer = await cache.call("GetCacheEntry", entry=name)
        assert answer.entry == newest
        with PIL.Image.open(io.BytesIO(answer.picture)) as image:
            assert image.format == "PNG"
            assert np.array_equal(np.asarray(image), picture(1))


async def test_an_entry_that_is_gone_is_not_found(cache: Running) -> None:
    gone = await _refused(cache, "GetCacheEntry", entry="0f" * 16)
    assert (type(gone), gone.metadata["entry"]) == (CacheEntryNotFound, "0f" * 16)


async def test_a_profile_is_kept_over_a_restart_replaced_and_forgotten(tmp_path: Path) -> None:
    first, second = profile(similarity=0.8), profile(about="again")
    async with running(tmp_path) as cache:
        for each in (first, second):
            assert (await cache.call("SetCacheProfile", profile=each)).profile == each
    async with running(tmp_path) as cache:
        assert [*(await cache.call("ListCacheProfiles")).profiles] == [second]
        await cache.call("SetCacheProfile", profile=pb.CacheProfile(model_hash=MODEL_HASH))
        assert not (await cache.call("ListCacheProfiles")).profiles


async def test_a_configured_profile_counts_where_none_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json_format.MessageToJson(profile(similarity=0.7)))
    settings = config(profiles=[str(path)])
    async with running(tmp_path / "cache", settings) as cache:
        assert [*(await cache.call("ListCacheProfiles")).profiles] == [profile(similarity=0.7)]
        await cache.call("SetCacheProfile", profile=profile())
    async with running(tmp_path / "cache", settings) as cache:
        assert [*(await cache.call("ListCacheProfiles")).profiles] == [profile()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not a valid CacheProfile"),
        ('{"colour": "red"}', "is not a valid CacheProfile"),
        ('{"model_hash": "../x"}', "profile.model_hash"),
    ],
)
def test_a_configured_profile_that_cannot_be_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        read_profile(path)
    assert str(path) in error.value.message


async def test_figures_say_what_is_there_and_how_it_serves(cache: Running) -> None:
    await cache.fill("a red star")
    await cache.call("SetCacheProfile", profile=profile())
    with await cache.link() as link:
        for number in (0, 1):
            answer = await asyncio.to_thread(ask, link, embedding(number))
            assert answer.header.counts_starts
        # The answer came when the picture had made 3 of the 10 steps.
        starts = wire.starts_message(CacheStarts(key=KEY, pictures=1, skipped_steps=7))
        await asyncio.to_thread(send, link, starts)
        await eventually(lambda: cache.cache.store.statistics().steps_skipped > 0, "the message to be counted")
    stats = await cache.call("GetCacheStats")
    (model,) = stats.models
    assert (model.model_hash, model.entries, model.latents, model.keys) == (MODEL_HASH, 1, 5, 1)
    assert model.has_profile
    assert (stats.lookups["hit"], stats.lookups["miss"], stats.steps_skipped) == (1, 1, 7)
    activity = cache.cache.load().activity
    assert (activity.lookups, activity.hits) == (2, 1)
    assert (stats.trouble, stats.budget_bytes) == ("", config().budget_bytes)
    assert stats.bytes == 5 * 4 * 4 * 6 * 8 + picture().nbytes
    shown = await asyncio.to_thread(scrape, cache.server.metrics_address)
    assert_shows_what_is_named("cache", shown)
    assert 'bottega_cache_lookups_total{outcome="hit"} 1.0' in shown
    assert "bottega_cache_steps_skipped_total 7.0" in shown
    assert f"bottega_cache_bytes {float(stats.bytes)}" in shown
    assert "bottega_cache_in_trouble 0.0" in shown
    assert "bottega_links 0.0" in shown or "bottega_links 1.0" in shown


async def test_a_profile_that_cannot_be_is_refused_by_the_field(cache: Running) -> None:
    low = pb.CacheThreshold(fraction=0.25)
    classes = [pb.CacheLengthClass(thresholds=[low])]
    error = await _refused(cache, "SetCacheProfile", profile=pb.CacheProfile(model_hash="x", balanced=classes))
    fields = [violation.field for violation in error.violations]
    assert fields == ["profile.model_hash", "profile.balanced[0].thresholds[0].fraction"]
