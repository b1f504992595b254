"""The approximate cache at the gateway: who may use it, what is refused, what is pinned, and what retries keep to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bottega import kinds
from bottega.addons.cache.gateway import CacheAddOn, HitRates, rate_key
from bottega.addons.interface.gateway_addon import AddOnMetrics, Resolution
from bottega.addons.interface.views import ANYTHING, JobRequest
from bottega.clocks import Clock
from bottega.errors import (
    BottegaError,
    CacheEntryGone,
    DeadlineUnmeetable,
    NoCache,
    QueueFull,
    Unavailable,
    WorkerLost,
)
from bottega.gateway.api import validation
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import JobCheckpoint
from bottega.v1 import generation_pb2, image_pb2, worker_pb2
from bottega.v1.cache_pb2 import CacheDecision, CacheOrder, CacheStart
from bottega.v1.fleet_pb2 import Registration
from bottega.v1.generation_pb2 import FIDELITY_FAST, CacheUse, ControlNet, GenerationSpec, Lora, Provenance, Techniques
from tests.fakes.fake_time import FakeTime
from tests.fakes.gateway_rules import Shop
from tests.samples.addons import sample_addons
from tests.samples.controlnet_hosts import again, bounds

EXACT, BALANCED, FAST = (
    generation_pb2.FIDELITY_EXACT,
    generation_pb2.FIDELITY_BALANCED,
    generation_pb2.FIDELITY_FAST,
)
ENTRY = "0123456789abcdef" * 2
PIN = f"{ENTRY}@6"
MODEL = image_pb2.Model(name="m", default_width=64, default_height=64, default_steps=30)
ADDONS = sample_addons()
OFF, ON = Techniques(approximate_cache=False), Techniques(approximate_cache=True)
# Prompts whose similarity to others says nothing.
DEGENERATE = ("", " ", "cat", "a cat", "star star STAR star", "- . ! ?")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def cache(registry: CollectorRegistry) -> CacheAddOn:
    fleet = Fleet(lease_s=1, model_grace_s=1, bounds=bounds(8), clock=Clock())
    return CacheAddOn(fleet, AddOnMetrics(registry))


@pytest.fixture
async def shop(cache: CacheAddOn) -> AsyncIterator[Shop]:
    shop = Shop(addons=[cache])
    yield shop
    await shop.stop()


def _job(shop: Shop, **spec: Any) -> Job:
    """Ten steps of .1 s each."""
    usual: dict[str, Any] = {"model": "m", "prompt": "a red star", "num_inference_steps": 10, "num_images": 1}
    usual |= {"fidelity": BALANCED, "seed": 1}
    fields = usual | spec
    return _job_of(GenerationSpec(**fields), shop.time)


def _job_of(full: GenerationSpec, time: FakeTime | None = None) -> Job:
    clock = (time or FakeTime()).clock()
    return Job(clock=clock, spec=full, bare=full, request=JobRequest(fingerprint="f", shape=(16, 16)))


def _order(request: worker_pb2.RunAttemptRequest) -> CacheOrder:
    return CacheOrder.FromString(request.addons.get(kinds.CACHE, b""))


def _decision(*starts: CacheStart) -> worker_pb2.AttemptDecisions:
    return worker_pb2.AttemptDecisions(by_kind={kinds.CACHE: CacheDecision(starts=starts).SerializeToString()})


async def _decide(shop: Shop, job: Job, *starts: CacheStart) -> None:
    shop.client(job.worker).answers[job.job_id].put_nowait(worker_pb2.RunAttemptResponse(decided=_decision(*starts)))
    for _ in range(12):
        await asyncio.sleep(0)


async def _complete(shop: Shop, job: Job, *starts: CacheUse) -> None:
    """The job's worker sends its picture, and says what it started from."""
    answers = shop.client(job.worker).answers[job.job_id]
    for index in range(job.num_images):
        chunk = worker_pb2.AttemptImageChunk(index=index, chunk=b"picture", last=True)
        answers.put_nowait(worker_pb2.RunAttemptResponse(image=chunk))
    completed = worker_pb2.AttemptCompleted(provenance=Provenance(cached_starts=starts))
    answers.put_nowait(worker_pb2.RunAttemptResponse(completed=completed))
    await asyncio.wait_for(job.ended.wait(), 2)


