"""What a worker gives activation stores to keep: as it is recorded, within a budget, and never at the engine's cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.addons.edits.engine.recordings.source import TemplateQuery
from bottega.addons.edits.wire import messages
from bottega.v1.activations_pb2 import AbandonHeader, RecordingHeader, SectionHeader, TemplateAnswer
from tests.fakes.scripted_activation_store import ScriptedStore, Sent
from tests.support.stored_activations import (
    KEY,
    RECORDING,
    SHAPE,
    drawn,
    drawn_template,
    outputs,
    section,
    settings,
    step_key,
    valid_map,
    worker,
)
from tests.support.waiting import EVENTUALLY_S, wait_until

STEP_BYTES = sum(tensor.nbytes for tensor in outputs(0).values())
# The engine's thread leaves something for another one to do.
AT_ONCE_S = 5.0


@pytest.fixture(params=["in its memory", "in bytes"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ScriptedStore]:
    made = ScriptedStore("one", folder=tmp_path if request.param == "in its memory" else None)
    yield made
    made.close()


@pytest.fixture
def far() -> Iterator[ScriptedStore]:
    made = ScriptedStore("one")
    yield made
    made.close()


def sent(store: ScriptedStore) -> Sent:
    return store.sent.get(timeout=EVENTUALLY_S)


def test_sections_come_while_they_are_recorded_and_the_end_when_it_is_whole(store: ScriptedStore) -> None:
    with worker(store) as here:
        here.ask()
        begun = here.source.begin(KEY, SHAPE, drawn_template(), origin="ef" * 32)
        assert begun is not None
        for place in range(2):
            here.add(begun, place)
            come = sent(store)
            assert isinstance(come.header, SectionHeader)
            assert (come.header.recording, come.header.key) == (begun.id, KEY.digest)
            assert come.header.section.timestep == step_key(place).timestep
            assert (come.header.section.half, come.header.prompt) == (1, "12" * 32)
            assert (come.header.latent_height, come.header.latent_width) == SHAPE
            assert list(come.tensors) == list(outputs(0))
            assert all(torch.equal(tensor, outputs(place)[name]) for name, tensor in come.tensors.items())
        assert store.sent.empty()
        here.source.complete(begun)
        end = sent(store)
        assert end.header == RecordingHeader(
            recording=begun.id,
            key=KEY.digest,
            source="ef" * 32,
            tenant="t",
            digest=KEY.template,
            model="m",
            model_hash=KEY.model_hash,
            dtype="float32",
            width=48,
            height=32,
            latent_height=4,
            latent_width=6,
            has_drawn=True,
            seed=3,
        )
        assert end.drawn is not None
        assert (end.drawn.image_latent, end.drawn.noise) == (drawn().image_latent, drawn().noise)
        wait_until(lambda: here.counts["uploaded"] == 1, "the count")
        assert here.counts["upload_bytes"] == 2 * STEP_BYTES


def test_who_may_not_record_keeps_it_to_itself(far: ScriptedStore) -> None:
    far.header = TemplateAnswer(record=False, template_budget_bytes=7)
    with worker(far) as here:
        begun = here.record()
        assert begun.budget_bytes == 7
        assert here.found() is begun
        far.header = TemplateAnswer(record=True)
        here.record(key=replace(KEY, template="ee" * 32))
        come = sent(far)
        assert isinstance(come.header, SectionHeader)
        assert come.header.recording != begun.id


def test_one_that_is_given_up_is_abandoned(far: ScriptedStore) -> None:
    with worker(far) as here:
        here.ask()
        begun = here.source.begin(KEY, SHAPE)
        assert begun is not None
        here.add(begun, 0)
        sent(far)
        here.source.abandon(begun)
        assert sent(far).header == AbandonHeader(recording=begun.id, key=begun.key.digest)
        assert here.find() is None


def test_beyond_the_budget_of_bytes_sections_are_dropped_and_nothing_waits(far: ScriptedStore) -> None:
    """A store that does not read: its thread is held while it answers."""
    reading = threading.Event()
    with worker(far, made=settings(upload_bytes=2 * STEP_BYTES, budget_bytes=64 * STEP_BYTES)) as here:
        here.ask()
        begun = here.source.begin(KEY, SHAPE)
        assert begun is not None
        far.reply = lambda *_: _hold(reading)
        here.source.ask(_query())
        wait_until(lambda: far.questions.qsize() == 2, "the question that holds it")
        began_s = time.monotonic()
        for place in range(64):
            here.add(begun, place)
        here.source.complete(begun)
        assert time.monotonic() - began_s < AT_ONCE_S
        dropped = here.counts["upload_dropped_full"]
        assert dropped > 32
        reading.set()
        come: list[Sent] = []
        while not come or isinstance(come[-1].header, SectionHeader):
            come.append(sent(far))
        assert isinstance(come[-1].header, RecordingHeader)
        assert len(come) - 1 == 64 - dropped, "what has come is of use"
        assert here.found() is begun
        assert len(begun.steps) == 64


def test_what_was_being_recorded_when_a_store_is_lost_it_is_given_when_it_is_back(far: ScriptedStore) -> None:
    with worker(far) as here:
        here.ask()
        begun = here.source.begin(KEY, SHAPE)
        assert begun is not None
        here.add(begun, 0)
        sent(far)
        for link in far.handlers:
            assert link.connection.link is not None
            link.connection.link.close()
        wait_until(lambda: here.counts.get("upload_dropped_lost", 0) == 1, "the end of the link")
        wait_until(lambda: here.source.linked == 1, "the link, again")
        here.add(begun, 1)
        here.source.complete(begun)
        assert far.sent.empty(), "the store knows nothing of it"
        assert here.found() is begun
        come = [sent(far).header for _ in range(3)]
        assert [type(each) for each in come] == [SectionHeader, SectionHeader, RecordingHeader]
        asked = far.questions.qsize()
        assert here.found() is begun
        assert far.questions.qsize() == asked, "the store has it"


def test_of_what_the_store_takes_nothing_more_is_sent_and_it_is_asked_again(far: ScriptedStore) -> None:
    with worker(far) as here:
        own = here.record(1)
        assert [type(sent(far).header) for _ in range(2)] == [SectionHeader, RecordingHeader]
        far.say(messages.abandon_message(own.id, own.key.digest))
        wait_until(here.counted("upload_dropped_not_granted"), "the store's word")
        here.add(own, 0, seed=9)
        assert far.sent.empty()
        assert here.found() is own
        assert [type(sent(far).header) for _ in range(2)] == [SectionHeader, RecordingHeader]


def test_what_was_copied_of_one_that_the_store_has_lost_it_is_given_back(far: ScriptedStore) -> None:
    far.put(RECORDING, section(0), section(1), section(2))
    with worker(far) as here:
        recording = here.found()
        for place in (0, 1):
            step = recording.steps[step_key(place)]
            step.request(list(step.names)[: 3 - place])
            assert step.wait(list(step.names)[2 - place], EVENTUALLY_S)
        here.source.release(recording)
        far.put(RECORDING, section(2))
        assert here.found() is recording
        come = sent(far)
        assert isinstance(come.header, SectionHeader)
        assert come.header.section.timestep == step_key(0).timestep
        assert all(torch.equal(tensor, outputs(0)[name]) for name, tensor in come.tensors.items())
        assert list(recording.steps) == [step_key(0), step_key(2)], "what is not here is recorded anew"


def test_what_an_edit_adds_to_a_stored_recording_others_are_given(store: ScriptedStore) -> None:
    store.put(RECORDING, section(0))
    with worker(store) as here:
        recording = here.found()
        here.add(recording, 5)
        come = sent(store)
        assert isinstance(come.header, SectionHeader)
        assert come.header.recording == RECORDING
        step = recording.steps[step_key(0)]
        step.request(list(step.names))
        assert all(step.wait(name, EVENTUALLY_S) for name in step.names)
        copy = recording.writable(step_key(0))
        assert copy is not None
        recording.grow(copy, ~valid_map(0), prompt="")
        here.source.changed(recording, step_key(0))
        grown = sent(store)
        assert isinstance(grown.header, SectionHeader)
        assert grown.header.section.timestep == step_key(0).timestep
        assert grown.header.map == b"\xff\xff\xff"


def test_a_step_that_is_replaced_while_it_waits_is_sent_once(far: ScriptedStore) -> None:
    reading = threading.Event()
    with worker(far) as here:
        begun = here.record(1)
        assert [type(sent(far).header) for _ in range(2)] == [SectionHeader, RecordingHeader]
        far.reply = lambda *_: _hold(reading)
        here.source.ask(_query())
        wait_until(lambda: far.questions.qsize() == 2, "the question that holds it")
        for seed in range(20, 40):
            here.add(begun, 0, seed=seed)
        reading.set()
        seeds: list[int] = []
        while not seeds or seeds[-1] != 39:
            come = sent(far)
            seeds += [
                seed for seed in range(20, 40) if torch.equal(come.tensors["up.block"], outputs(seed)["up.block"])
            ]
        assert len(seeds) < 20


def _query() -> TemplateQuery:
    return TemplateQuery(key=replace(KEY, template="99" * 32))


def _hold(reading: threading.Event) -> None:
    reading.wait(EVENTUALLY_S)
