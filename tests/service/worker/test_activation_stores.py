"""A worker's links to activation stores: what it is told, what it loads, and that nothing it waits for lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.addons.edits.engine.recordings.recording import Recording
from bottega.addons.edits.engine.recordings.source import TemplateQuery
from bottega.addons.edits.engine.recordings.step import RecordedStep
from bottega.addons.edits.worker.load_meter import LoadMeter
from bottega.addons.edits.worker.stored_step import SectionFetch, StoredStep
from bottega.addons.edits.worker.template import AnsweredSection
from bottega.v1.activations_pb2 import BlockProfile, SectionRequest
from tests.fakes.scripted_activation_store import ScriptedLink, ScriptedStore, chunk_message
from tests.support.stored_activations import (
    KEY,
    RECORDING,
    SHAPE,
    SHAPES,
    Worker,
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

NAMES = tuple(SHAPES)
# What returns at once may still have to wait for the processor.
AT_ONCE_S = 5.0


@pytest.fixture(params=["in its memory", "in chunks"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ScriptedStore]:
    """Of this host, or of another one."""
    made = ScriptedStore("one", folder=tmp_path if request.param == "in its memory" else None)
    yield made
    made.close()


@pytest.fixture
def far() -> Iterator[ScriptedStore]:
    made = ScriptedStore("one")
    yield made
    made.close()


def load(recording: Recording, place: int, *names: str) -> RecordedStep:
    """Has these of a step loaded; all of it without names."""
    step = recording.steps[step_key(place)]
    step.request(names or NAMES)
    for name in names or NAMES:
        assert step.wait(name, EVENTUALLY_S)
    return step


def is_equal(step: RecordedStep, seed: int) -> bool:
    """Whether it is what was recorded."""
    found = {name: step.get(name) for name in step.names}
    return all(
        tensor is not None and torch.equal(tensor, outputs(seed)[name]) for name, tensor in found.items()
    ) and list(found) == list(NAMES)


def test_what_a_store_has_is_found_and_loaded_as_it_was_recorded(store: ScriptedStore) -> None:
    profile = BlockProfile(model_hash="ab" * 32, forward_s=0.5)
    first, second = section(0, prompt="12" * 32), section(1)
    store.put(RECORDING, first, second, drawn=drawn(), seed=3, template_budget_bytes=99, profile=profile)
    with worker(store) as here:
        recording = here.found()
        asked = store.questions.get(timeout=EVENTUALLY_S)
        assert (asked.key, asked.source, asked.would_record) == (KEY.digest, "ef" * 32, True)
        assert (recording.id, recording.shape, recording.origin) == (RECORDING, SHAPE, "ef" * 32)
        assert (recording.budget_bytes, recording.profile) == (99, profile)
        assert recording.drawn is not None
        assert torch.equal(recording.drawn.image_latent, drawn_template().image_latent)
        assert torch.equal(recording.drawn.noise, drawn_template().noise)
        assert recording.drawn.seed == 3
        assert list(recording.steps) == [step_key(0), step_key(1)]
        one, two = recording.steps.values()
        assert (one.prompt, two.prompt, one.writable) == ("12" * 32, "", False)
        assert torch.equal(one.valid, valid_map(0))
        assert (tuple(one.names), one.size_bytes) == (NAMES, sum(map(one.bytes_of, NAMES)))
        assert not any(one.get(name) is not None for name in NAMES), "nobody has requested it"
        assert is_equal(load(recording, 0), 0)
        assert is_equal(load(recording, 1), 1)
        assert two.bytes_of("nothing") == 0
        assert here.counts["loads"] == 2
        assert here.source.load_bytes_per_s


def test_of_a_store_of_this_host_nothing_is_copied_and_it_is_let_go_with_its_last_reader(tmp_path: Path) -> None:
    store = ScriptedStore("one", folder=tmp_path)
    store.put(RECORDING, section(0))
    with worker(store, made=settings(budget_bytes=1)) as here:
        recording = here.found()
        step = load(recording, 0, NAMES[1])
        assert is_equal(step, 0), "the others have come with it"
        assert (step.held_bytes, recording.size_bytes) == (0, 0)
        here.source.release(recording)
        assert step.get(NAMES[1]) is None
        assert not here.source.recordings


def test_what_was_copied_counts_and_stays_for_the_next_edit(far: ScriptedStore) -> None:
    far.put(RECORDING, section(0))
    with worker(far) as here:
        recording = here.found()
        step = load(recording, 0)
        assert step.held_bytes == recording.size_bytes == step.size_bytes
        here.source.release(recording)
        far.questions.get(timeout=EVENTUALLY_S)
        assert here.found() is recording
        assert far.questions.empty(), "all of it is here"
        assert is_equal(step, 0)
        assert here.source.drop("") == 0
        here.source.release(recording)
        assert here.source.drop("") == 1


def test_tensors_are_used_one_by_one_in_the_order_in_which_they_were_requested(far: ScriptedStore) -> None:
    first = section(0)
    far.put(RECORDING, first)
    held: list[tuple[ScriptedLink, int, SectionRequest]] = []
    far.fetched = lambda *asked: held.append(asked)
    with worker(far) as here:
        step = here.found().steps[step_key(0)]
        step.request([NAMES[2], NAMES[0]])
        step.request([NAMES[0], NAMES[1]])
        wait_until(lambda: len(held) == 2, "both requests")
        assert [list(request.tensors) for _, _, request in held] == [[2, 0], [1]]
        assert not step.wait(NAMES[2], 0.05), "not yet"
        far.send_tensor(held[0][0], held[0][1], first, 2)
        assert step.wait(NAMES[2], EVENTUALLY_S)
        assert step.get(NAMES[0]) is None
        assert not step.wait(NAMES[0], 0.05)
        far.send_tensor(held[1][0], held[1][1], first, 1)
        far.send_tensor(held[0][0], held[0][1], first, 0)
        assert step.wait(NAMES[0], EVENTUALLY_S)
        assert is_equal(step, 0)
        assert here.counts["waits"] >= 3


def test_half_a_tensor_is_none(far: ScriptedStore) -> None:
    first = section(0)
    far.put(RECORDING, first)

    def send_half(link: ScriptedLink, number: int, _request: SectionRequest) -> None:
        data = first.tensors[NAMES[0]].numpy().tobytes()[:48]
        link.connection.send(chunk_message(number, tensor=0, start=0, data=data))

    far.fetched = send_half
    with worker(far) as here:
        step = here.found().steps[step_key(0)]
        step.request(NAMES[:1])
        wait_until(lambda: here.counts["load_bytes"] == 48, "half of it")
        assert step.get(NAMES[0]) is None
        assert not step.wait(NAMES[0], 0.05)
        far.close()
        assert not step.wait(NAMES[0], EVENTUALLY_S)
        assert (step.get(NAMES[0]), step.held_bytes) == (None, 0)


def test_what_has_no_room_is_not_requested(far: ScriptedStore) -> None:
    far.put(RECORDING, section(0))
    small = settings(budget_bytes=sum(outputs(0)[name].nbytes for name in NAMES[:1]))
    with worker(far, made=small) as here:
        recording = here.found()
        step = recording.steps[step_key(0)]
        step.request(NAMES[1:])
        assert not step.wait(NAMES[1], EVENTUALLY_S)
        assert here.counts["loads_without_room"] == 1
        assert load(recording, 0, NAMES[0]).get(NAMES[0]) is not None
        assert far.requests.qsize() == 1


def test_room_is_made_of_templates_that_nobody_uses(far: ScriptedStore) -> None:
    other = replace(KEY, template="ee" * 32)
    size_bytes = sum(tensor.nbytes for tensor in outputs(0).values())
    with worker(far, made=settings(budget_bytes=size_bytes)) as here:
        far.put(RECORDING, section(0))
        first = here.found()
        load(first, 0)
        here.source.release(first)
        far.put("0" * 31 + "2", section(0, key=other))
        second = here.found(other)
        assert is_equal(load(second, 0), 0)
        assert list(here.source.recordings) == [second]
        assert here.counts["evictions"] == 1


def test_a_section_that_is_refused_is_computed_and_the_others_are_loaded(store: ScriptedStore) -> None:
    gone = section(0)
    store.put(RECORDING, gone, section(1))
    del store.sections[gone.digest]
    with worker(store) as here:
        recording = here.found()
        step = recording.steps[step_key(0)]
        step.request(NAMES)
        assert not step.wait(NAMES[0], EVENTUALLY_S)
        step.request(NAMES)
        assert is_equal(load(recording, 1), 1)
        assert store.requests.qsize() == 2, "what is gone is not asked for again"
        assert (here.counts["loads_refused"], here.counts["loads"], step.held_bytes) == (1, 1, 0)


def test_what_is_on_its_way_when_a_store_is_lost_does_not_come_and_later_all_is_as_before(far: ScriptedStore) -> None:
    far.put(RECORDING, section(0), section(1))
    far.fetched = lambda *_: None
    with worker(far) as here:
        recording = here.found()
        step = recording.steps[step_key(0)]
        step.request(NAMES)
        far.requests.get(timeout=EVENTUALLY_S)
        began_s = time.monotonic()
        for link in far.handlers:
            assert link.connection.link is not None
            link.connection.link.close()
        assert not step.wait(NAMES[0], EVENTUALLY_S)
        assert time.monotonic() - began_s < AT_ONCE_S
        assert step.held_bytes == 0
        wait_until(lambda: here.source.linked == 1, "the link, again")
        far.fetched = far.send
        assert is_equal(load(recording, 0), 0)
        assert here.counts["loads_lost"] == 1


def test_what_nobody_needs_is_cancelled_and_what_comes_of_it_thrown_away(far: ScriptedStore) -> None:
    first = section(0)
    far.put(RECORDING, first)
    held: list[tuple[ScriptedLink, int, SectionRequest]] = []
    far.fetched = lambda *asked: held.append(asked)
    with worker(far) as here:
        recording = here.found()
        step = recording.steps[step_key(0)]
        step.request(NAMES)
        wait_until(lambda: bool(held), "the request")
        step.drop_requests()
        assert not step.wait(NAMES[0], EVENTUALLY_S)
        assert far.cancelled.get(timeout=EVENTUALLY_S) == held[0][1]
        far.send_tensor(held[0][0], held[0][1], first, 0)
        far.fetched = far.send
        assert load(recording, 0, NAMES[1]).get(NAMES[0]) is None
        assert step.held_bytes == step.bytes_of(NAMES[1])


def test_a_chunk_of_a_cancelled_request_is_none_of_a_newer_one() -> None:
    """The link's thread may have it in hand while the engine's cancels, and requests the same again."""
    link, room = _HeldLink(), _Room()
    step = StoredStep(_known(0), recording=Recording(KEY, SHAPE), link=link, room=room, edit=1)
    data = memoryview(bytearray(outputs(0)[NAMES[0]].numpy().tobytes()))
    step.request(NAMES[:1])
    step.give_up(link.fetches[0])
    step.request(NAMES[:1])
    step.take_chunk(link.fetches[0], 0, 0, data[:32])
    step.take_chunk(link.fetches[1], 0, 0, data[:48])
    step.take_chunk(link.fetches[0], 0, 32, data[32:])
    assert step.get(NAMES[0]) is None
    step.take_chunk(link.fetches[1], 0, 48, data[48:])
    assert torch.equal(_tensor(step), outputs(0)[NAMES[0]])


def test_what_another_edit_may_wait_for_is_not_cancelled(far: ScriptedStore) -> None:
    far.put(RECORDING, section(0))
    held: list[tuple[ScriptedLink, int, SectionRequest]] = []
    far.fetched = lambda *asked: held.append(asked)
    with worker(far) as here:
        recording = here.found()
        assert here.found() is recording
        step = recording.steps[step_key(0)]
        step.request(NAMES)
        wait_until(lambda: bool(held), "the request")
        step.drop_requests()
        far.send(*held[0])
        assert step.wait(NAMES[2], EVENTUALLY_S)


def test_sections_that_the_store_has_replaced_take_the_place_of_what_is_not_here(far: ScriptedStore) -> None:
    far.put(RECORDING, section(0), section(1))
    with worker(far) as here:
        recording = here.found()
        load(recording, 0)
        load(recording, 1, NAMES[0])
        here.source.release(recording)
        far.put(RECORDING, section(0), section(1, seed=11), section(2))
        assert here.found() is recording
        assert is_equal(recording.steps[step_key(0)], 0)
        assert is_equal(load(recording, 1), 11)
        assert is_equal(load(recording, 2), 2)


def test_one_in_use_is_never_replaced_by_another(far: ScriptedStore) -> None:
    """They were drawn from different noise: an edit takes from one of them."""
    other = "0" * 31 + "2"
    far.put(RECORDING, section(0), drawn=drawn())
    with worker(far) as here:
        recording = here.found()
        far.put(other, section(0, seed=9), drawn=drawn(9))
        assert here.found() is recording
        assert here.find(recording=other) is None
        here.source.release(recording)
        here.source.release(recording)
        assert here.found(recording=other).id == other


def test_where_a_store_is_away_questions_are_answered_at_once(far: ScriptedStore) -> None:
    with worker(far) as here:
        here.offers.there.clear()
        far.close()
        wait_until(lambda: not here.source.linked, "the end of the link")
        asked = here.source.ask(TemplateQuery(key=KEY))
        assert asked.done()
        own = here.record()
        assert here.found() is own


def test_the_first_question_waits_for_the_first_link(far: ScriptedStore) -> None:
    far.put(RECORDING, section(0))
    with worker(far, opens=False) as here:
        here.source.set_stores([far.address])
        assert here.found().id == RECORDING


def test_a_question_whose_store_is_lost_or_says_nothing_is_given_up(far: ScriptedStore) -> None:
    far.reply = lambda _number, _question: None
    with worker(far) as here:
        asked = here.source.ask(TemplateQuery(key=KEY))
        far.questions.get(timeout=EVENTUALLY_S)
        assert not asked.done()
        here.time.now += 60
        asked.result(EVENTUALLY_S)
        lost = here.source.ask(TemplateQuery(key=KEY))
        far.questions.get(timeout=EVENTUALLY_S)
        here.offers.there.clear()
        far.close()
        lost.result(EVENTUALLY_S)
        assert here.source.find(KEY) is None


def test_templates_are_spread_over_stores_and_only_those_of_a_lost_one_move() -> None:
    stores = [ScriptedStore(name) for name in ("one", "two", "three")]
    keys = [replace(KEY, template=f"{number:064x}") for number in range(24)]

    def asked(here: Worker) -> list[str]:
        """Return the name of the store that is asked for each template."""
        names = []
        for key in keys:
            here.ask(key)
            (name,) = (store.name for store in stores for _ in range(store.questions.qsize()))
            names.append(name)
            for store in stores:
                while store.questions.qsize():
                    store.questions.get()
        return names

    with worker(*stores) as here:
        before = asked(here)
        assert set(before) == {"one", "two", "three"}
        here.source.set_stores([store.address for store in stores if store.name != "two"])
        left = asked(here)
        assert "two" not in left
        assert [now for now, then in zip(left, before, strict=True) if then != "two"] == [
            then for then in before if then != "two"
        ]
        here.source.set_stores([store.address for store in stores])
        wait_until(lambda: here.source.linked == len(stores), "the link")
        assert asked(here) == before


def test_a_step_that_is_to_be_written_is_copied_first(store: ScriptedStore) -> None:
    store.put(RECORDING, section(0))
    with worker(store) as here:
        recording = here.found()
        assert recording.writable(step_key(0)) is None, "it is not here"
        shared = load(recording, 0)
        copy = recording.writable(step_key(0))
        assert copy is not None
        tensor = copy.get(NAMES[0])
        assert tensor is not None
        tensor.fill_(7)
        assert is_equal(shared, 0)
        assert isinstance(shared, StoredStep)


def test_a_recording_that_a_worker_uses_outlives_its_link(tmp_path: Path) -> None:
    store = ScriptedStore("one", folder=tmp_path)
    store.put(RECORDING, section(0))
    with worker(store) as here:
        recording = here.found()
        step = load(recording, 0)
        here.source.set_stores(())
        store.close()
        assert is_equal(step, 0)
        here.source.release(recording)
        other = replace(KEY, template="ee" * 32)
        own = here.record(key=other)
        assert here.found(other) is own


def _tensor(step: RecordedStep) -> torch.Tensor:
    tensor = step.get(NAMES[0])
    assert tensor is not None
    return tensor


class _HeldLink:
    """Keeps requests. A SectionLink."""

    shares = gives_whole = False

    def __init__(self) -> None:
        self.fetches: list[SectionFetch] = []

    def fetch(self, fetch: SectionFetch) -> bool:
        self.fetches.append(fetch)
        return True

    def cancel(self, step: StoredStep) -> None:
        """Nothing is on its way."""


class _Room:
    """For all that comes. A LoadRoom."""

    pinned = False

    def __init__(self) -> None:
        self.meter = LoadMeter()
        self.arrivals = threading.Condition()

    def make_room(self, _size_bytes: int, _turns: float) -> bool:
        return True

    def has_room(self, _size_bytes: int) -> bool:
        return True


def _known(place: int) -> AnsweredSection:
    said = section(place)
    return AnsweredSection(
        key=step_key(place), digest=said.digest, layout=said.layout, valid=valid_map(place), prompt=""
    )