@pytest.mark.parametrize(
    ("spec", "read", "record"),
    [
        ({"fidelity": BALANCED}, True, True),
        ({"fidelity": FAST}, True, True),
        ({"fidelity": EXACT}, False, True),
        ({"fidelity": FAST, "techniques": OFF}, False, False),
        ({"fidelity": BALANCED, "techniques": Techniques(cache_entry=PIN)}, True, False),
        ({"fidelity": BALANCED, "prompt_2": ""}, False, False),
        ({"fidelity": BALANCED, "prompt_syntax": generation_pb2.PROMPT_SYNTAX_WEIGHTED}, False, False),
        ({"fidelity": BALANCED, "keep_for_editing": True}, False, True),
        ({"fidelity": FAST, "image": b"x", "strength": 0.5, "techniques": ON}, False, False),
        *(({"fidelity": FAST, "prompt": prompt, "techniques": ON}, False, False) for prompt in DEGENERATE),
    ],
)
async def test_a_request_reads_and_is_recorded_as_its_fidelity_and_its_switch_say(
    shop: Shop, spec: dict[str, Any], read: bool, record: bool
) -> None:
    shop.worker()
    shop.take(_job(shop, **spec))
    (request,) = shop.client().requests
    order = _order(request)
    assert (order.read, order.record) == (read, record)
    if read or record:
        assert (order.fidelity, order.pin) == (spec["fidelity"], request.spec.techniques.cache_entry)
    else:
        assert kinds.CACHE not in request.addons


def _fields(**spec: Any) -> list[str]:
    made = GenerationSpec(**{"prompt": "a red star"} | spec)
    found = [*validation.check_spec(made, ADDONS, max_image_bytes=9), *validation.check_model(made, MODEL, ADDONS)]
    return [violation.field.removeprefix("spec.") for violation in found]


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"seed": 1, "num_images": 1, "fidelity": FAST}, []),
        ({"prompt_2": "a star"}, ["prompt_2"]),
        ({"prompt_syntax": generation_pb2.PROMPT_SYNTAX_WEIGHTED}, ["prompt_syntax"]),
        ({"image": b"x"}, ["image"]),
        ({"num_images": 2}, ["num_images"]),
        ({"loras": [Lora(name="ink", from_step=2)]}, []),
        ({"fidelity": EXACT}, ["fidelity"]),
        ({"keep_for_editing": True}, ["keep_for_editing"]),
        ({"num_inference_steps": 1}, ["techniques.cache_entry"]),
        ({"num_inference_steps": 0}, ["num_inference_steps"]),
        ({"num_inference_steps": 60}, []),
        *(({"prompt": prompt}, ["prompt"]) for prompt in DEGENERATE),
    ],
)
def test_a_pin_is_for_one_picture_from_a_prompt_alone_and_for_a_recorded_step(
    spec: dict[str, Any], wrong: list[str]
) -> None:
    """Latents of thirty steps, the model's default, are recorded after 3, 6, 9, 12 and 15."""
    assert _fields(techniques=Techniques(cache_entry=PIN), **spec) == wrong


def test_the_switch_contradicts_exact_a_pin_and_what_is_kept_for_editing() -> None:
    assert _fields(techniques=ON, fidelity=EXACT) == ["techniques.approximate_cache"]
    assert _fields(techniques=Techniques(cache_entry=PIN, approximate_cache=False)) == ["techniques.approximate_cache"]
    assert _fields(techniques=ON, keep_for_editing=True) == ["keep_for_editing"]
    assert _fields(techniques=ON, seed=1) == _fields(techniques=OFF, fidelity=EXACT, keep_for_editing=True) == []


@pytest.mark.parametrize(
    ("techniques", "beside", "fidelity"),
    [
        (OFF, {}, EXACT),
        (Techniques(stale_residuals=True), {}, EXACT),
        (ON, {}, BALANCED),
        (Techniques(cache_entry=PIN), {}, BALANCED),
        (ON, {"prompt_2": "a heart"}, EXACT),  # nothing starts from a latent there
    ],
)
async def test_a_seed_alone_is_exact_and_one_beside_a_pin_or_the_switch_is_not(
    cache: CacheAddOn, techniques: Techniques, beside: dict[str, Any], fidelity: int
) -> None:
    spec = GenerationSpec(prompt="a red star", seed=1, techniques=techniques, **beside)
    resolutions = await _resolved(cache, spec)
    assert specs.complete(spec, MODEL, resolutions).fidelity == fidelity
    spec.fidelity = FAST
    assert specs.complete(spec, MODEL, resolutions).fidelity == FAST


