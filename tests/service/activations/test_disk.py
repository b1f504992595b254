"""A full disk costs the templates used longest ago; where none may go, the store is read-only."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from bottega.activations.store.store import ActivationStore
from bottega.addons.edits.wire import SectionLayout
from bottega.blobstore import writer as blob_disk
from tests.support.full_disk import fill, small_disk
from tests.support.stored_templates import (
    WAIT_S,
    answer,
    drawn_of,
    elements,
    grant,
    read,
    record,
    recording_header,
    recording_of,
    running_store,
    section_header,
    section_paths,
    send_sections,
    take_section,
    tensors_of,
)
from tests.support.waiting import wait_until

_DISK_BYTES = 4 << 20
# Sections that fill the disk soon: 128 KiB each.
_LARGE = SectionLayout.of([("down.0", (256, 128)), ("up.1", (256, 128))])


def test_records_of_what_was_replaced_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_disk, "_STRAYS_AFTER", 4)
    with running_store(tmp_path) as store:
        record(store, "cat")
        for number in range(1, 31):
            send_sections(store, "cat", [0], map=bytes([number, 0, 0, 0]))
            assert store.flush(WAIT_S)
        assert len(answer(store, "cat").maps) == 2
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as records:
        ((parts,),) = records.execute("SELECT count(*) FROM shared")
    assert 3 <= parts <= 3 + 4, "a layout, the maps of three sections, and what was replaced of late"


def _record_large(store: ActivationStore, name: str) -> None:
    grant(store, name)
    for step in range(2):
        take_section(store, section_header(name, step), _LARGE, tensors_of(f"{name} {step}", _LARGE), "worker")
    store.complete(recording_header(name), drawn_of(name), "worker")
    store.flush(WAIT_S)


def test_a_disk_smaller_than_the_budget_keeps_what_was_used_last(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk:
        with running_store(disk / "store", disk_budget_bytes=1 << 40) as store:
            _record_large(store, "pinned")
            assert store.pin("", True) == 1
            names = [f"template {number}" for number in range(30)]
            for name in names:
                _record_large(store, name)
            figures = store.statistics()
            assert (figures.trouble, sum(figures.dropped.values()), figures.recorded) == ("", 0, 31)
            kept = {template.id for template in store.templates(100)}
            assert recording_of("pinned") in kept
            there = [recording_of(name) in kept for name in names]
            assert there == sorted(there), "those that were recorded first went first"
            assert figures.evictions == there.count(False)
            assert _DISK_BYTES // 2 < figures.disk_bytes < _DISK_BYTES
            assert len(section_paths(disk / "store")) == 3 * len(kept), "of whole templates"
        with running_store(disk / "store", disk_budget_bytes=1 << 40) as store:
            still = {template.id for template in store.templates(100)}
            assert still <= kept
            assert len(still) >= len(kept) - 1, "it looks whether it can write, for which one may go"
            _record_large(store, "later")
            _serves_large(store, "later")
            assert store.statistics().trouble == ""


def test_templates_that_may_go_heal_a_store_without_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk, running_store(disk / "store") as store:
        for name in "abcd":
            _record_large(store, name)
        store.pin("", True)
        fill(disk)
        _record_large(store, "half")
        wait_until(lambda: store.statistics().trouble != "", "the store to notice")
        store.pin("", False)
        wait_until(lambda: store.statistics().trouble == "", "the store to heal")
        _record_large(store, "new")
        _serves_large(store, "new")
        _serves_large(store, "d")


def _serves_large(store: ActivationStore, name: str) -> None:
    found = [elements(read(store, info.digest)[0], _LARGE) for info in answer(store, name).sections]
    assert found == [[bytes(each) for each in tensors_of(f"{name} {step}", _LARGE)] for step in range(2)]
