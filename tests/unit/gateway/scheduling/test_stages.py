"""Workers that lack a stage get jobs only while a worker with this role serves their model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from bottega import kinds
from bottega.addons.interface.views import Member
from bottega.errors import NoWorker
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.stages import StageRoles
from bottega.v1 import fleet_pb2, image_pb2
from tests.fakes.gateway_rules import Shop
from tests.samples import controlnet_hosts
from tests.samples.jobs import sample_job

GRACE_S = 5.0


def member(
    shop: Shop,
    name: str,
    kind: str = kinds.WORKER,
    *,
    uses: Sequence[str] = (),
    model_hash: str = "hash of m",
    max_pixels: int = 0,
) -> Member:
    model = image_pb2.Model(name="m", model_hash=model_hash, dtype="float32", vae_scale_factor=4, max_pixels=max_pixels)
    address = f"127.0.0.1:{9000 + len(shop.fleet.members())}"
    said = fleet_pb2.Registration(kind=kind, name=name, address=address, models=[model], uses=uses)
    joined = shop.fleet.join(controlnet_hosts.again(said))
    shop.fleet.report(joined, fleet_pb2.Load(max_rows=4))
    return joined


def lora_job(shop: Shop) -> Job:
    """A job with a LoRA that changes text encoders, as far as is known."""
    job = sample_job(shop.time)
    job.bare.loras.add(name="ink", digest="a" * 64)
    return job


def eligible(roles: StageRoles, job: Job, *workers: Member) -> set[str]:
    names = {worker.name: worker for worker in workers}
    costs = roles.costs(job).at(names)
    return set(names if costs.eligible is None else costs.eligible)


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    shop = Shop(model_grace_s=GRACE_S)
    yield shop
    await shop.stop()


@pytest.fixture
def roles(shop: Shop) -> StageRoles:
    return StageRoles(shop.fleet, shop.time.clock(), grace_s=GRACE_S)


async def test_a_worker_that_lacks_a_stage_waits_for_its_role(shop: Shop, roles: StageRoles) -> None:
    whole, part = member(shop, "whole"), member(shop, "part", uses=[kinds.ENCODE, kinds.DECODE])
    job = sample_job(shop.time)
    assert eligible(roles, job, whole, part) == {"whole"}
    member(shop, "enc", kinds.ENCODE)
    other = member(shop, "other", kinds.DECODE, model_hash="another")
    assert eligible(roles, job, whole, part) == {"whole"}, "a decoder of another model does not help"
    assert not other.computes_stage_for(part)
    decoder = member(shop, "dec", kinds.DECODE)
    assert eligible(roles, job, whole, part) == {"whole", "part"}
    shop.fleet.report(decoder, fleet_pb2.Load(draining=True))
    assert eligible(roles, job, whole, part) == {"whole"}


async def test_jobs_that_change_text_encoders_go_to_workers_that_have_them(shop: Shop, roles: StageRoles) -> None:
    whole, part = member(shop, "whole"), member(shop, "part", uses=[kinds.ENCODE])
    undecoding = member(shop, "undecoding", uses=[kinds.DECODE])
    member(shop, "enc", kinds.ENCODE)
    member(shop, "dec", kinds.DECODE)
    edit = sample_job(shop.time)
    edit.request = replace(edit.request, mask_digest="b" * 64)
    for job in (lora_job(shop), edit):
        assert eligible(roles, job, whole, part, undecoding) == {"whole", "undecoding"}
    of_denoiser = lora_job(shop)
    of_denoiser.bare.loras[0].denoiser_only = True
    for job in (sample_job(shop.time), of_denoiser):
        assert eligible(roles, job, whole, part) == {"whole", "part"}
    of_denoiser.bare.loras.add(name="toy", digest="c" * 64, token="<toy>")
    assert eligible(roles, of_denoiser, whole, part) == {"whole"}


def wait(shop: Shop, roles: StageRoles, job: Job, seconds: float) -> NoWorker | None:
    """Let a job wait, which is asked about once a second, and return the first error."""
    end = shop.time.now + seconds
    while shop.time.now < end:
        shop.time.now = min(end, shop.time.now + 1.0)
        if (error := roles.unavailable(job)) is not None:
            return error
    return None


async def test_a_job_that_no_worker_may_get_fails_after_the_grace(shop: Shop, roles: StageRoles) -> None:
    member(shop, "part", uses=[kinds.ENCODE])
    job, with_lora = sample_job(shop.time), lora_job(shop)
    assert roles.unavailable(job) is None
    assert wait(shop, roles, job, GRACE_S - 0.5) is None
    error = wait(shop, roles, job, 1.0)
    assert isinstance(error, NoWorker)
    assert error.message == (
        "no worker of model m can draw the job: part lacks the role encode, and no worker with only this role serves "
        "its model now"
    )
    member(shop, "enc", kinds.ENCODE)
    assert wait(shop, roles, job, 1.0) is None
    error = wait(shop, roles, with_lora, GRACE_S + 2)
    assert error is not None
    what = "LoRAs of text encoders, embeddings and masks"
    assert f"{what} need a worker with the role encode, which part lacks" in error.message


async def test_each_outage_of_a_role_has_its_own_grace(shop: Shop, roles: StageRoles) -> None:
    member(shop, "part", uses=[kinds.DECODE])
    job = sample_job(shop.time)
    assert wait(shop, roles, job, GRACE_S - 1) is None
    decoder = member(shop, "dec", kinds.DECODE)
    shop.time.now += 10 * GRACE_S  # nobody asks while no job waits
    shop.fleet.leave(decoder, decoder.stream)
    assert wait(shop, roles, job, GRACE_S - 1) is None
    assert wait(shop, roles, job, 2.0) is not None


async def test_jobs_wait_for_a_role_that_is_starting(shop: Shop, roles: StageRoles) -> None:
    member(shop, "part", uses=[kinds.DECODE])
    said = fleet_pb2.Registration(kind=kinds.DECODE, name="dec", address="127.0.0.1:9")
    starting = shop.fleet.join(controlnet_hosts.again(said))
    job = sample_job(shop.time)
    assert wait(shop, roles, job, 20 * GRACE_S) is None
    shop.fleet.leave(starting, starting.stream)
    assert wait(shop, roles, job, 1.0) is not None, "a worker that ends in its start does not begin a new grace"


async def test_jobs_wait_twice_as_long_as_a_role_takes_to_start(shop: Shop, roles: StageRoles) -> None:
    member(shop, "part", uses=[kinds.DECODE])
    decoder = member(shop, "dec", kinds.DECODE)
    shop.fleet.report(decoder, fleet_pb2.Load(start_s=100))
    roles.member_changed(decoder)
    shop.fleet.leave(decoder, decoder.stream)
    job = sample_job(shop.time)
    assert wait(shop, roles, job, 199) is None
    assert wait(shop, roles, job, 3) is not None


async def test_a_model_takes_no_larger_pictures_than_its_decoders(shop: Shop) -> None:
    member(shop, "part", uses=[kinds.DECODE], max_pixels=4096)
    small = member(shop, "small", kinds.DECODE, max_pixels=1024)
    member(shop, "large", kinds.DECODE, max_pixels=8192)
    member(shop, "other", kinds.DECODE, model_hash="another", max_pixels=64)
    assert shop.fleet.resolve("m").max_pixels == 1024
    shop.fleet.leave(small, small.stream)
    assert shop.fleet.resolve("m").max_pixels == 4096


async def test_the_queue_schedules_a_job_when_its_role_has_joined(shop: Shop) -> None:
    worker = member(shop, "part", uses=[kinds.DECODE])
    job = shop.take(sample_job(shop.time))
    assert not shop.running(worker)
    member(shop, "dec", kinds.DECODE)
    shop.controller.scheduler.schedule("m")
    assert shop.running(worker) == [job]


async def test_a_stage_worker_joins_again_when_its_model_is_loaded(shop: Shop) -> None:
    said = fleet_pb2.Registration(kind=kinds.DECODE, name="dec", address="127.0.0.1:9")
    starting = controlnet_hosts.again(said)
    assert shop.fleet.join(starting).is_starting
    ready = fleet_pb2.Registration()
    ready.CopyFrom(starting)
    ready.models.add(name="m", model_hash="hash of m")
    joined = shop.fleet.join(ready)
    assert not joined.is_starting
    assert not joined.serves("m"), "it gets no jobs"