async def _resolved(cache: CacheAddOn, spec: GenerationSpec) -> list[Resolution]:
    """Find what a request names while there is a cache."""
    assert isinstance(cache._fleet, Fleet)
    cache._fleet.join(again(Registration(kind=kinds.CACHE, name="cache", address="127.0.0.1:1")))
    found = await cache.resolve(spec, ANYTHING)
    return [] if found is None else [found]


async def test_a_pin_needs_a_store_and_the_switch_does_not(cache: CacheAddOn) -> None:
    pinned = GenerationSpec(techniques=Techniques(cache_entry=PIN))
    with pytest.raises(NoCache, match=PIN) as refused:
        await cache.resolve(pinned, ANYTHING)
    assert refused.value.retry_after_s
    await cache.resolve(GenerationSpec(techniques=ON), ANYTHING)
    assert await _resolved(cache, pinned)
    assert not await _resolved(cache, GenerationSpec(techniques=OFF))


def _use(image: int = 0, *, entry: str = ENTRY, step: int = 6, made: int = 0) -> CacheUse:
    """made: steps that the picture had made when the latent came."""
    first = step - 1
    return CacheUse(entry=f"{entry}@{step}", similarity=0.9, from_step=first, skipped_steps=first - made, image=image)


@pytest.mark.parametrize(
    ("spec", "starts", "techniques"),
    [
        ({}, [_use()], Techniques(cache_entry=PIN)),
        ({}, [], OFF),
        ({"techniques": ON}, [], OFF),
        ({"num_images": 2}, [], OFF),
        ({"num_images": 2}, [_use(1)], Techniques()),
        ({"fidelity": EXACT}, [], Techniques(shared_turns=False)),
        ({"prompt_2": "x"}, [], Techniques()),
    ],
)
async def test_the_parameters_of_a_provenance_pin_what_makes_the_same_again(
    cache: CacheAddOn, spec: dict[str, Any], starts: Sequence[CacheUse], techniques: Techniques
) -> None:
    asked: dict[str, Any] = {"fidelity": BALANCED, "prompt": "a red star"}
    full = specs.complete(GenerationSpec(**asked | spec), MODEL)
    provenance = Provenance(parameters=full, cached_starts=starts)
    cache.job_completed(_job_of(full), provenance)
    assert provenance.parameters.techniques == techniques
    pinned = provenance.parameters
    assert list(validation.check_spec(pinned, ADDONS, max_image_bytes=9)) == []
    assert list(validation.check_model(pinned, MODEL, ADDONS)) == []
    assert specs.complete(pinned, MODEL, await _resolved(cache, pinned)) == pinned


async def test_a_retried_attempt_starts_from_what_the_one_before_decided(shop: Shop) -> None:
    shop.worker()
    job = shop.take(_job(shop))
    await _decide(shop, job, CacheStart(entry=ENTRY, step=2, similarity=0.9))
    await shop.fail(job, WorkerLost("it died"))
    shop.worker("w2")
    (first,), (second,) = shop.client("w1").requests, shop.client("w2").requests
    assert not first.decisions.by_kind
    assert _order(second).read
    assert second.decisions == _decision(CacheStart(entry=ENTRY, step=2, similarity=0.9))


@pytest.mark.parametrize(
    ("steps", "error", "read"),
    [
        (0, WorkerLost("it died"), False),
        (0, QueueFull("it has no room"), True),
        (4, Unavailable("it stops"), False),
    ],
    ids=["lost", "not taken", "given back"],
)
async def test_what_may_have_begun_from_noise_goes_on_so(
    shop: Shop, steps: int, error: BottegaError, read: bool
) -> None:
    shop.worker()
    job = shop.take(_job(shop))
    if steps:
        await shop.advance(job, steps)
    await shop.fail(job, error)
    shop.worker("w2")
    (first,), (second,) = shop.client("w1").requests, shop.client("w2").requests
    assert _order(first).read
    assert (_order(second).read, _order(second).record) == (read, True)


