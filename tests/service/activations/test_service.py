"""An activation store as operators and gateways call it: lists, pins, warming, profiles, figures; what it refuses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bottega.addons.interface.store_link import rank_stores
from bottega.errors import Draining
from bottega.v1 import activations_pb2 as pb
from tests.support.deployed_metrics import assert_shows_what_is_named, scrape
from tests.support.running_activations import (
    LARGE,
    MODEL_HASH,
    Recorded,
    Running,
    ask,
    config,
    fetch,
    layout_of,
    profile,
    running,
)
from tests.support.running_loras import refused

NOWHERE = pb.TEMPLATE_TIER_NOWHERE


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "activations", config(name="kept")) as made:
        yield made


async def test_a_template_is_listed_with_all_that_is_known_of_it(store: Running) -> None:
    await store.fill(Recorded(seed=1), Recorded(seed=2, steps=3))
    answer = await store.call("ListStoredTemplates")
    newest, oldest = answer.templates
    made = Recorded(seed=2, steps=3)
    assert (newest.id, oldest.id) == (made.id, Recorded(seed=1).id)
    assert (newest.model, newest.model_hash, newest.width, newest.height) == ("miniature", MODEL_HASH, 64, 48)
    assert (newest.steps, newest.valid_share, newest.pinned, newest.holder) == (3, 1.0, False, "kept")
    assert newest.size_bytes >= 6 * made.layout.size_bytes
    assert (answer.total, answer.used_bytes) == (2, newest.size_bytes + oldest.size_bytes)
    assert (answer.budget_bytes, answer.memory_budget_bytes) == (config().disk_bytes, config().budget_bytes)
    assert (answer.template_budget_bytes, answer.trouble) == (config().template_mib << 20, "")
    assert [each.id for each in (await store.call("ListStoredTemplates", limit=1)).templates] == [newest.id]


async def test_a_pin_is_kept_over_a_restart_and_taken_away(tmp_path: Path) -> None:
    made = Recorded()
    async with running(tmp_path) as store:
        await store.fill(made)
        assert (await store.call("PinTemplate", id=made.id, pinned=True)).templates == 1
    async with running(tmp_path) as store:
        assert [template.pinned for template in await store.templates()] == [True]
        assert (await store.call("PinTemplate", id=made.id[:8], pinned=False)).templates == 1
        assert [template.pinned for template in await store.templates()] == [False]
        assert (await store.call("PinTemplate", id="0" * 8, pinned=True)).templates == 0


async def test_templates_that_belong_to_another_store_now_are_left_to_age(tmp_path: Path) -> None:
    recorded = [Recorded(seed=seed) for seed in range(8)]
    async with running(tmp_path, config(name="one")) as store:
        await store.fill(*recorded)
        sources = [made.source for made in recorded]
        own = [rank_stores(["one", "two"], made.key)[0] == "one" for made in recorded]
        assert len(set(own)) == 2
        newest = [template.id for template in await store.templates()]
        found = (await store.call("PrefetchTemplates", sources=sources, stores=["one", "two"])).templates
        assert [each.tier != NOWHERE for each in found] == own
        used = [made.id for made, is_own in zip(recorded, own, strict=True) if is_own]
        rest = [id for id in newest if id not in used]
        assert [template.id for template in await store.templates()][len(used) :] == rest, "they are not used"
        alone = (await store.call("PrefetchTemplates", sources=sources, stores=["one"])).templates
        assert all(each.tier != NOWHERE for each in alone)


async def test_a_profile_is_kept_over_a_restart_told_to_workers_replaced_and_forgotten(tmp_path: Path) -> None:
    first, second, other = profile(), profile(about="again"), profile(dtype="float16")
    async with running(tmp_path) as store:
        for each in (first, second, other):
            await store.call("SetBlockProfile", profile=each)
    async with running(tmp_path) as store:
        kept = (await store.call("ListBlockProfiles")).profiles
        assert sorted(each.dtype for each in kept) == ["float16", "float32"]
        assert second in kept
        made = Recorded()
        with await store.link() as link:
            question = made.question(width=64, height=64)
            assert (await asyncio.to_thread(ask, link, question)).header.profile == second
            larger = made.question(width=128, height=64)
            assert not (await asyncio.to_thread(ask, link, larger)).header.HasField("profile")
        await store.call("SetBlockProfile", profile=profile(blocks=[], shares=[]))
        assert [*(await store.call("ListBlockProfiles")).profiles] == [other]


async def test_figures_say_where_bytes_are_and_what_workers_had(tmp_path: Path) -> None:
    made = Recorded(layout=LARGE)
    async with running(tmp_path) as store:
        await store.fill(made)
    async with running(tmp_path) as store:
        with await store.link() as link:
            answer = (await asyncio.to_thread(ask, link, made.question())).header
            await asyncio.to_thread(ask, link, Recorded(seed=9).question())
            for number in (1, 2):
                digest = answer.sections[0].digest
                await asyncio.to_thread(fetch, link, digest, layout_of(answer, 0), number=number)
        shown = await asyncio.to_thread(scrape, store.server.metrics_address)
        (template,) = await store.templates()
        activity = store.activations.load().activity
    assert (activity.lookups, activity.hits) == (2, 1)
    for tier, size_bytes in (("disk", template.size_bytes), ("memory", template.memory_bytes)):
        (value,) = re.findall(rf'^bottega_activations_bytes{{tier="{tier}"}} (.+)$', shown, re.MULTILINE)
        assert float(value) == size_bytes
    assert template.memory_bytes >= LARGE.size_bytes
    assert_shows_what_is_named("activations", shown)
    assert 'bottega_activations_lookups_total{outcome="hit"} 1.0' in shown
    assert 'bottega_activations_lookups_total{outcome="miss"} 1.0' in shown
    assert 'bottega_activations_fetches_total{tier="loaded"} 1.0' in shown
    assert 'bottega_activations_fetches_total{tier="memory"} 1.0' in shown
    assert 'bottega_activations_dropped_total{reason="busy"} 0.0' in shown
    for name, value in (("templates", 1), ("sections", 4), ("in_trouble", 0), ("damaged_total", 0)):
        assert f"bottega_activations_{name} {float(value)}" in shown
    assert "bottega_activations_load_seconds_total" in shown
    assert "bottega_links " in shown
    assert made.id not in shown, "nobody's template"
    assert made.source not in shown


async def test_a_store_that_stops_offers_no_link_and_says_so(store: Running) -> None:
    await store.activations.drain()
    assert isinstance(await refused(store.open_link()), Draining)
    assert store.activations.load().draining
