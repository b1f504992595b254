"""Recorded activations at the gateway: what attempts are told, and where edits go because of where templates are."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from bottega import kinds
from bottega.addons.edits import gateway as activations_addon
from bottega.addons.edits.gateway import ActivationsAddOn, Residences
from bottega.addons.interface.gateway_addon import AddOnMetrics, PrefetchReason
from bottega.addons.interface.views import ANYTHING, JobRequest, Member, hosted_by_kind
from bottega.errors import RecordingNotKept
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.policy import RunningShares
from bottega.gateway.tenants import TenantTerms
from bottega.planning import RowFractions, Shape, StepTimes
from bottega.v1.activations_pb2 import (
    TEMPLATE_TIER_DISK,
    TEMPLATE_TIER_MEMORY,
    TEMPLATE_TIER_NOWHERE,
    ActivationsOrder,
    PrefetchTemplatesResponse,
    TemplateResidence,
    TemplateTier,
)
from bottega.v1.fleet_pb2 import Load, MaskTokens, Registration
from bottega.v1.generation_pb2 import (
    FIDELITY_BALANCED,
    FIDELITY_EXACT,
    GenerationSpec,
    MaskUse,
    Provenance,
    Techniques,
)
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted
from bottega.v1.worker_pb2 import RunAttemptRequest
from tests.fakes.fake_time import FakeTime
from tests.fakes.gateway_rules import Shop
from tests.samples.controlnet_hosts import again, bounds
from tests.samples.jobs import sample_job

_EQUAL = TenantTerms().weight

RECORDING = "ab" * 16
CAT, DOG = "a" * 64, "b" * 64
SHAPE = (16, 16)
STORE = "127.0.0.1:1"


def _activations(shop: Shop) -> ActivationsAddOn:
    return next(addon for addon in shop.controller._addons if isinstance(addon, ActivationsAddOn))


class _OneAddOn(ActivationsAddOn):
    """Sees whatever fleet reports to it."""

    def __init__(self, time: FakeTime) -> None:
        clock = time.clock()
        fleet = Fleet(lease_s=1, model_grace_s=1, bounds=bounds(8), clock=clock)
        super().__init__(fleet, AddOnMetrics(CollectorRegistry()), clock)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
async def shop(time: FakeTime) -> AsyncIterator[Shop]:
    made = Shop(addons=[_OneAddOn(time)])
    yield made
    await made.stop()


def _edit(shop: Shop, template: str = CAT, *, share: float = 0.2) -> Job:
    spec = GenerationSpec(model="m", num_inference_steps=10, num_images=1, seed=1)
    request = JobRequest(fingerprint="f", shape=SHAPE, edit_source=template, computed_share=share)
    return Job(clock=shop.time.clock(), spec=spec, bare=spec, request=request)


def _has(*templates: str) -> list[Hosted]:
    return [Hosted(kind=kinds.ACTIVATIONS, digest=each, state=HOSTED_STATE_LOADED) for each in templates]


def _answer(*said: tuple[str, TemplateTier.ValueType, int], speed: float = 100.0) -> PrefetchTemplatesResponse:
    found = [TemplateResidence(source=source, tier=tier, disk_bytes=disk) for source, tier, disk in said]
    return PrefetchTemplatesResponse(templates=found, disk_bytes_per_s=speed)


async def test_an_attempt_at_an_edit_is_told_how_its_template_is_asked_for_and_others_nothing(shop: Shop) -> None:
    shop.worker("w1")
    shop.worker("w2")
    for job, told in ((shop.take(_edit(shop)), {kinds.ACTIVATIONS: ActivationsOrder(source=CAT)}), (shop.submit(), {})):
        (request,) = shop.client(job.worker).requests
        assert {kind: ActivationsOrder.FromString(order) for kind, order in request.addons.items()} == told


async def test_a_template_in_a_store_is_loaded_for_the_first_of_a_queue_and_for_what_runs(
    shop: Shop, time: FakeTime
) -> None:
    addon, worker = _activations(shop), shop.worker("w1")
    assert isinstance(addon._fleet, Fleet)
    store = addon._fleet.join(again(Registration(kind=kinds.ACTIVATIONS, name="store", address=STORE)))
    near, far = _edit(shop), _edit(shop, DOG)

    def asked() -> list[str]:
        queue = addon._prefetcher._queues.get(store)
        names = list(queue.names) if queue is not None else []
        if queue is not None:
            queue.names.clear()
        return names

    addon.prefetch([near], PrefetchReason.ARRIVED)
    assert asked() == [CAT], "nobody knows where it is"
    addon._note_response(STORE, _answer((CAT, TEMPLATE_TIER_DISK, 10), (DOG, TEMPLATE_TIER_NOWHERE, 0)))
    addon.prefetch([near], PrefetchReason.ARRIVED)
    assert asked() == [], "those before it would have theirs driven out"
    addon.prefetch([far], PrefetchReason.ARRIVED)
    assert asked() == [DOG], "it may have been recorded meanwhile"
    time.now += 31
    addon.prefetch([near], PrefetchReason.ARRIVED)
    assert asked() == [CAT], "it may have been driven out or dropped meanwhile"
    addon.prefetch([near], PrefetchReason.NEXT)
    assert asked() == [CAT]
    addon.prepare_attempt(near, worker, RunAttemptRequest())
    assert asked() == [CAT]


async def test_an_edit_goes_to_the_worker_that_has_its_template(shop: Shop) -> None:
    shop.worker("w1")
    other = shop.worker("w2")
    shop.report(other, controlnets=_has(CAT))
    assert shop.take(_edit(shop)).worker == "w2"
    assert shop.take(_edit(shop, DOG)).worker == "w1"


async def test_a_worker_that_has_dropped_a_template_is_as_good_as_others(shop: Shop) -> None:
    addon, other = _activations(shop), shop.worker("w2")
    shop.report(other, controlnets=_has(CAT, DOG))
    job, members = _edit(shop), {"w2": other}
    assert addon.worker_costs(job, members).shares == {"w2": 0.2}
    shop.report(other, controlnets=_has(DOG))
    assert addon.worker_costs(job, members).shares == {}
    assert addon.expected_savings(job).computed_share == 1.0
    shop.report(other, controlnets=_has(CAT))
    addon.member_changed(other, lost=True)
    assert addon.worker_costs(job, members).shares == {}


async def test_what_waits_counts_by_its_mask_where_somebody_has_its_template(shop: Shop) -> None:
    worker = shop.worker()
    shop.submit()
    shop.report(worker, controlnets=_has(CAT))
    near, far = shop.take(_edit(shop)), shop.take(_edit(shop, DOG))
    snapshot = shop.controller._snapshot
    assert snapshot.resource_request(near).share == pytest.approx(0.2, abs=1 / 32)
    assert snapshot.resource_request(far).share == 1.0
    first, second = snapshot.pending([near, far], {"w1": worker}, RunningShares({}, (), _EQUAL))
    assert first.request.share == second.request.share == 1.0
    assert first.request_at("w1").share == pytest.approx(0.2, abs=1 / 32)
    assert second.request_at("w1").share == 1.0


async def test_what_runs_counts_as_its_worker_says(shop: Shop) -> None:
    worker = shop.worker()
    job = shop.take(_edit(shop))
    (state,) = shop.controller._snapshot.workers_of("m")
    assert [request.share for request in state.running] == [1.0], "nobody had its template"
    worker.shares = {job.job_id: 0.25}
    worker.load = Load()
    (state,) = shop.controller._snapshot.workers_of("m")
    assert [request.share for request in state.running] == [0.25]


def _worker(name: str, *templates: str, planned_s: float = 0.0, masks: bool = True) -> Member:
    """Turns of .1 s a row, of which half does not shrink. planned_s: of a turn of a row that is loaded."""
    load = Load(hosted=_has(*templates), mask_tokens=MaskTokens(token_elements=2) if masks else None)
    member = Member(registration=Registration(name=name, kind=kinds.WORKER), joined_at=0.0, heard_at=0.0, load=load)
    member.hosted = hosted_by_kind(load)
    member.times = StepTimes.from_entries((SHAPE, rows, 0.1 * rows) for rows in (1, 2, 4))
    member.fractions = RowFractions.from_entries([(SHAPE, 0.5)])
    if planned_s:
        member.planned.note(SHAPE, 1.0, planned_s)
    return member


def _stored_edit(time: FakeTime, *, share: float) -> Job:
    """Of the cat, in ten steps."""
    spec = GenerationSpec(num_inference_steps=10, num_images=1)
    request = JobRequest(fingerprint="f", shape=SHAPE, edit_source=CAT, computed_share=share)
    return Job(clock=time.clock(), spec=spec, bare=spec, request=request)


def test_a_template_in_a_store_is_at_hand_everywhere_and_costs_those_who_load_it() -> None:
    time = FakeTime()
    addon = _OneAddOn(time)
    near, far, slow = _worker("near", CAT), _worker("far"), _worker("slow", planned_s=0.12)
    for member in (near, far, slow):
        addon.member_changed(member)
    job = _stored_edit(time, share=0.25)
    workers = {member.name: member for member in (near, far, slow)}
    assert addon.worker_costs(job, workers).shares == {"near": 0.25}
    addon._note_response(STORE, _answer((CAT, TEMPLATE_TIER_DISK, 10)))
    found = addon.worker_costs(job, workers)
    assert found.share == 0.25
    # Of a turn in full, .1 s, a row of .625 takes .0625 s, and where it is loaded .0975 s. The disk is read for .1 s.
    expected = pytest.approx({"near": 0.0, "far": 0.1, "slow": 0.375})
    assert dict(found.load_s) == expected, "what is loaded costs at most what it saves"
    time.now += 5
    assert dict(addon.worker_costs(job, workers).load_s) == pytest.approx({"near": 0.0, "far": 0.0, "slow": 0.35})
    addon._note_response(STORE, _answer((CAT, TEMPLATE_TIER_DISK, 10_000)))
    assert dict(addon.worker_costs(job, workers).load_s) == pytest.approx({"near": 0.0, "far": 0.375, "slow": 0.375})


def test_a_worker_that_masks_nothing_computes_all_and_loads_nothing(time: FakeTime) -> None:
    addon = _OneAddOn(time)
    able, unable = _worker("able", planned_s=0.12), _worker("unable", masks=False)
    workers = {member.name: member for member in (able, unable)}
    for member in workers.values():
        addon.member_changed(member)
    addon._note_response(STORE, _answer((CAT, TEMPLATE_TIER_DISK, 10)))
    job = _stored_edit(time, share=0.25)
    found = addon.worker_costs(job, workers)
    assert (found.share, dict(found.shares)) == (0.25, {"unable": 1.0})
    assert dict(found.load_s) == pytest.approx({"able": 0.375, "unable": 0.0})
    assert not addon.worker_costs(job, {"able": able}).shares
    addon.member_changed(unable, lost=True)
    assert not addon.worker_costs(job, workers).shares


def test_an_edit_that_computes_all_has_no_costs() -> None:
    time = FakeTime()
    addon = _OneAddOn(time)
    spec = GenerationSpec(num_inference_steps=10, num_images=1)
    for request in (JobRequest(fingerprint="f"), JobRequest(fingerprint="f", edit_source=CAT, computed_share=1.0)):
        job = Job(clock=time.clock(), spec=spec, bare=spec, request=request)
        worker = _worker("near", CAT)
        addon.member_changed(worker)
        assert not addon.worker_costs(job, {"near": worker})


def test_costs_follow_from_the_newest_report() -> None:
    time = FakeTime()
    addon, worker = _OneAddOn(time), _worker("w")
    addon._note_response(STORE, _answer((CAT, TEMPLATE_TIER_DISK, 10_000)))
    job = _stored_edit(time, share=0.25)

    def most_s() -> float:
        """That a load costs: what it saves."""
        return addon.worker_costs(job, {"w": worker}).load_s["w"]

    assert most_s() == pytest.approx(10 * (0.1 - 0.0625))
    worker.times = StepTimes.from_entries((SHAPE, rows, 1.0 * rows) for rows in (1, 2))
    addon.member_changed(worker)
    assert most_s() == pytest.approx(10 * (1.0 - 0.625))
    worker.times = StepTimes()
    addon.member_changed(worker)
    assert most_s() == 0.0, "nothing is known"


def test_edits_that_compute_about_as_much_are_of_one_kind_at_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, float]] = []

    def counted(member: Member, rows: int, shape: Shape, share: float) -> tuple[float, float]:
        found.append((member.name, share))
        return 0.1, 0.2

    monkeypatch.setattr(activations_addon, "_turn_cost", counted)
    time = FakeTime()
    addon, workers = _OneAddOn(time), {name: _worker(name) for name in ("w1", "w2")}
    addon._note_response(STORE, _answer((CAT, TEMPLATE_TIER_MEMORY, 0)))
    for share in (0.201, 0.209):
        load_s = addon.worker_costs(_stored_edit(time, share=share), workers).load_s
        assert dict(load_s) == pytest.approx({"w1": 1.0, "w2": 1.0})
    assert found == [("w1", 7 / 32), ("w2", 7 / 32)]


def test_of_several_stores_the_one_that_has_a_template_in_memory_first_counts() -> None:
    found = Residences()
    found.note_response("one", _answer((CAT, TEMPLATE_TIER_DISK, 300), (DOG, TEMPLATE_TIER_NOWHERE, 0)), 0.0)
    found.note_response("two", _answer((CAT, TEMPLATE_TIER_MEMORY, 0)), 0.0)
    stored = found.stored(CAT, 0.0)
    assert stored is not None
    assert stored.disk_s(0.0) == 0.0
    assert found.stored(DOG, 0.0) is None
    found.forget_store("two")
    stored = found.stored(CAT, 1.0)
    assert stored is not None
    assert stored.disk_s(1.0) == pytest.approx(2.0)
    found.note_response("one", _answer((CAT, TEMPLATE_TIER_NOWHERE, 0)), 1.0)
    assert found.stored(CAT, 1.0) is None


def test_templates_that_were_asked_for_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_addon, "_MAX_TEMPLATES", 2)
    found = Residences()
    for number in ("1", "2", "1", "3"):
        found.note_response(STORE, _answer((number * 64, TEMPLATE_TIER_MEMORY, 0)), 0.0)
    assert [found.stored(number * 64, 0.0) is not None for number in ("1", "2", "3")] == [True, False, True]


@pytest.mark.parametrize(
    ("spec", "recording", "techniques"),
    [
        (GenerationSpec(fidelity=FIDELITY_BALANCED), RECORDING, Techniques(recording=RECORDING)),
        (GenerationSpec(fidelity=FIDELITY_BALANCED), "", Techniques(masked_blocks=False)),
        (GenerationSpec(techniques=Techniques(masked_blocks=True)), "", Techniques(masked_blocks=False)),
        (GenerationSpec(fidelity=FIDELITY_EXACT), "", Techniques()),
    ],
)
def test_the_parameters_of_an_edit_say_what_it_took_or_that_it_took_nothing(
    time: FakeTime, spec: GenerationSpec, recording: str, techniques: Techniques
) -> None:
    parameters = GenerationSpec(keep_unmasked=True)
    parameters.MergeFrom(spec)
    provenance = Provenance(parameters=parameters, mask=MaskUse(recording=recording))
    _OneAddOn(time).job_completed(sample_job(time), provenance)
    assert provenance.parameters.techniques == techniques


def test_the_parameters_of_a_picture_that_is_no_edit_stay_as_they_are(time: FakeTime) -> None:
    provenance = Provenance(parameters=GenerationSpec(fidelity=FIDELITY_BALANCED))
    _OneAddOn(time).job_completed(sample_job(time), provenance)
    assert not provenance.parameters.HasField("techniques")


async def test_an_edit_that_took_from_a_recording_is_refused_by_name(time: FakeTime) -> None:
    addon, again = _OneAddOn(time), GenerationSpec(techniques=Techniques(recording=RECORDING))
    await addon.resolve(GenerationSpec(techniques=Techniques(masked_blocks=True)), ANYTHING)
    with pytest.raises(RecordingNotKept, match=RECORDING) as refused:
        await addon.resolve(again, ANYTHING)
    assert refused.value.metadata == {"recording": RECORDING}
