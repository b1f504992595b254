"""Two tenants who record the same picture share nothing, and neither learns of the other."""

from __future__ import annotations

from pathlib import Path

from bottega.activations.store.store import ActivationStore
from bottega.caching.tiers import Tier
from bottega.v1 import activations_pb2 as pb
from tests.support.stored_templates import (
    WAIT_S,
    abandoned,
    answer,
    drawn_of,
    key_of,
    read,
    record,
    recording_header,
    recording_of,
    running_store,
    section_paths,
    send_sections,
    source_of,
)


def _record(store: ActivationStore, tenant: str) -> None:
    """The same picture, prompt, seed and steps: the same activations to the last bit."""
    assert answer(store, tenant, link=tenant).record, "also when the other one records it at the same time"
    send_sections(store, tenant, range(3), link=tenant, content="the same")


def _complete(store: ActivationStore, *tenants: str) -> None:
    for tenant in tenants:
        store.complete(recording_header(tenant, tenant=tenant), drawn_of("the same"), tenant)
    assert store.flush(WAIT_S)


def test_equal_activations_of_two_tenants_are_different_files(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        _record(store, "ann")
        _record(store, "bob")
        _complete(store, "ann", "bob")
        found = {tenant: answer(store, tenant) for tenant in ("ann", "bob")}
        digests = {tenant: {info.digest for info in each.sections} for tenant, each in found.items()}
        assert not digests["ann"] & digests["bob"]
        assert len(section_paths(tmp_path)) == 8
        layout = store.layout_of(found["ann"].sections[0].digest)
        assert layout is not None
        for ours, theirs in zip(found["ann"].sections, found["bob"].sections, strict=True):
            first, second = read(store, ours.digest)[0], read(store, theirs.digest)[0]
            assert first != second
            assert first[: layout.size_bytes - 64] == second[: layout.size_bytes - 64], "what they hold is the same"


def test_what_one_does_changes_nothing_for_the_other(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        _record(store, "ann")
        _record(store, "bob")
        _complete(store, "ann", "bob")
        assert store.drop(recording_of("ann")) == 1
        sections = answer(store, "bob").sections
        assert len(sections) == 3
        for info in sections:
            read(store, info.digest)
        assert not answer(store, "ann").sections
    with running_store(tmp_path) as store:
        record(store, "ann", tenant="ann")
        first = answer(store, "ann").sections[0].digest
        assert read(store, first)[1] is Tier.MEMORY
        assert [info.in_memory for info in answer(store, "bob").sections] == [False] * 3, "nor what it has in memory"
        (where,) = store.prefetch([source_of("ann")])
        assert where.tier == pb.TEMPLATE_TIER_MEMORY
        assert not any(info.in_memory for info in answer(store, "bob").sections)


def test_a_recording_is_not_found_by_its_name_under_another_key(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "ann")
        found = answer(store, "bob", recording=recording_of("ann"))
        assert (found.recording, len(found.sections)) == ("", 0)
        send_sections(store, "bob", [0], recording=recording_of("ann"), link="bob")
        store.flush(WAIT_S)
        assert len(answer(store, "ann").sections) == 3
        assert key_of("ann") != key_of("bob")
        store.abandon(abandoned("bob", recording=recording_of("ann")), "bob")
        store.flush(WAIT_S)
        assert len(answer(store, "ann").sections) == 3
