"""What is known of an image elsewhere is waited for, but not for long, and nobody else waits for it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from bottega import kinds
from bottega.addons.edits.engine.recordings.source import MemoryActivations, TemplateQuery
from bottega.engine.events import JobStarted
from bottega.engine.job import EngineOrder
from bottega.engine.spans import StoreWork
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.v1.activations_pb2 import ActivationsOrder, EditDecision
from tests.samples.masked_edits import SPEC, EditDesk, masked_order

ORDER = masked_order(key="edit")
SOURCE = "5a" * 32


class _Asked(MemoryActivations):
    """Answers when a test says so. queries: what was asked."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.queries: list[TemplateQuery] = []
        self.answers: list[Future[StoreWork | None]] = []

    def ask(self, query: TemplateQuery) -> Future[StoreWork | None]:
        self.queries.append(query)
        self.answers.append(Future())
        return self.answers[-1]


class AskingDesk(EditDesk):
    """clock_s: the engine's; it stands still unless a test moves it."""

    source: _Asked

    def __init__(self, model: Model) -> None:
        self.clock_s = 100.0
        super().__init__(model, clock=lambda: self.clock_s)

    def make_source(self, budget_bytes: int) -> MemoryActivations:
        return _Asked(budget_bytes)


@pytest.fixture
def desk(model: Model) -> AskingDesk:
    return AskingDesk(model)


def test_an_edit_waits_for_the_answer_and_others_do_not(desk: AskingDesk) -> None:
    plain = EngineOrder(key="plain", spec=ResolvedSpec(prompt="a star", num_inference_steps=2, width=64, height=64))
    edit, other = desk.submit(ORDER), desk.submit(plain)
    for _ in range(5):
        desk.turn()
    assert not edit.all(JobStarted)
    assert other.ended
    desk.source.answers[0].set_result(None)
    desk.run()
    assert edit.record.provenance.mask.recorded
    assert not edit.record.seconds.get(kinds.ACTIVATIONS)


def test_without_an_answer_within_a_second_all_is_computed(desk: AskingDesk) -> None:
    edit = desk.submit(ORDER)
    desk.turn()
    desk.clock_s += 0.9
    desk.turn()
    assert not edit.all(JobStarted)
    desk.clock_s += 0.2
    desk.turn()
    assert edit.all(JobStarted)
    assert desk.source.answers[0].cancelled()
    desk.run()
    assert edit.record.seconds[kinds.ACTIVATIONS] == pytest.approx(1.1)


def test_what_an_earlier_attempt_has_decided_is_waited_for_longer(desk: AskingDesk) -> None:
    decision = EditDecision(recording="ab" * 16, seed=5).SerializeToString()
    edit = desk.submit(replace(ORDER, decisions={kinds.ACTIVATIONS: decision}))
    assert desk.source.queries[0].recording == "ab" * 16
    assert not desk.source.queries[0].would_record
    desk.turn()
    desk.clock_s += 2.0
    desk.turn()
    assert not edit.all(JobStarted)
    desk.clock_s += 4.0
    desk.turn()
    assert edit.all(JobStarted)


def test_an_attempt_that_began_with_its_own_noise_asks_nothing(desk: AskingDesk) -> None:
    desk.submit(replace(ORDER, decisions={kinds.ACTIVATIONS: EditDecision().SerializeToString()}))
    assert not desk.source.queries


def test_tenant_and_source_of_an_order_are_told(desk: AskingDesk) -> None:
    said = ActivationsOrder(tenant="someone", source=SOURCE).SerializeToString()
    desk.submit(replace(ORDER, addons={kinds.ACTIVATIONS: said}))
    desk.submit(replace(ORDER, key="nobody's"))
    one, other = desk.source.queries
    assert (one.key.tenant, one.origin) == ("someone", SOURCE)
    assert (other.key.tenant, other.origin) == ("", "")
    assert one.key.digest != other.key.digest
    for answer in desk.source.answers:
        answer.set_result(None)
    desk.run()
    assert {each.origin for each in desk.source.recordings} == {SOURCE, ""}


def test_a_picture_that_is_kept_for_editing_asks_for_its_own_template(desk: AskingDesk) -> None:
    spec = replace(SPEC, strength=None, num_images=2, keep_for_editing=True)
    desk.submit(EngineOrder(key="kept", spec=spec))
    assert len({query.key.template for query in desk.source.queries}) == 2
    assert all(query.would_record for query in desk.source.queries)


@pytest.mark.parametrize(
    "order",
    [b"\xff", ActivationsOrder(source="x"), ActivationsOrder(tenant="t" * 129)],
    ids=["torn", "source", "tenant"],
)
def test_an_order_that_nobody_could_have_given_is_refused(desk: AskingDesk, order: bytes | ActivationsOrder) -> None:
    said = order if isinstance(order, bytes) else order.SerializeToString()
    with pytest.raises(InvalidRequest):
        desk.engine.submit(replace(ORDER, addons={kinds.ACTIVATIONS: said}))
