"""Memory and disk are bounded: whole templates go from the disk, the one used longest ago first, and pins stay."""

from __future__ import annotations

import time
from pathlib import Path

from bottega.activations.store.store import ActivationStore
from bottega.caching.tiers import Tier
from bottega.clocks import Clock
from bottega.v1 import activations_pb2 as pb
from tests.support.stored_templates import (
    SECTION_BYTES,
    WAIT_S,
    answer,
    drawn_of,
    read,
    record,
    recording_of,
    running_store,
    section_paths,
    send_sections,
    source_of,
)
from tests.support.waiting import wait_until

_STEPS = 4
# Of a template of so many steps, with what it was drawn with.
_TEMPLATE_BYTES = _STEPS * SECTION_BYTES + drawn_of("").size_bytes + 64


def _there(store: ActivationStore, *names: str) -> list[bool]:
    templates = {template.id for template in store.templates(1000)}
    return [recording_of(name) in templates for name in names]


def test_the_template_used_longest_ago_goes_first_and_whole(tmp_path: Path) -> None:
    with running_store(tmp_path, disk_budget_bytes=3 * _TEMPLATE_BYTES) as store:
        for name in "abc":
            record(store, name, _STEPS)
        assert answer(store, "a").sections
        record(store, "d", _STEPS)
        assert _there(store, *"abcd") == [True, False, True, True]
        assert not answer(store, "b").sections
        assert store.statistics().evictions == 1
        assert store.statistics().disk_bytes == 3 * _TEMPLATE_BYTES
        assert sum(path.stat().st_size for path in section_paths(tmp_path)) == 3 * _TEMPLATE_BYTES


def test_the_order_of_uses_outlives_the_store(tmp_path: Path) -> None:
    with running_store(tmp_path, disk_budget_bytes=3 * _TEMPLATE_BYTES) as store:
        for name in "abc":
            record(store, name, _STEPS)
        assert answer(store, "a").sections
        assert store.pin(recording_of("b"), True) == 1
    with running_store(tmp_path, disk_budget_bytes=3 * _TEMPLATE_BYTES) as store:
        assert [template.id for template in store.templates(10)] == [recording_of(name) for name in "acb"]
        assert [template.uses for template in store.templates(10)] == [1, 0, 0]
        record(store, "d", _STEPS)
        assert _there(store, *"abcd") == [True, True, False, True]


def test_the_order_of_uses_outlives_a_clock_that_was_set_back(tmp_path: Path) -> None:
    now_s = time.time()
    with running_store(tmp_path, clock=Clock(wall=lambda: now_s)) as store:
        for name in "abc":
            record(store, name, _STEPS)
    with running_store(tmp_path, clock=Clock(wall=lambda: now_s - 3600)) as store:
        assert answer(store, "a").sections
        assert store.templates(1)[0].idle_s < 3600
    with running_store(tmp_path, disk_budget_bytes=3 * _TEMPLATE_BYTES) as store:
        assert [template.id for template in store.templates(10)] == [recording_of(name) for name in "acb"]
        record(store, "d", _STEPS)
        assert _there(store, *"abcd") == [True, False, True, True]


def test_what_is_pinned_stays_and_what_finds_no_room_is_dropped(tmp_path: Path) -> None:
    with running_store(tmp_path, disk_budget_bytes=2 * _TEMPLATE_BYTES + SECTION_BYTES) as store:
        for name in "ab":
            record(store, name, _STEPS)
        assert store.pin("", True) == 2
        record(store, "c", _STEPS)
        figures = store.statistics()
        assert _there(store, *"abc") == [True, True, False]
        assert (figures.pinned, figures.dropped["no_room"]) == (2, _STEPS), "three sections, and their template"
        assert figures.disk_bytes == 2 * _TEMPLATE_BYTES, "half a template takes no room"
        assert store.pin(recording_of("a")[:8], False) == 1
        record(store, "c", _STEPS)
        assert _there(store, *"abc") == [False, True, True]


