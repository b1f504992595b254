"""How a template is recorded: by one worker, within bounds, and whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bottega.activations.store import writer
from bottega.activations.store.recordings import SectionIntake
from bottega.activations.store.settings import DropReason
from bottega.activations.store.store import ActivationStore
from bottega.addons.edits.wire import SectionLayout
from bottega.addons.edits.wire.pieces import SectionPieces
from bottega.caching.tiers import Tier
from bottega.clocks import Clock
from bottega.errors import Unavailable
from bottega.process import open_files
from bottega.v1 import activations_pb2 as pb
from tests.support.stored_templates import (
    ALL,
    LAYOUT,
    PROMPT,
    SECTION_BYTES,
    SHAPE,
    WAIT_S,
    answer,
    drawn_of,
    elements,
    grant,
    question_of,
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
    timestep_of,
)


@contextmanager
def _nothing_is_written(store: ActivationStore) -> Iterator[None]:
    may_write = threading.Event()

    def hold() -> None:
        may_write.wait(WAIT_S)

    store._writer._thread.post(hold)
    try:
        yield
    finally:
        may_write.set()


def test_what_one_worker_records_another_one_has(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        assert answer(store, "cat").record
        send_sections(store, "cat", [1, 0])
        send_sections(store, "cat", [0], half=0, prompt="", map=b"\x0f\x00\x00\x00")
        assert not answer(store, "cat", link="other").sections, "half a template is none"
        store.complete(recording_header("cat"), drawn_of("cat"), "worker")
        assert store.flush(WAIT_S)
        reply = store.answer(question_of("cat"), "other")
        found = reply.header
        assert (found.recording, found.record, found.seed) == (recording_of("cat"), False, 7)
        assert (found.latent_height, found.latent_width) == SHAPE[2:]
        assert [(info.key.timestep, info.key.half, info.prompt) for info in found.sections] == [
            (timestep_of(0), 0, ""),
            (timestep_of(0), 1, PROMPT),
            (timestep_of(1), 1, PROMPT),
        ], "in the order of the steps"
        assert [found.maps[info.map] for info in found.sections] == [b"\x0f\x00\x00\x00", ALL, ALL]
        assert [SectionLayout.from_wire(found.layouts[info.layout]) for info in found.sections] == [LAYOUT] * 3
        assert (len(found.layouts), len(found.maps)) == (1, 2)
        assert reply.drawn is not None
        assert bytes(reply.drawn.image_latent) == drawn_of("cat").image_latent
        assert bytes(reply.drawn.noise) == drawn_of("cat").noise
        for place, step in ((1, 0), (2, 1)):
            data, tier = read(store, found.sections[place].digest)
            assert elements(data) == [bytes(each) for each in tensors_of(f"cat {step}")]
            assert tier is Tier.MEMORY, "what has just come is not read from the disk"


def test_forwards_of_one_timestep_and_other_noise_are_two_sections(tmp_path: Path) -> None:
    """Samplers that round the timesteps of Karras' sigmas have such."""
    with running_store(tmp_path) as store:
        for step, noise_level in ((1, 0.036), (0, 0.045)):
            key = pb.SectionKey(timestep=1.0, noise_level=noise_level, half=1)
            send_sections(store, "cat", [step], section=key)
        store.complete(recording_header("cat"), drawn_of("cat"), "worker")
        assert store.flush(WAIT_S)
    with running_store(tmp_path) as store:
        found = answer(store, "cat").sections
        assert [info.key.noise_level for info in found] == [0.045, 0.036], "in the order of the steps"
        for step, info in enumerate(found):
            assert elements(read(store, info.digest)[0]) == [bytes(each) for each in tensors_of(f"cat {step}")]
        assert [template.steps for template in store.templates(10)] == [2]


def test_a_template_without_a_latent_of_its_own_has_none(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "cat", has_drawn=False, seed=0)
        reply = store.answer(question_of("cat"), "other")
        assert (reply.header.has_drawn, reply.drawn, len(reply.header.sections)) == (False, None, 3)


