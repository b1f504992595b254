"""Recordings in an object store that activation stores share: on S3 servers, and in a folder where ages matter."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bottega.activations.store.store import ActivationStore
from bottega.activations.store.template_objects import OBJECT_NAMES
from bottega.clocks import Clock
from bottega.errors import BottegaError, StorageUnavailable
from bottega.storage import BlobFiles
from bottega.storage.objects import ObjectStore, s3_location
from bottega.storage.s3 import S3Objects
from bottega.v1 import activations_pb2 as pb
from tests.fakes.fake_time import FakeTime
from tests.support import s3
from tests.support.stored_templates import (
    SECTION_BYTES,
    WAIT_S,
    answer,
    drawn_of,
    elements,
    key_of,
    question_of,
    read,
    record,
    recording_header,
    recording_of,
    section_paths,
    send_sections,
    settings_of,
    source_of,
    tensors_of,
)
from tests.support.waiting import wait_until

_HALF_HOUR_S, _DAY_S = 1800.0, 86400.0


@pytest.fixture
def server(s3_servers: s3.S3Servers, monkeypatch: pytest.MonkeyPatch) -> s3.S3Server:
    server = s3_servers.get("nanio")
    s3.set_environment(monkeypatch, server.url)
    return server


@pytest.fixture
def proxy(server: s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.FailingProxy]:
    with s3.failing_proxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def _objects(bucket: str) -> tuple[ObjectStore, ObjectStore]:
    manifests, files = (
        S3Objects(s3_location(f"s3://{bucket}/{part}"), names=OBJECT_NAMES) for part in ("templates", "sections")
    )
    return manifests, files


def _in_folder(folder: Path) -> tuple[BlobFiles, BlobFiles]:
    manifests, files = (BlobFiles(folder / part, names=OBJECT_NAMES) for part in ("templates", "sections"))
    for part in (manifests, files):
        part.clear()
    return manifests, files


@contextlib.contextmanager
def _store(
    folder: Path, objects: tuple[ObjectStore, ObjectStore], clock: Clock | None = None, **changed: object
) -> Iterator[ActivationStore]:
    store = ActivationStore(settings_of(folder, **changed), objects=objects, clock=clock)
    store.start()
    try:
        yield store
    finally:
        store.close()


def _outcomes(store: ActivationStore) -> dict[str, int]:
    shared = store.statistics().shared
    assert shared is not None
    return shared.outcomes


def _serves(store: ActivationStore, name: str, steps: int = 3) -> bool:
    """Return whether a template is there or is brought back, with all of its sections as they were recorded."""
    _bring(store, name)
    reply = store.answer(question_of(name, would_record=False), "worker")
    assert reply.drawn is not None
    assert bytes(reply.drawn.noise) == bytes(drawn_of(name).noise)
    assert len(reply.header.sections) == steps
    for step, section in enumerate(reply.header.sections):
        assert elements(read(store, section.digest)[0]) == [bytes(view) for view in tensors_of(f"{name} {step}")]
    return True


def _bring(store: ActivationStore, name: str) -> Sequence[pb.SectionInfo]:
    """Ask for a template until it is there, because a question does not wait long; return its sections."""
    wait_until(lambda: answer(store, name, would_record=False).recording == recording_of(name), "the template")
    return answer(store, name, would_record=False).sections


def _refresh(store: ActivationStore) -> None:
    """List the objects now, and not within a minute."""
    assert store._shared is not None
    store._shared._refresh_at = 0.0
    assert store.flush(WAIT_S)


def _age(folder: Path, by_s: float) -> None:
    for path in folder.glob("*/??/*"):
        os.utime(path, (time.time() - by_s,) * 2)


def test_a_store_that_comes_up_on_another_host_has_its_recordings(server: s3.S3Server, tmp_path: Path) -> None:
    bucket = server.bucket()
    with _store(tmp_path / "one", _objects(bucket)) as store:
        record(store, "a")
        record(store, "b")
    with _store(tmp_path / "two", _objects(bucket)) as store:
        _refresh(store)
        listed = store.templates(10)
        assert {(template.id, template.tier) for template in listed} == {
            (recording_of(name), pb.TEMPLATE_TIER_OBJECTS) for name in "ab"
        }
        assert _serves(store, "a")
        assert not answer(store, "b").record
        assert _outcomes(store)["read"] == 3
        assert len(section_paths(tmp_path / "two")) >= 4
        assert {template.id: template.tier for template in store.templates(10)}[recording_of("a")] != (
            pb.TEMPLATE_TIER_OBJECTS
        )


def test_a_template_that_the_disk_evicted_comes_back(server: s3.S3Server, tmp_path: Path) -> None:
    with _store(tmp_path, _objects(server.bucket()), disk_budget_bytes=5 * SECTION_BYTES) as store:
        for name in "abc":
            record(store, name)
            assert store.flush(WAIT_S)
        assert len(section_paths(tmp_path)) == 4
        for name in "abc":
            assert _serves(store, name)


def test_a_queued_edit_brings_back_its_template(server: s3.S3Server, tmp_path: Path) -> None:
    bucket = server.bucket()
    with _store(tmp_path / "one", _objects(bucket)) as store:
        record(store, "a")
    with _store(tmp_path / "two", _objects(bucket)) as store:
        _refresh(store)
        (other,) = store.prefetch([source_of("a")], lambda key: False)
        assert other.tier == pb.TEMPLATE_TIER_NOWHERE, "another store is responsible for it"
        (coming,) = store.prefetch([source_of("a")])
        assert (coming.tier, coming.disk_bytes > 3 * SECTION_BYTES) == (pb.TEMPLATE_TIER_DISK, True)
        wait_until(lambda: store.templates(1)[0].tier == pb.TEMPLATE_TIER_MEMORY, "its sections to be in memory")


def test_a_changed_recording_replaces_the_one_in_the_bucket(server: s3.S3Server, tmp_path: Path) -> None:
    bucket = server.bucket()
    with _store(tmp_path / "one", _objects(bucket)) as store:
        record(store, "a")
        send_sections(store, "a", [1], content="other")
        assert store.flush(WAIT_S)
    assert sum(key.startswith("templates/") for key in server.keys(bucket)) == 1
    with _store(tmp_path / "two", _objects(bucket)) as store:
        _refresh(store)
        sections = _bring(store, "a")
        assert elements(read(store, sections[1].digest)[0]) == [bytes(view) for view in tensors_of("other 1")]


def test_a_dropped_template_is_deleted_in_the_bucket_and_at_other_stores(server: s3.S3Server, tmp_path: Path) -> None:
    bucket = server.bucket()
    with _store(tmp_path / "one", _objects(bucket)) as one, _store(tmp_path / "two", _objects(bucket)) as two:
        for name in "ab":
            record(one, name)
        assert one.flush(WAIT_S)
        _refresh(two)
        assert _serves(two, "a")
        assert one.drop(recording_of("a")[:8]) == 1
        assert len(server.keys(bucket)) == 1 + 4
        _refresh(two)
        assert [template.id for template in two.templates(10)] == [recording_of("b")]
        assert two.drop("") == 1
        assert server.keys(bucket) == []


def test_a_template_dropped_while_a_store_is_down_does_not_come_back(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with _store(tmp_path / "one", _in_folder(shared)) as one:
        with _store(tmp_path / "two", _in_folder(shared)) as two:
            for name in "ab":
                record(two, name)
            assert two.flush(WAIT_S)
        _refresh(one)
        assert one.drop(recording_of("a")) == 1
    with _store(tmp_path / "two", _in_folder(shared)) as two:
        assert two.flush(WAIT_S)
        assert not answer(two, "a").recording
        assert _serves(two, "b")
    assert len(list((shared / "templates").glob("??/*"))) == 1
    assert len(list((shared / "sections").glob("??/*"))) == 4


def test_recordings_are_written_to_an_object_store_with_another_address(tmp_path: Path) -> None:
    with _store(tmp_path / "one", _in_folder(tmp_path / "old"), shared_address="s3://old") as store:
        record(store, "a")
    with _store(tmp_path / "one", _in_folder(tmp_path / "new"), shared_address="s3://new") as store:
        assert store.flush(WAIT_S)
        assert _serves(store, "a")
    assert len(list((tmp_path / "new" / "templates").glob("??/*"))) == 1


def test_a_template_that_is_dropped_goes_though_another_store_recorded_it_too(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with _store(tmp_path / "one", _in_folder(shared)) as one, _store(tmp_path / "two", _in_folder(shared)) as two:
        for store in (one, two):
            _refresh(store)
            send_sections(store, "a", range(2))
        record(one, "a", 0)
        assert one.flush(WAIT_S)
        record(two, "a", 0, recording="0" * 32)
        _refresh(two)
        assert one.drop(recording_of("a")) == 1
        _refresh(two)
        assert not answer(two, "a").recording
    assert not list(shared.glob("*/??/*"))


def test_stores_that_record_the_same_at_once_agree_on_one(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with _store(tmp_path / "one", _in_folder(shared)) as one, _store(tmp_path / "two", _in_folder(shared)) as two:
        for store in (one, two):
            _refresh(store)
        for store, content in ((one, "first"), (two, "second")):
            send_sections(store, "a", range(2), content=content)
        record(one, "a", 0)
        record(two, "a", 0, recording="0" * 32)
        for store in (one, two):
            _refresh(store)
            assert store.flush(WAIT_S)
    assert len(list((shared / "templates").glob("??/*"))) == 1


@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_a_damaged_file_is_not_served_and_read_again_where_possible(tmp_path: Path, place: str) -> None:
    shared, folder = tmp_path / "shared", tmp_path / "one"
    with _store(folder, _in_folder(shared), memory_budget_bytes=0) as store:
        record(store, "a")
        assert store.flush(WAIT_S)
        digest = answer(store, "a").sections[1].digest
        (local,) = (folder / "sections").glob(f"??/{digest}")
        (remote,) = (shared / "sections").glob(f"??/*-{digest}")
        damaged = {"disk": local, "bucket": remote}[place]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        if place == "bucket":
            local.unlink()
        with pytest.raises(BottegaError):
            read(store, digest)
        if place == "disk":
            assert _serves(store, "a")
            return
        assert store.flush(WAIT_S)
        assert [section.digest == digest for section in answer(store, "a").sections] == [False, False]
        send_sections(store, "a", [1])  # an edit computes it, and records it again
        assert store.flush(WAIT_S)
    with _store(tmp_path / "two", _in_folder(shared)) as other:
        _refresh(other)
        assert _serves(other, "a")


def test_an_upload_that_was_cut_off_is_invisible_and_swept_when_old(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    manifests, files = _in_folder(shared)
    with _store(tmp_path / "one", (manifests, files)) as store:
        record(store, "a")
        record(store, "b")
        assert store.flush(WAIT_S)
    tag = hashlib.sha256(key_of("b").encode()).hexdigest()
    manifests.remove([found.name for found in manifests.objects(tag)])
    with _store(tmp_path / "two", (manifests, files)) as store:
        _refresh(store)
        assert [template.id for template in store.templates(10)] == [recording_of("a")]
        assert store._shared is not None
        assert store._shared.objects.sweep() == 0, "another store may be uploading them"
        _age(shared, _DAY_S)
        assert store._shared.objects.sweep() == 4
        assert _serves(store, "a")


def test_the_bucket_evicts_what_was_not_used_for_longest_but_pinned(tmp_path: Path) -> None:
    shared, fake = tmp_path / "shared", FakeTime()
    with _store(*(tmp_path / "one", _in_folder(shared), fake.clock()), shared_budget_bytes=10 * SECTION_BYTES) as store:
        for name in "ab":
            record(store, name)
        store.pin(recording_of("a"), True)
        assert store.flush(WAIT_S)
        _age(shared, _HALF_HOUR_S)
        fake.now += _HALF_HOUR_S
        _refresh(store)
        record(store, "c")
        assert store.flush(WAIT_S)
        assert {template.id for template in store.templates(10)} == {recording_of("a"), recording_of("c")}
        assert len(list((shared / "sections").glob("??/*"))) == 2 * 4
        record(store, "d")
        assert store.flush(WAIT_S)
        assert _outcomes(store)["no_room"] > 0, "the others are pinned or new"
        assert _serves(store, "d"), "it is on the disk"


def test_a_template_used_now_outlives_one_used_twenty_minutes_ago(tmp_path: Path) -> None:
    shared, fake = tmp_path / "shared", FakeTime()
    with _store(*(tmp_path / "one", _in_folder(shared), fake.clock()), shared_budget_bytes=10 * SECTION_BYTES) as store:
        for name, idle_s in (("hot", _HALF_HOUR_S), ("cold", 1200.0)):
            record(store, name)
            assert store.flush(WAIT_S)
            for path in shared.glob("*/??/*"):
                os.utime(path, (path.stat().st_mtime - idle_s,) * 2)
            fake.now += idle_s
        _refresh(store)
        assert _serves(store, "hot")
        assert store.flush(WAIT_S)
        record(store, "new")
        assert store.flush(WAIT_S)
        assert {template.id for template in store.templates(10)} == {recording_of("hot"), recording_of("new")}


def test_a_tenth_of_all_calls_that_fails_loses_no_recording(
    server: s3.S3Server, proxy: s3.FailingProxy, tmp_path: Path
) -> None:
    bucket = server.bucket()
    proxy.failing = 0.1
    with _store(tmp_path / "one", _objects(bucket)) as store:
        for number in range(5):
            record(store, str(number))
        wait_until(lambda: store.flush(WAIT_S), "all to be written")
    with _store(tmp_path / "two", _objects(bucket)) as store:
        wait_until(lambda: len(store.templates(10)) == 5, "the list")
        for number in range(5):
            wait_until(lambda number=number: _tries(store, str(number)), "the template")  # type: ignore[misc]
    assert proxy.failed > 0


def _tries(store: ActivationStore, name: str) -> bool:
    with contextlib.suppress(BottegaError):
        return _serves(store, name)
    return False


def test_a_bucket_that_cannot_be_used_costs_neither_recordings_nor_edits(
    server: s3.S3Server, proxy: s3.FailingProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = server.bucket()
    with _store(tmp_path / "one", _objects(bucket)) as store:
        record(store, "there")
    proxy.refusal = "SlowDown"
    with _store(tmp_path / "two", _objects(bucket), memory_budget_bytes=0) as store:
        record(store, "a")
        wait_until(lambda: _outcomes(store)["failed"] >= 2, "two failures")
        assert _serves(store, "a")
        assert answer(store, "new").record, "it can be recorded"
        assert "S3" in store.statistics().shared_trouble or "credentials" in store.statistics().shared_trouble
        said = [record.message for record in caplog.records if "cannot be used now" in record.message]
        assert len(said) == 1
        proxy.refusal = ""
        wait_until(lambda: store.flush(WAIT_S), "the bucket to be used again")
        assert _serves(store, "there")
        assert not store.statistics().shared_trouble


def test_a_file_that_cannot_be_read_now_is_not_forgotten(
    server: s3.S3Server, proxy: s3.FailingProxy, tmp_path: Path
) -> None:
    bucket = server.bucket()
    with _store(tmp_path / "one", _objects(bucket)) as store:
        record(store, "a")
    with _store(tmp_path / "two", _objects(bucket), memory_budget_bytes=0) as store:
        _refresh(store)
        sections = _bring(store, "a")
        proxy.refusal = "AccessDenied"
        with pytest.raises(StorageUnavailable):
            read(store, sections[0].digest)
        requests = proxy.requests
        with pytest.raises(StorageUnavailable):
            read(store, sections[1].digest)
        assert proxy.requests == requests, "a moment ago it has failed"
        proxy.refusal = ""
        wait_until(lambda: _tries(store, "a"), "the bucket to be used again")


def test_a_slow_bucket_delays_neither_recordings_nor_questions(
    server: s3.S3Server, proxy: s3.FailingProxy, tmp_path: Path
) -> None:
    bucket = server.bucket()
    with _store(tmp_path / "one", _objects(bucket)) as store:
        record(store, "a")
    with _store(tmp_path / "two", _objects(bucket)) as store:
        _refresh(store)
        proxy.delay_s = 0.5
        first = answer(store, "a")
        assert (first.recording, first.record) == ("", False), "it is being brought back"
        send_sections(store, "b", range(2))
        store.complete(recording_header("b"), drawn_of("b"), "worker")
        wait_until(lambda: bool(answer(store, "b").recording), "the recording, which is on the disk")
        wait_until(lambda: bool(answer(store, "a").recording), "the template")
        proxy.delay_s = 0.0


def test_a_recording_whose_parts_are_lost_can_be_recorded_again(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with _store(tmp_path / "one", _in_folder(shared)) as store:
        record(store, "a")
    for path in (shared / "sections").glob("??/*"):
        path.unlink()
    with _store(tmp_path / "two", _in_folder(shared)) as store:
        _refresh(store)
        wait_until(lambda: answer(store, "a").record, "the store to know that it cannot be used")
        record(store, "a")
        assert store.flush(WAIT_S)
    with _store(tmp_path / "three", _in_folder(shared)) as store:
        _refresh(store)
        assert _serves(store, "a")