async def test_what_an_earlier_life_of_the_gateway_gave_to_a_worker_may_have_begun(shop: Shop) -> None:
    shop.worker()
    job = _job(shop)
    job.life, job.number = 1, 1  # how far it came is not stored
    shop.take(job)
    (request,) = shop.client().requests
    assert (_order(request).read, _order(request).record) == (False, True)


async def test_a_decision_that_nobody_can_read_is_none(shop: Shop) -> None:
    shop.worker()
    job = _job(shop)
    job.decisions = worker_pb2.AttemptDecisions(by_kind={kinds.CACHE: b"\xff"})
    shop.take(job)
    (request,) = shop.client().requests
    assert _order(request).read


async def test_a_pin_that_is_gone_or_that_no_store_sends_fails_the_job_at_its_first_worker(shop: Shop) -> None:
    for name in ("w1", "w2"):
        shop.worker(name)
    for error in (CacheEntryGone("gone", metadata={"entry": PIN}), NoCache("no store answers")):
        job = shop.take(_job(shop, num_inference_steps=60, techniques=Techniques(cache_entry=PIN)))
        await shop.fail(job, error)
        await asyncio.wait_for(job.ended.wait(), 2)
        assert (job.error, job.attempts) == (error, 1)


def _again(cache: CacheAddOn, before: Job) -> worker_pb2.AttemptDecisions:
    decisions = worker_pb2.AttemptDecisions(by_kind={kinds.LORAS: b"", **before.decisions.by_kind})
    cache.decide_again(decisions, before)
    assert decisions.by_kind[kinds.LORAS] == b""
    return decisions


async def test_a_request_that_is_drawn_again_starts_from_the_same_latents(shop: Shop, cache: CacheAddOn) -> None:
    shop.worker()
    job = shop.take(_job(shop, num_images=3))
    await _complete(shop, job, _use(1), _use(2, entry="not named so", step=2))
    start = CacheStart(entry=ENTRY, step=6, similarity=0.9)
    decided = CacheDecision.FromString(_again(cache, job).by_kind[kinds.CACHE])
    assert decided == CacheDecision(starts=[CacheStart(), start, CacheStart()])
    repeated = _job(shop, num_images=3)
    repeated.decisions = _again(cache, job)
    shop.take(repeated)
    assert _order(shop.client().requests[-1]).read


async def test_a_request_that_was_drawn_from_noise_is_so_again(shop: Shop, cache: CacheAddOn) -> None:
    shop.worker()
    job = shop.take(_job(shop))
    await _complete(shop, job)
    repeated = _job(shop)
    repeated.decisions = _again(cache, job)
    shop.take(repeated)
    order = _order(shop.client().requests[-1])
    assert (order.read, order.record) == (False, True)


async def test_of_what_failed_what_was_decided_is_kept_and_a_pin_needs_no_decision(
    shop: Shop, cache: CacheAddOn
) -> None:
    shop.worker()
    failed = shop.take(_job(shop))
    await _decide(shop, failed, CacheStart(entry=ENTRY, step=2))
    shop.controller.cancel(failed)
    assert _again(cache, failed).by_kind[kinds.CACHE] == failed.decisions.by_kind[kinds.CACHE]
    pinned = shop.take(_job(shop, num_inference_steps=60, techniques=Techniques(cache_entry=PIN)))
    await _complete(shop, pinned, _use())
    assert kinds.CACHE not in _again(cache, pinned).by_kind


def _estimate_s(shop: Shop, job: Job) -> float:
    """Of a job that comes now, alone; a step is .1 s."""
    job.deadline = shop.time.now + 0.01
    shop.time.now += 1.0  # forecasts that are older are made anew
    with pytest.raises(DeadlineUnmeetable) as refused:
        shop.controller.estimates.check_deadline(job)
    return float(refused.value.metadata["estimate_s"])


async def _draw(shop: Shop, count: int, *starts: CacheUse, **spec: Any) -> None:
    for _ in range(count):
        await _complete(shop, shop.take(_job(shop, **spec)), *starts)