def test_one_worker_records_while_it_lives(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        assert answer(store, "cat", link="first").record
        assert answer(store, "cat", link="first").record, "it may ask again"
        assert not answer(store, "cat", link="second").record
        assert not answer(store, "dog", link="second", would_record=False).record
        send_sections(store, "cat", range(3), link="second")
        assert store.statistics().dropped["not_granted"] == 3
        send_sections(store, "cat", range(3), link="first")
        store.flush(WAIT_S)
        assert len(section_paths(tmp_path)) == 3
        store.link_ended("first")
        store.flush(WAIT_S)
        assert section_paths(tmp_path) == []
        assert store.statistics().disk_bytes == 0
        assert answer(store, "cat", link="second").record
        store.complete(recording_header("cat"), drawn_of("cat"), "first")
        store.flush(WAIT_S)
        assert not answer(store, "cat", link="third").sections
        record(store, "cat", link="second")
        assert len(answer(store, "cat", link="third").sections) == 3


def test_what_was_sent_whole_is_kept_though_its_worker_goes(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        for _ in range(20):
            send_sections(store, "cat", range(3))
            store.complete(recording_header("cat"), drawn_of("cat"), "worker")
            store.link_ended("worker")
            assert store.flush(WAIT_S)
            assert len(answer(store, "cat").sections) == 3
            assert store.drop("") == 1


def test_a_worker_that_begins_anew_loses_what_it_had_begun(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        send_sections(store, "cat", range(3))
        send_sections(store, "cat", range(2), content="new", recording="12" * 16)
        store.complete(recording_header("cat", recording="12" * 16), drawn_of("cat"), "worker")
        store.flush(WAIT_S)
        found = answer(store, "cat")
        assert (found.recording, len(found.sections)) == ("12" * 16, 2)
        assert len(section_paths(tmp_path)) == 3, "two sections, and what it was drawn with"


def test_a_recording_of_nothing_is_none(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        assert answer(store, "cat").record
        store.complete(recording_header("cat"), drawn_of("cat"), "worker")
        send_sections(store, "dog", range(2))
        store.complete(recording_header("dog", latent_height=99, has_drawn=False), None, "worker")
        store.flush(WAIT_S)
        assert store.statistics().templates == 0
        assert store.statistics().dropped["unfit"] + store.statistics().dropped["not_granted"] == 2
        assert section_paths(tmp_path) == []
        assert answer(store, "cat", link="other").record


def test_a_section_takes_the_place_of_another_in_a_template_that_is_there(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "cat")
        before = answer(store, "cat")
        lease = store.fetch(before.sections[1].digest).result(WAIT_S)
        send_sections(store, "cat", [1], link="other", content="grown", prompt="", map=b"\xff" * 3 + b"\x00")
        send_sections(store, "cat", [3], link="other")
        assert store.flush(WAIT_S)
        after = answer(store, "cat")
        assert [info.prompt for info in after.sections] == [PROMPT, "", PROMPT, PROMPT]
        assert elements(read(store, after.sections[1].digest)[0]) == [bytes(each) for each in tensors_of("grown 1")]
        kept = os.pread(lease.descriptor, lease.size_bytes, 0)
        assert elements(kept) == [bytes(each) for each in tensors_of("cat 1")], "who has it keeps it"
        store.give_back(lease)
        with pytest.raises(Unavailable, match="no longer exists"):
            read(store, before.sections[1].digest)
        assert len(section_paths(tmp_path)) == 5, "four sections, and what it was drawn with"
        assert store.statistics().disk_bytes == sum(path.stat().st_size for path in section_paths(tmp_path))
    with running_store(tmp_path) as store:
        again = answer(store, "cat")
        assert [info.digest for info in again.sections] == [info.digest for info in after.sections]
        assert [again.maps[info.map] for info in again.sections] == [ALL, b"\xff" * 3 + b"\x00", ALL, ALL]


def test_the_same_section_once_more_is_not_lost_with_itself(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "cat")
        send_sections(store, "cat", range(3), link="other")
        store.flush(WAIT_S)
        for info in answer(store, "cat").sections:
            read(store, info.digest)
        # Two forwards that put out the same are one file.
        send_sections(store, "cat", [0], half=0, content="cat")
        store.flush(WAIT_S)
        found = answer(store, "cat")
        assert found.sections[0].digest == found.sections[1].digest
        assert len(section_paths(tmp_path)) == 4
        send_sections(store, "cat", [0], half=0, content="other")
        store.flush(WAIT_S)
        assert len(section_paths(tmp_path)) == 5
        assert elements(read(store, found.sections[1].digest)[0]) == [bytes(each) for each in tensors_of("cat 0")]


def test_a_question_for_one_recording_is_not_answered_with_another(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "cat")
        assert answer(store, "cat", recording=recording_of("cat")).sections
        found = answer(store, "cat", recording="12" * 16)
        assert (found.recording, len(found.sections), found.record) == ("", 0, False)
        assert (store.statistics().hits, store.statistics().misses) == (1, 1)


def test_more_than_may_wait_is_dropped_and_the_rest_is_of_use(tmp_path: Path) -> None:
    with running_store(tmp_path, max_waiting_bytes=4 * SECTION_BYTES) as store:
        send_sections(store, "cat", range(200))
        store.complete(recording_header("cat"), drawn_of("cat"), "worker")
        store.flush(WAIT_S)
        figures = store.statistics()
        assert figures.dropped["busy"] + figures.recorded_sections == 200
        assert figures.recorded_sections >= 4
        assert (figures.waiting, figures.waiting_bytes) == (0, 0)
        found = answer(store, "cat")
        assert len(found.sections) == figures.recorded_sections
        for info in found.sections:
            read(store, info.digest)


def test_sections_that_wait_have_a_part_of_the_descriptors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SHARE_OF_OPEN_FILES", 4 / open_files.limit())
    with running_store(tmp_path) as store:
        with _nothing_is_written(store):
            send_sections(store, "cat", range(20))
            assert store.statistics().waiting == 4
            store.complete(recording_header("cat"), drawn_of("cat"), "worker")
        assert store.flush(WAIT_S)
        assert store.statistics().dropped["busy"] == 16
        assert len(answer(store, "cat").sections) == 4, "its end waits where no further section may"


def test_one_section_that_is_larger_than_all_that_may_wait_is_taken(tmp_path: Path) -> None:
    with running_store(tmp_path, max_waiting_bytes=1) as store:
        send_sections(store, "cat", [0])
        store.flush(WAIT_S)
        assert store.statistics().recorded_sections == 1


def test_a_template_is_kept_within_the_budget_of_one(tmp_path: Path) -> None:
    with running_store(tmp_path, template_budget_bytes=3 * SECTION_BYTES) as store:
        assert answer(store, "cat").template_budget_bytes == 3 * SECTION_BYTES
        record(store, "cat", 5)
        assert len(answer(store, "cat").sections) == 3
        assert store.statistics().dropped["too_large"] == 2
        send_sections(store, "cat", [4])
        send_sections(store, "cat", [0], content="new")
        store.flush(WAIT_S)
        assert store.statistics().dropped["too_large"] == 3
        data = read(store, answer(store, "cat").sections[0].digest)[0]
        assert elements(data)[0] == bytes(tensors_of("new 0")[0]), "in place of another there is room"


_BROKEN_SECTIONS: tuple[dict[str, Any], ...] = (
    {"key": "AB" * 32},
    {"recording": "../../etc"},
    {"section": pb.SectionKey(timestep=float("nan"), noise_level=1.0)},
    {"section": pb.SectionKey(timestep=1.0)},
    {"section": pb.SectionKey(timestep=1.0, noise_level=float("inf"))},
    {"section": pb.SectionKey(timestep=1.0, noise_level=1.0, half=2)},
    {"section": pb.SectionKey(timestep=1.0, noise_level=1.0, controls=[8])},
    {"section": pb.SectionKey(timestep=1.0, noise_level=1.0, controls=[0] * 9)},
    {"prompt": "a prompt"},
    {"map": b""},
    {"map": ALL + b"\0"},
    {"map": b"\xff" * 4},
    {"latent_height": 0},
    {"latent_height": 1 << 14, "latent_width": 1 << 14},
)
_BROKEN_ENDS: tuple[dict[str, Any], ...] = (
    {"key": "x"},
    {"recording": ""},
    {"source": "a picture"},
    {"tenant": "t" * 201},
    {"model": "two\nlines"},
    {"model_hash": "no hex"},
    {"width": 0},
    {"latent_width": 1 << 15},
    {"latent_width": SHAPE[3] + 1},
    {"has_drawn": False},
)


def test_what_breaks_a_rule_is_refused(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        for changed in _BROKEN_SECTIONS:
            with pytest.raises(ValueError, match=r"hex|section|recording"):
                send_sections(store, "cat", [0], **changed)
        assert store.statistics().waiting == 0
        send_sections(store, "cat", [0])
        for changed in _BROKEN_ENDS:
            with pytest.raises(ValueError, match=r"recording|template|hex"):
                store.complete(recording_header("cat", **changed), drawn_of("cat"), "worker")
        for changed in ({"key": ""}, {"recording": "12"}, {"source": "x"}):
            with pytest.raises(ValueError, match="hex"):
                answer(store, "cat", **changed)


def test_a_section_with_other_bytes_than_it_says_is_refused(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        intake = _begun(store, "cat")
        with pytest.raises(ValueError, match="does not match the shapes"):
            intake.write(0, 0, memoryview(b"".join(tensors_of("cat")) + b"x"))
        intake.drop(DropReason.UNFIT)
        assert (store.statistics().waiting, store.statistics().waiting_bytes) == (0, 0)


def test_no_template_is_more_than_an_answer_has_room_for(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        for number in range(20):
            layout = SectionLayout.of([(f"block.{number}", (4, 4))])
            grant(store, "cat")
            take_section(store, section_header("cat", number), layout, tensors_of("x", layout), "worker")
        for number in range(100):
            valid = bytes([number, 1, 2, 4])
            grant(store, "dog")
            take_section(store, section_header("dog", number, map=valid), LAYOUT, tensors_of(f"{number}"), "worker")
        for name in ("cat", "dog"):
            store.complete(recording_header(name), drawn_of(name), "worker")
        store.flush(WAIT_S)
        assert (len(answer(store, "cat").sections), len(answer(store, "dog").sections)) == (16, 64)
        assert store.statistics().dropped["too_large"] == 4 + 36


def test_one_worker_records_a_bounded_number_at_once(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        granted = [answer(store, f"template {number}").record for number in range(100)]
        assert granted == [True] * 64 + [False] * 36
        assert answer(store, "template 70", link="other").record


def test_nothing_is_recorded_without_a_budget(tmp_path: Path) -> None:
    with running_store(tmp_path, disk_budget_bytes=0) as store:
        assert not answer(store, "cat").record
        record(store, "cat")
        assert store.statistics().templates == 0
        assert store.statistics().trouble == "", "no disk has failed"


def _begun(store: ActivationStore, name: str, step: int = 0) -> SectionIntake:
    grant(store, name)
    intake = store.begin_section(section_header(name, step), LAYOUT, "worker")
    assert isinstance(intake, SectionIntake)
    return intake


def test_a_section_that_comes_in_any_pieces_is_the_same(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        for step, max_bytes in enumerate((1, 7, 64, 10_000)):
            intake, pieces, views = _begun(store, "cat", step), SectionPieces(LAYOUT), tensors_of(f"cat {step}")
            while not pieces.done:
                tensor, start = pieces.first
                taken = pieces.take(max_bytes)
                chunk = b"".join(views[each.tensor][each.start : each.start + each.size_bytes] for each in taken)
                intake.write(tensor, start, memoryview(chunk))
        store.complete(recording_header("cat"), drawn_of("cat"), "worker")
        assert store.flush(WAIT_S)
        found = [elements(read(store, info.digest)[0]) for info in answer(store, "cat").sections]
        assert found == [[bytes(each) for each in tensors_of(f"cat {step}")] for step in range(4)]


def test_a_chunk_that_is_not_the_next_is_refused(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        intake = _begun(store, "cat")
        for tensor, start in ((1, 0), (0, 1), (0, -1), (-1, 0), (3, 0)):
            with pytest.raises(ValueError, match="does not begin where"):
                intake.write(tensor, start, memoryview(b"xx"))
        intake.write(0, 0, memoryview(b"xx"))
        with pytest.raises(ValueError, match="does not begin where"):
            intake.write(0, 0, memoryview(b"xx"))
        intake.drop(DropReason.ABANDONED)
        assert (store.statistics().waiting, store.statistics().waiting_bytes) == (0, 0)


def test_a_section_of_which_nothing_more_comes_is_given_up(tmp_path: Path) -> None:
    now = [1000.0]
    clock = Clock(monotonic=lambda: now[0], wall=lambda: now[0])
    with running_store(tmp_path, clock=clock, record_idle_s=10.0) as store:
        intake = _begun(store, "cat")
        for place in range(2):
            intake.write(place, 0, tensors_of("cat")[place])
            now[0] += 9.0
            intake.expire(store.record_idle_s)
            assert not answer(store, "cat", link="other").record, "it is still coming"
        assert store.statistics().waiting_bytes == LAYOUT.size_bytes
        now[0] += 2.0
        intake.expire(store.record_idle_s)
        figures = store.statistics()
        assert (intake.is_open, figures.waiting, figures.waiting_bytes) == (False, 0, 0)
        assert figures.dropped["abandoned"] == 1
        assert answer(store, "cat", link="other").record
