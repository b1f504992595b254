"""When a job asks for a cached latent and when it takes one: in time or never, the same picture whenever that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.cache.starts import format_start, prompt_digest
from bottega.engine.events import JobAdvanced, JobCheckpointed, JobDecided, JobStarted
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.errors import BottegaError, CacheEntryGone, InvalidRequest, NoCache
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheDecision
from bottega.v1.generation_pb2 import FIDELITY_EXACT, FIDELITY_FAST
from tests.fakes.fake_time import FakeTime
from tests.fakes.scripted_latents import TIMEOUT_S, Cached, Hit, ScriptedLatents, answer, cached, entry
from tests.support.addon_messages import starts_at
from tests.support.delayed_device import DelayedDevice
from tests.support.manual_engine import Drawing
from tests.support.schedulers import WITH_STATE
from tests.support.slow_cases import in_every_run

SPEC = ResolvedSpec(prompt="a small green circle", num_inference_steps=10, width=32, height=32, seed=5)
ORDER = cached(EngineOrder(key="job", spec=SPEC))
SHAPE = (4, 8, 8)


def latent(seed: int = 0) -> Tensor:
    """As one may look in the middle of a picture."""
    return 3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


QUICK = (SamplerKind.EULER_ANCESTRAL, SamplerKind.DPMPP_2M, SamplerKind.LMS, SamplerKind.HEUN)
HIT: Hit = (entry(1), 5, latent())
NAME = format_start(entry(1), 5)


def same(one: Drawing, other: Drawing) -> bool:
    return all(map(np.array_equal, one.pixels, other.pixels)) and all(map(torch.equal, one.latents, other.latents))


@pytest.fixture(scope="module")
def exact(model: Model) -> Drawing:
    return Cached(model).draw(replace(ORDER, addons={}))


@pytest.fixture(scope="module")
def started(model: Model) -> Drawing:
    """The picture from HIT, which was there before the first step."""
    return Cached(model, ScriptedLatents([answer(HIT)])).draw(ORDER)


@pytest.mark.parametrize("turn", [1, 3])
def test_a_picture_from_a_latent_is_the_same_byte_for_byte_whenever_that_comes(
    model: Model, exact: Drawing, started: Drawing, turn: int
) -> None:
    desk = Cached(model)
    drawing = desk.draw(ORDER, at_turn=turn, hits=[HIT])
    assert same(drawing, started)
    assert not same(drawing, exact)
    assert not drawing.record.exact
    assert desk.starts.counts["hits"] == 1
    # The first step after the latent is step 4; the picture had made `turn` of those before it.
    assert desk.starts.counts["steps_skipped"] == 4 - turn
    (start,) = drawing.record.provenance.cached_starts
    assert (start.from_step, start.skipped_steps) == (4, 4 - turn)
    assert [(told.pictures, told.skipped_steps) for told in desk.source.reports] == [(1, 4 - turn)]


@pytest.mark.parametrize("kind", in_every_run((kind for kind in WITH_STATE if kind is not SamplerKind.PNDM), QUICK))
def test_a_pin_makes_the_same_picture_again(model: Model, kind: SamplerKind) -> None:
    order = replace(ORDER, spec=replace(SPEC, sampler=kind))
    first = Cached(model).draw(order, at_turn=2, hits=[HIT])
    (start,) = first.record.provenance.cached_starts
    pinned = cached(order, pin=start.entry, record=False)
    desk = Cached(model, ScriptedLatents(pinned={HIT[:2]: HIT[2]}))
    again = desk.draw(pinned)
    assert same(first, again)
    # What is pinned is waited for, so that no step is made in vain.
    (restart,) = again.record.provenance.cached_starts
    start.skipped_steps, start.similarity = start.from_step, restart.similarity
    assert restart == start
    (asked,) = desk.source.asked
    assert [(each.entry, each.step) for each in asked.header.pinned] == [HIT[:2]]


def test_pndm_never_starts_from_a_cached_latent(model: Model) -> None:
    """It counts on earlier steps of its schedule."""
    order = replace(ORDER, spec=replace(SPEC, sampler=SamplerKind.PNDM))
    desk = Cached(model)
    assert not desk.draw(cached(order)).record.provenance.cached_starts
    assert not desk.source.asked
    with pytest.raises(InvalidRequest, match="a picture like this never starts from a cached latent"):
        desk.draw(cached(order, pin=format_start(*HIT[:2])))


def test_what_is_asked_says_what_the_job_is(model: Model) -> None:
    desk = Cached(model)
    desk.draw(cached(replace(ORDER, spec=replace(SPEC, num_images=3)), fidelity=FIDELITY_FAST, job="a job"))
    (asked,) = desk.source.asked
    said = asked.header
    assert (said.model_hash, said.steps, said.images, said.words) == (model.digest, 10, 3, 4)
    assert (said.fidelity, list(said.pinned), len(said.key)) == (FIDELITY_FAST, [], 64)
    assert said.prompt_digest == prompt_digest(SPEC.prompt)
    assert asked.embedding.dtype == torch.float32
    assert asked.embedding.shape == (model.text_encoders[1].config.projection_dim,)
    assert (said.job, said.repeated_steps) == ("a job", 1)
    ancestral = replace(ORDER, key="second", spec=replace(SPEC, sampler=SamplerKind.EULER_ANCESTRAL))
    desk.draw(ancestral)
    assert desk.source.asked[1].header.step_s > 0
    assert desk.source.asked[1].header.repeated_steps == 0


@pytest.mark.parametrize("turn", [4, 8, 1000])
def test_a_hit_that_comes_too_late_is_counted_and_changes_nothing(model: Model, exact: Drawing, turn: int) -> None:
    desk = Cached(model)
    drawing = desk.draw(ORDER, at_turn=turn, hits=[HIT])
    assert same(drawing, exact)
    assert drawing.record.exact
    assert drawing.all(JobDecided) == []
    assert desk.starts.counts["late_hits"] == (turn < 1000)
    assert desk.starts.counts["hits"] == 0
    # The store then lets the entry serve the prompt's next picture.
    told = [(each.pictures, each.prompt_digest, list(each.unused)) for each in desk.source.reports]
    assert told == [(0, prompt_digest(SPEC.prompt), [entry(1)])] * (turn < 1000)


@pytest.mark.parametrize(
    "order",
    [
        cached(ORDER, fidelity=FIDELITY_EXACT, record=False),
        cached(ORDER, read=False, record=False),
        replace(ORDER, addons={}),
        replace(ORDER, spec=replace(SPEC, prompt_2="a heart")),
        replace(ORDER, spec=replace(SPEC, prompt=" ".join(["star"] * 200))),
        replace(ORDER, spec=replace(SPEC, strength=0.9), image=torch.zeros(32, 32, 3, dtype=torch.uint8)),
    ],
    ids=["exact", "neither reads nor records", "no order", "second prompt", "truncated", "from a picture"],
)
def test_others_ask_nothing(model: Model, order: EngineOrder) -> None:
    desk = Cached(model, ScriptedLatents([answer(HIT)]))
    drawing = desk.draw(order)
    assert desk.source.asked == []
    assert drawing.record.exact


def test_an_exact_job_asks_only_whether_to_record(model: Model, exact: Drawing) -> None:
    desk = Cached(model, ScriptedLatents([answer(record=True)]))
    assert same(desk.draw(cached(ORDER, fidelity=FIDELITY_EXACT)), exact)
    assert [asked.header.images for asked in desk.source.asked] == [0]


def test_each_picture_starts_from_a_latent_of_its_own(model: Model) -> None:
    order = replace(ORDER, spec=replace(SPEC, num_images=3))
    desk = Cached(model, ScriptedLatents([answer(HIT, (entry(2), 3, latent(2)))]))
    drawing = desk.draw(order)
    starts = drawing.record.provenance.cached_starts
    assert [(start.image, start.entry, start.from_step) for start in starts] == [
        (0, format_start(entry(1), 5), 4),
        (1, format_start(entry(2), 3), 2),
    ]
    alone = Cached(model, ScriptedLatents([answer((entry(2), 3, latent(2)))]))
    second = alone.draw(replace(ORDER, spec=replace(SPEC, seed=SPEC.seed + 1)))
    assert torch.equal(drawing.latents[1], second.latents[0])
    from_noise = alone.draw(replace(ORDER, key="noise", addons={}, spec=replace(SPEC, seed=SPEC.seed + 2)))
    assert torch.equal(drawing.latents[2], from_noise.latents[0])


def test_the_decision_is_told_before_the_step_that_it_changes(model: Model) -> None:
    drawing = Cached(model, ScriptedLatents([answer(HIT)])).draw(ORDER)
    kinds_said = [type(event) for event in drawing.events]
    assert kinds_said.index(JobDecided) < kinds_said.index(JobStarted) < kinds_said.index(JobAdvanced)
    (decided,) = drawing.all(JobDecided)
    (start,) = CacheDecision.FromString(decided.decisions[kinds.CACHE]).starts
    assert (start.entry, start.step, start.similarity) == (entry(1), 5, 0.9)


def test_a_retried_attempt_starts_from_the_same_entries(model: Model) -> None:
    order = replace(ORDER, spec=replace(SPEC, num_images=2))
    first = Cached(model).draw(order, at_turn=3, hits=[HIT])
    decisions = first.all(JobDecided)[-1].decisions
    desk = Cached(model, ScriptedLatents(pinned={HIT[:2]: HIT[2]}))
    again = desk.draw(replace(order, decisions=decisions))
    assert same(again, first)
    (asked,) = desk.source.asked
    assert (asked.header.images, len(asked.header.pinned)) == (1, 1)
    assert again.all(JobDecided)[-1].decisions == decisions


@pytest.mark.parametrize(
    "said", [answer(), answer(outcome=CACHE_OUTCOME_UNAVAILABLE), None], ids=["gone", "store fails", "no answer"]
)
def test_a_retried_attempt_whose_entry_is_gone_is_exact_and_stays_so(model: Model, exact: Drawing, said: Any) -> None:
    time = FakeTime()
    desk = Cached(model, ScriptedLatents([said] if said else []), clock=time.monotonic)
    drawing = desk.easel.submit(replace(ORDER, decisions=starts_at(NAME)))
    while not drawing.ended:
        time.now += TIMEOUT_S / 3
        desk.easel.turn()
    assert same(drawing, exact)
    assert drawing.record.exact
    last = CacheDecision.FromString(drawing.all(JobDecided)[-1].decisions[kinds.CACHE])
    assert [start.entry for start in last.starts] == [""]
    desk = Cached(model, ScriptedLatents([answer(HIT)]))
    assert same(desk.draw(replace(ORDER, decisions=drawing.all(JobDecided)[-1].decisions)), exact)
    assert desk.source.asked == []


def draw_until_error(desk: Cached, order: EngineOrder, time: FakeTime) -> BottegaError:
    drawing = desk.easel.submit(order)
    while not drawing.ended:
        time.now += TIMEOUT_S / 3
        desk.easel.turn()
    return drawing.error


PINNED = cached(ORDER, pin=NAME)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (answer(), CacheEntryGone),
        (answer((entry(2), 5, latent())), CacheEntryGone),
        (answer((entry(1), 5, latent()[:, :4])), CacheEntryGone),
        (answer(outcome=CACHE_OUTCOME_UNAVAILABLE), NoCache),
        (None, NoCache),
    ],
    ids=["gone", "another entry", "another size", "store fails", "no answer"],
)
def test_a_pin_that_cannot_be_had_fails_and_names_it(model: Model, said: Any, kind: type[BottegaError]) -> None:
    time = FakeTime()
    desk = Cached(model, ScriptedLatents([said] if said else []), clock=time.monotonic)
    error = draw_until_error(desk, PINNED, time)
    assert type(error) is kind
    assert NAME in error.message or kind is NoCache
    assert error.metadata.get("entry", NAME) == NAME
    assert not desk.engine.busy


def test_a_pinned_picture_waits_for_its_latent_and_says_how_long(model: Model, started: Drawing) -> None:
    time = FakeTime()
    desk = Cached(model, clock=time.monotonic)
    drawing = desk.easel.submit(PINNED)
    for _ in range(4):
        desk.easel.turn()
        time.now += 1.0
    assert drawing.all(JobStarted) == []
    desk.tell(answer(HIT))
    desk.easel.run()
    assert same(drawing, started)
    assert drawing.record.seconds["cache"] == 4.0


@pytest.mark.parametrize(
    "order",
    [
        *(cached(ORDER, pin=pin) for pin in ("x", f"{entry(1)}@0", f"{entry(1)}@10", f"{'X' * 32}@5")),
        cached(replace(ORDER, spec=replace(SPEC, num_images=2)), pin=NAME),
        cached(replace(ORDER, spec=replace(SPEC, prompt_2="a heart")), pin=NAME),
        replace(ORDER, addons={kinds.CACHE: b"\xff"}),
        cached(ORDER, tenant="t" * 129),
    ],
    ids=["no pin", "step 0", "the last step", "no entry", "two pictures", "second prompt", "no message", "tenant"],
)
def test_orders_that_break_a_rule_are_refused(model: Model, order: EngineOrder) -> None:
    desk = Cached(model)
    with pytest.raises(InvalidRequest):
        desk.easel.submit(order)
    assert not desk.engine.busy


@pytest.mark.parametrize(
    "decisions",
    [{kinds.CACHE: b"\xff"}, starts_at(NAME, NAME), starts_at(f"{entry(1)}@10")],
    ids=["no message", "more pictures", "no step of the job"],
)
def test_decisions_of_another_job_fail(model: Model, decisions: dict[str, bytes]) -> None:
    drawing = Cached(model).draw(replace(ORDER, decisions=decisions))
    assert isinstance(drawing.error, InvalidRequest)


@pytest.mark.parametrize(
    "hit",
    [
        (entry(1), 5, latent()[:, :4]),
        (entry(1), 5, latent().half()),
        (entry(1), 5, torch.full(SHAPE, torch.nan)),
        (entry(1), 10, latent()),
        ("../entry", 5, latent()),
    ],
    ids=["size", "element type", "not finite", "after the last", "no entry"],
)
def test_a_latent_that_does_not_fit_is_counted_and_not_used(model: Model, exact: Drawing, hit: Hit) -> None:
    desk = Cached(model, ScriptedLatents([answer(hit)]))
    assert same(desk.draw(ORDER), exact)
    assert desk.starts.counts["unfit_hits"] == 1
    assert [list(each.unused) for each in desk.source.reports] == [[hit[0]]]


@pytest.mark.parametrize("turns", [2, 6], ids=["before the start", "after it"])
@pytest.mark.parametrize("kind", [SamplerKind.DPMPP_2M, SamplerKind.EULER_ANCESTRAL], ids=["DPMPP_2M", "ANCESTRAL"])
def test_a_job_resumed_from_a_checkpoint_keeps_its_start(model: Model, turns: int, kind: SamplerKind) -> None:
    order = replace(ORDER, spec=replace(SPEC, sampler=kind))
    desk = Cached(model)
    whole = desk.draw(order, at_turn=3, hits=[HIT])
    checkpoint = whole.all(JobCheckpointed)[turns - 2]
    again = Cached(model, ScriptedLatents(pinned={HIT[:2]: HIT[2]}))
    decisions = whole.all(JobDecided)[-1].decisions
    resumed = again.draw(replace(order, checkpoint=checkpoint.data, decisions=decisions))
    assert resumed.job is not None
    assert resumed.job.steps_resumed == checkpoint.steps_done > 0
    assert same(resumed, whole)
    assert resumed.record.provenance.cached_starts == whole.record.provenance.cached_starts
    assert not resumed.record.exact
    assert len(again.source.asked) == (turns == 2)


def test_progress_counts_the_steps_that_are_skipped(model: Model) -> None:
    drawing = Cached(model).draw(replace(ORDER, preview=True), at_turn=2, hits=[HIT])
    done = [advanced.steps_done for advanced in drawing.all(JobAdvanced)]
    assert done == [1, 2, 5, 6, 7, 8, 9, 10]
    assert all(advanced.preview is not None for advanced in drawing.all(JobAdvanced))


def test_a_job_that_ends_leaves_no_question_behind(model: Model) -> None:
    desk = Cached(model)
    desk.draw(ORDER)
    assert [asked.cancelled() for asked in desk.source.open] == [True]
    desk.easel.submit(replace(ORDER, key="next"))
    desk.easel.turn()
    desk.engine.cancel("next")
    assert [asked.cancelled() for asked in desk.source.open] == [True, True]


@pytest.fixture
def zero_embeddings(model: Model) -> Iterator[None]:
    """All prompts have the same, without a direction."""
    weight: Tensor = model.text_encoders[1].text_projection.weight
    before = weight.detach().clone()
    with torch.inference_mode():
        weight.zero_()
    yield
    with torch.inference_mode():
        weight.copy_(before)


@pytest.mark.usefixtures("zero_embeddings")
def test_a_prompt_whose_embedding_has_no_direction_asks_nothing(model: Model) -> None:
    desk = Cached(model)
    assert desk.draw(ORDER).record.exact
    pinned = desk.draw(cached(replace(ORDER, key="pinned"), pin=NAME))
    assert isinstance(pinned.error, NoCache)
    assert not desk.source.asked
    assert not desk.source.recordings


def test_the_embedding_is_asked_with_once_it_has_come_from_the_device(model: Model, started: Drawing) -> None:
    device = DelayedDevice()
    desk = Cached(replace(model, runtime=device), ScriptedLatents([answer(HIT)]))
    other = desk.easel.submit(replace(ORDER, key="other", addons={}))
    desk.easel.turn()
    device.finish()
    drawing = desk.easel.submit(ORDER)
    desk.easel.turn()
    # Others' steps go on meanwhile.
    assert (device.waits, desk.source.asked, drawing.events) == (0, [], [])
    assert desk.engine.turns == 2
    device.finish()
    desk.easel.turn()
    assert len(desk.source.asked) == 1
    assert desk.starts.counts["steps_skipped"] == 4
    desk.easel.run()
    assert same(drawing, started)
    assert other.ended


def test_where_there_is_nothing_else_to_do_the_embedding_is_waited_for(model: Model) -> None:
    device = DelayedDevice()
    desk = Cached(replace(model, runtime=device))
    desk.easel.submit(ORDER)
    desk.easel.turn()
    assert (device.waits, desk.engine.turns) == (1, 0)
    desk.easel.turn()
    assert (len(desk.source.asked), desk.engine.turns) == (1, 1)