def test_a_template_does_not_evict_itself(tmp_path: Path) -> None:
    with running_store(tmp_path, disk_budget_bytes=_TEMPLATE_BYTES + SECTION_BYTES // 2) as store:
        record(store, "a", _STEPS)
        send_sections(store, "a", [_STEPS], link="other")
        store.flush(WAIT_S)
        assert len(answer(store, "a").sections) == _STEPS
        assert store.statistics().dropped["no_room"] == 1
        record(store, "b", 3 * _STEPS)
        assert store.statistics().disk_bytes <= _TEMPLATE_BYTES + SECTION_BYTES // 2


def test_a_budget_that_was_made_smaller_holds_from_the_start(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        for name in "abcd":
            record(store, name, _STEPS)
        assert answer(store, "b").sections
    with running_store(tmp_path, disk_budget_bytes=2 * _TEMPLATE_BYTES) as store:
        assert _there(store, *"abcd") == [False, True, False, True]
        assert sum(path.stat().st_size for path in section_paths(tmp_path)) == 2 * _TEMPLATE_BYTES
    with running_store(tmp_path) as store:
        assert _there(store, *"abcd") == [False, True, False, True], "the records know, too"


def test_templates_are_bounded_in_number(tmp_path: Path) -> None:
    with running_store(tmp_path, max_templates=3) as store:
        for name in "abcde":
            record(store, name, 1)
        assert _there(store, *"abcde") == [False, False, True, True, True]


def test_memory_has_what_was_used_last_and_the_rest_comes_from_the_disk(tmp_path: Path) -> None:
    with running_store(tmp_path, memory_budget_bytes=_STEPS * SECTION_BYTES) as store:
        for name in "ab":
            record(store, name, _STEPS)
        assert [info.in_memory for info in answer(store, "b").sections] == [True] * _STEPS
        found = answer(store, "a")
        assert [info.in_memory for info in found.sections] == [False] * _STEPS
        assert [read(store, info.digest)[1] for info in found.sections] == [Tier.LOADED] * _STEPS
        assert [read(store, info.digest)[1] for info in found.sections] == [Tier.MEMORY] * _STEPS
        figures = store.statistics()
        assert figures.memory_bytes == _STEPS * SECTION_BYTES
        assert (figures.loads, figures.loaded_bytes) == (_STEPS, _STEPS * SECTION_BYTES)
        assert figures.fetches == {"memory": _STEPS, "loaded": _STEPS, "disk": 0}
        assert figures.memory_evictions == 2 * _STEPS


def test_what_memory_has_no_room_for_is_read_from_the_disk(tmp_path: Path) -> None:
    with running_store(tmp_path, memory_budget_bytes=SECTION_BYTES) as store:
        record(store, "a", 2)
        first, second = (info.digest for info in answer(store, "a").sections)
        lease = store.fetch(first).result(WAIT_S)
        assert read(store, second)[1] is Tier.DISK
        store.give_back(lease)
        assert read(store, second)[1] is Tier.LOADED


def test_prefetching_brings_a_template_into_memory_before_it_is_asked_for(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "a", _STEPS)
    with running_store(tmp_path) as store:
        where, nowhere = store.prefetch([source_of("a"), source_of("b")])
        assert (where.tier, where.source) == (pb.TEMPLATE_TIER_DISK, source_of("a"))
        assert (where.size_bytes, where.disk_bytes) == (_TEMPLATE_BYTES, _TEMPLATE_BYTES)
        assert (nowhere.tier, nowhere.size_bytes) == (pb.TEMPLATE_TIER_NOWHERE, 0)
        wait_until(lambda: store.prefetch([source_of("a")])[0].tier == pb.TEMPLATE_TIER_MEMORY, "the loads")
        found = answer(store, "a")
        assert [read(store, info.digest)[1] for info in found.sections] == [Tier.LOADED] * _STEPS, "for this one"
        assert store.statistics().loads == _STEPS
        template = store.templates(1)[0]
        assert (template.tier, template.memory_bytes) == (pb.TEMPLATE_TIER_MEMORY, _TEMPLATE_BYTES)


def test_prefetching_more_than_memory_has_room_for_keeps_what_came_first(tmp_path: Path) -> None:
    names = "abc"
    with running_store(tmp_path) as store:
        for name in names:
            record(store, name, _STEPS)
    with running_store(tmp_path, memory_budget_bytes=(_STEPS + 2) * SECTION_BYTES) as store:
        store.prefetch([source_of(name) for name in names])
        wait_until(lambda: store.statistics().loads == _STEPS + 2, "the loads")
        store.prefetch([source_of(name) for name in names])
        assert [sum(info.in_memory for info in answer(store, name).sections) for name in names] == [_STEPS, 2, 0]
        assert [info.in_memory for info in answer(store, "b").sections] == [True, True, False, False], "the first steps"
        assert store.statistics().memory_evictions == 0


def test_warming_says_how_much_is_on_its_way(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        for name in "ab":
            record(store, name, _STEPS)
    with running_store(tmp_path) as store:
        warmed = store.warm(recording_of("a")[:8])
        assert warmed.templates == 1
        assert warmed.loading_bytes <= _STEPS * SECTION_BYTES
        wait_until(lambda: store.statistics().loads == _STEPS, "the loads")
        assert [template.memory_bytes for template in store.templates(2)] == [0, _TEMPLATE_BYTES]
        assert store.warm("").templates == 2
        wait_until(lambda: store.statistics().loads == 2 * _STEPS, "the loads")
        assert (store.warm("").templates, store.warm("").loading_bytes) == (2, 0)
        assert store.warm("ff" * 16).templates == 0
    with running_store(tmp_path, memory_budget_bytes=(_STEPS + 1) * SECTION_BYTES) as store:
        assert store.warm("").templates == 1, "the other one has no room beside it"


def test_what_is_dropped_is_gone_and_others_are_not(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        for name in "ab":
            record(store, name, _STEPS)
        digest = answer(store, "a").sections[0].digest
        lease = store.fetch(digest).result(WAIT_S)
        assert store.templates(2)[0].in_use
        assert store.drop(recording_of("a")) == 1
        assert _there(store, *"ab") == [False, True]
        assert len(section_paths(tmp_path)) == _STEPS + 1
        store.give_back(lease)
        assert store.prefetch([source_of("a")])[0].tier == pb.TEMPLATE_TIER_NOWHERE
        assert store.drop(recording_of("a")) == 0
        assert store.drop("") == 1
        assert section_paths(tmp_path) == []
        assert answer(store, "a").record
    with running_store(tmp_path) as store:
        assert store.templates(10) == []