async def test_estimates_count_on_the_steps_that_requests_like_it_skipped(shop: Shop) -> None:
    shop.worker()
    assert _estimate_s(shop, _job(shop)) == pytest.approx(1.0)
    await _draw(shop, 7, _use(step=5), prompt="a blue star", seed=2)
    assert _estimate_s(shop, _job(shop)) == pytest.approx(1.0), "too few were measured"
    await _draw(shop, 1, _use(step=5), format=generation_pb2.IMAGE_FORMAT_WEBP)
    assert _estimate_s(shop, _job(shop)) == pytest.approx(0.6)
    await _draw(shop, 8)
    assert _estimate_s(shop, _job(shop)) == pytest.approx(0.8), "half of them found nothing"
    for other in ({"fidelity": EXACT}, {"techniques": OFF}, {"guidance_rescale": 0.5}, {"negative_prompt": ""}):
        assert _estimate_s(shop, _job(shop, **other)) == pytest.approx(1.0)


async def test_estimates_know_what_is_decided_and_what_is_pinned(shop: Shop) -> None:
    shop.worker()
    pinned = _job(shop, techniques=Techniques(cache_entry=f"{ENTRY}@5"))
    assert _estimate_s(shop, pinned) == pytest.approx(0.6)
    decided = _job(shop)
    decided.decisions = _decision(CacheStart(entry=ENTRY, step=3))
    assert _estimate_s(shop, decided) == pytest.approx(0.8)
    await _draw(shop, 20, _use(step=5))
    decided.decisions = _decision(CacheStart())
    assert _estimate_s(shop, decided) == pytest.approx(1.0), "from noise, whatever others find"
    resumed = _job(shop)
    resumed.checkpoint = JobCheckpoint(steps_done=7, data=b"")
    assert _estimate_s(shop, resumed) == pytest.approx(0.3), "of what is left, nothing is skipped"


async def test_pins_say_nothing_of_what_others_will_find(shop: Shop) -> None:
    shop.worker()
    await _draw(shop, 20, _use(step=5), techniques=Techniques(cache_entry=f"{ENTRY}@5"))
    assert _estimate_s(shop, _job(shop)) == pytest.approx(1.0)


async def test_pictures_and_steps_that_were_saved_are_counted(shop: Shop, registry: CollectorRegistry) -> None:
    shop.worker()
    await _draw(shop, 1, _use(0, step=5), _use(2, step=5, made=3), _use(9), num_images=3)
    assert registry.get_sample_value("bottega_cached_pictures_total") == 2
    assert registry.get_sample_value("bottega_skipped_steps_total") == 4 + 1


def test_keys_that_nobody_draws_with_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.addons.cache.gateway._MAX_KEYS", 2)
    rates = HitRates()
    keys = [rate_key(GenerationSpec(model=name), "") for name in "abc"]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        for _ in range(8):
            rates.record(key, 5)
    assert [rates.skipped_steps(key) for key in keys] == [5, 0, 5]


_COMMON: dict[str, Any] = {"model": "m", "width": 64, "negative_prompt": "", "guidance_scale": 4.0}


def _key(tenant: str = "", **other: Any) -> bytes:
    return rate_key(GenerationSpec(**_COMMON | other), tenant)


def test_requests_that_find_the_same_in_the_store_share_a_rate() -> None:
    """Prompt, seed and delivery say nothing of what is found; one tenant's hits say nothing of another's."""
    same = ({"prompt": "a star"}, {"seed": 7}, {"num_images": 8}, {"quality": 9}, {"techniques": Techniques()})
    assert all(_key(**other) == _key() for other in same)
    others: list[dict[str, Any]] = [
        {"model": "n"},
        {"width": 72},
        {"height": 64},
        {"negative_prompt": None},
        {"guidance_scale": 4.5},
        {"num_inference_steps": 9},
        {"use_karras_sigmas": True},
        {"timestep_spacing": 2},
        {"sampler": 1},
        {"fidelity": FIDELITY_FAST},
        {"loras": [Lora(digest="a" * 64, scale=1.0)]},
        {"controlnets": [ControlNet(name="edges")]},
    ]
    keys = {_key(), _key("a"), _key("b"), *(_key(**other) for other in others)}
    assert len(keys) == 3 + len(others)
