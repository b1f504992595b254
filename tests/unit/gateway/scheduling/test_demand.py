"""The number of services that each model needs, on a gateway whose clock the test turns."""

from __future__ import annotations

import dataclasses

import pytest

from bottega import kinds
from bottega.addons.interface.views import Member
from bottega.errors import NoWorker
from bottega.gateway.jobs.job import Job
from bottega.v1 import fleet_pb2
from bottega.v1.fleet_pb2 import Demand, Pool
from tests.fakes.gateway_rules import Shop
from tests.samples import controlnet_hosts
from tests.samples.jobs import sample_job


def scaler(shop: Shop, name: str, *pools: Pool) -> Member:
    """Let a scaler join with its pools, or report them anew."""
    known = [member for member in shop.fleet.members() if member.name == name]
    said = fleet_pb2.Registration(kind=kinds.SCALE, name=name, address=f"127.0.0.1:{9000 + len(name)}")
    member = known[0] if known else shop.fleet.join(controlnet_hosts.again(said))
    shop.fleet.report(member, fleet_pb2.Load(pools=pools))
    return member


def pool(*, minimum: int = 0, maximum: int = 4, ready: int = 0, failed: int = 0, model: str = "m") -> Pool:
    return Pool(kind="worker", model=model, minimum=minimum, maximum=maximum, ready=ready, failed=failed)


def forecast(shop: Shop) -> Demand:
    shop.controller.demand.update()
    (demand,) = shop.controller.demand.demand
    return demand


def targets(shop: Shop, member: Member) -> list[int]:
    return [target.count for target in shop.controller.demand.targets(member)]


def submit(shop: Shop, count: int) -> list[Job]:
    return [shop.take(sample_job(shop.time)) for _ in range(count)]


async def test_a_queue_that_workers_cannot_empty_in_time_needs_more(shop: Shop) -> None:
    shop.worker(seconds=1.0)
    assert forecast(shop).desired == 1
    submit(shop, 8)
    demand = forecast(shop)
    assert (demand.kind, demand.model, demand.ready) == (kinds.WORKER, "m", 1)
    assert demand.waiting > 0
    assert demand.waiting_s > 0
    assert demand.desired > 1
    value = shop.registry.get_sample_value
    assert value("bottega_desired_services", {"kind": "worker", "model": "m"}) == demand.desired
    assert value("bottega_waiting_work_seconds", {"model": "m"}) == demand.waiting_s


async def test_scalers_get_their_shares_and_the_bounds_hold(shop: Shop) -> None:
    shop.worker(seconds=1.0)
    left, right = scaler(shop, "left", pool(minimum=1, ready=1)), scaler(shop, "right-1", pool(maximum=2))
    assert forecast(shop).desired == 1
    assert (targets(shop, left), targets(shop, right)) == ([1], [0])
    submit(shop, 200)
    left.wake.clear()
    assert forecast(shop).desired == 6
    assert (targets(shop, left), targets(shop, right)) == ([4], [2])
    assert left.wake.is_set(), "the scaler is told at once"


async def test_a_restart_of_the_gateway_stops_no_running_worker(shop: Shop) -> None:
    shop.controller.demand.begin(grace_s=30)
    member = scaler(shop, "host", pool(minimum=1, ready=3))
    forecast(shop)
    assert targets(shop, member) == [3], "the scaler joined again before its workers"
    workers = [shop.worker(name) for name in ("w1", "w2", "w3")]
    for _ in range(2 * (30 + 59)):
        forecast(shop)
        assert targets(shop, member) == [3]
        shop.time.now += 0.5
        for each in (member, *workers):
            shop.fleet.report_unchanged(each)
    shop.time.now += 10
    forecast(shop)
    assert targets(shop, member) == [1], "fewer have been enough for long"


async def test_a_scaler_with_too_many_workers_is_told_which_have_nothing_to_do(shop: Shop) -> None:
    shop.controller.demand.begin(grace_s=0)
    member = scaler(shop, "host", pool(minimum=1, ready=3))
    workers = [shop.worker(name) for name in ("w1", "w2", "w3")]
    forecast(shop)
    (target,) = shop.controller.demand.targets(member)
    assert (target.count, list(target.idle)) == (3, []), "as many as run"
    (job,) = submit(shop, 1)
    (busy,) = [worker for worker, link in shop.controller._dispatcher.connections.items() if link.jobs]
    for _ in range(130):
        shop.time.now += 0.5
        for each in (member, *workers):
            shop.fleet.report_unchanged(each)
        forecast(shop)
    (target,) = shop.controller.demand.targets(member)
    assert target.count == 1
    assert list(target.idle) == sorted({"w1", "w2", "w3"} - {busy.name})
    assert job.live


async def test_a_scaler_that_joins_during_the_grace_loses_no_worker(shop: Shop) -> None:
    for name in ("w1", "w2", "w3", "w4", "w5"):
        shop.worker(name)
    left = scaler(shop, "left", pool(minimum=1, ready=2))
    forecast(shop)
    right = scaler(shop, "right-1", pool(minimum=1, ready=3))
    forecast(shop)
    assert (targets(shop, left), targets(shop, right)) == ([2], [3])


async def test_a_gateway_tells_scalers_nothing_unless_it_schedules(shop: Shop) -> None:
    demand = shop.controller.demand
    member = scaler(shop, "host", pool(minimum=1, ready=3))
    shop.worker(seconds=1.0)
    forecast(shop)
    assert targets(shop, member) == [3]
    demand.end()
    demand.update()
    assert (demand.demand, targets(shop, member)) == ((), [])
    scaler(shop, "host", pool(minimum=1, ready=1))
    demand.begin(grace_s=30)
    forecast(shop)
    assert targets(shop, member) == [1], "nothing is left of the time before"


async def test_workers_that_no_scaler_runs_count(shop: Shop) -> None:
    for name in ("w1", "w2"):
        shop.worker(name)
    member = scaler(shop, "host", pool(minimum=1, ready=0))
    assert forecast(shop).desired == 3
    assert targets(shop, member) == [1]


async def test_a_worker_that_its_scaler_has_not_reported_yet_is_not_stopped(shop: Shop) -> None:
    member = scaler(shop, "host", pool(model="m"), pool(model="other"))
    shop.controller.demand.update()
    starting = Pool(kind="worker", model="m", maximum=4, starting_s=[5.0])
    scaler(shop, "host", starting)
    shop.worker(seconds=1.0)
    submit(shop, 1)
    forecast(shop)
    assert targets(shop, member) == [1], "the worker is the one that starts"
    scaler(shop, "host", pool(ready=1))
    forecast(shop)
    assert targets(shop, member) == [1]


async def test_a_host_whose_services_fail_is_asked_for_fewer(shop: Shop) -> None:
    member = scaler(shop, "host", pool(minimum=2, failed=3))
    assert forecast(shop).desired == 1
    assert targets(shop, member) == [1]


async def test_a_model_without_workers_is_served_if_a_scaler_may_start_one(shop: Shop) -> None:
    worker = shop.worker(seconds=1.0)
    member = scaler(shop, "host", pool(ready=1))
    forecast(shop)
    shop.fleet.leave(worker, worker.stream)
    shop.time.now += 1000
    shop.fleet.report_unchanged(member)
    shop.fleet.expire()
    scaler(shop, "host", pool())
    assert shop.fleet.resolve("m").workers == 0
    assert [model.name for model in shop.fleet.models()] == ["m"]
    submit(shop, 1)
    shop.periodic._check_queue()
    assert forecast(shop).desired == 1
    assert targets(shop, member) == [1]


async def test_a_model_that_no_worker_has_served_yet_is_started_when_asked_for(shop: Shop) -> None:
    member = scaler(shop, "host", pool(model="new"))
    assert forecast(shop).desired == 0
    with pytest.raises(NoWorker, match="is being started") as caught:  # its features are not known
        shop.fleet.resolve("new")
    assert caught.value.retry_after_s
    assert forecast(shop).desired == 1
    assert targets(shop, member) == [1]
    shop.time.now += 61
    assert not shop.fleet.is_wanted("new")


async def test_the_fall_waits_until_fewer_have_been_enough_for_a_while(shop: Shop) -> None:
    worker = shop.worker(seconds=0.5)
    for job in submit(shop, 12):
        del job
    assert (high := forecast(shop).desired) > 1
    for job in list(shop.log.live()):
        shop.controller.cancel(job)
    shop.report(worker, seconds=0.5)
    assert forecast(shop).desired == high
    for _ in range(20):
        shop.time.now += 30
        shop.fleet.report_unchanged(worker)
        forecast(shop)
    assert forecast(shop).desired <= 1


async def test_controlnet_servers_follow_the_jobs_that_use_them(shop: Shop) -> None:
    shop.worker(seconds=1.0)
    servers = Pool(kind=kinds.CONTROLNET, model="m", minimum=1, maximum=3)
    member = scaler(shop, "host", servers)
    shop.controller.demand.update()
    assert targets(shop, member) == [1]
    model = shop.controller.demand._models["m"]
    work = dataclasses.replace(shop.controller.demand._work("m", model, shop.time.now), controlnet_jobs=17)
    (_, need) = shop.controller.demand._forecasts("m", model, work, shop.controller.demand._pools())
    assert (need.need.least, need.need.most) == (3, 3)


async def test_a_pool_whose_workers_serve_another_model_is_named_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.worker()
    scaler(shop, "host", pool(ready=1, model="typo"), pool(ready=1))
    for _ in range(30):
        shop.controller.demand.update()
    (record,) = [record for record in caplog.records if "pools.model" in record.message]
    assert [getattr(record, name) for name in ("model", "scalers", "served")] == ["typo", ["host"], ["m"]]


def with_stages(shop: Shop) -> Member:
    """A scaler with workers of one role, which take 0.25 s to encode and 4 s to decode."""
    stages = [Pool(kind=kind, model="m", minimum=1, maximum=9, ready=1) for kind in kinds.STAGES]
    member = scaler(shop, "host", *stages)
    for kind, request_s in zip(kinds.STAGES, (0.25, 4.0), strict=True):
        said = fleet_pb2.Registration(kind=kind, name=kind, address="127.0.0.1:7")
        said.models.add(name="m", model_hash="hash of m")
        shop.fleet.report(shop.fleet.join(controlnet_hosts.again(said)), fleet_pb2.Load(fixed_s=request_s))
    return member


async def test_workers_with_one_role_follow_the_requests_that_jobs_make(shop: Shop) -> None:
    shop.worker(seconds=1.0, asks=kinds.STAGES)
    member = with_stages(shop)
    shop.controller.demand.update()
    assert targets(shop, member) == [1, 1]
    submit(shop, 10)
    waiting = len(list(shop.queue.line("m")))
    shop.controller.demand.update()
    by_kind = {demand.kind: demand for demand in shop.controller.demand.demand}
    assert (by_kind["encode"].ready, by_kind["encode"].desired) == (1, 1)
    assert (by_kind["decode"].ready, by_kind["decode"].desired) == (1, -(-waiting * 4 // 10)), "10 s are wait_s"
    assert targets(shop, member) == [1, -(-waiting * 4 // 10)]


async def test_jobs_of_whole_workers_need_no_workers_with_one_role(shop: Shop) -> None:
    shop.worker("whole", seconds=1.0)
    member = with_stages(shop)
    submit(shop, 40)
    shop.controller.demand.update()
    assert targets(shop, member) == [1, 1], "their minimum"
    shop.worker("denoises", seconds=1.0, asks=kinds.STAGES)
    waiting = len(list(shop.queue.line("m")))
    shop.controller.demand.update()
    assert targets(shop, member) == [1, -(-waiting * 4 // 20)], "half of the images"


async def test_seconds_of_workers_with_one_role_are_no_work_of_those_that_ask_them() -> None:
    waiting_s: list[float] = []
    for asks in ((), kinds.STAGES):
        shop = Shop()
        worker = shop.worker(seconds=1.0, asks=asks)
        with_stages(shop)
        shop.report(worker, seconds=1.0, beside_s=4.25)
        submit(shop, 10)
        shop.controller.demand.update()
        (demand,) = [demand for demand in shop.controller.demand.demand if demand.kind == kinds.WORKER]
        waiting_s.append(demand.waiting_s / demand.waiting)
        await shop.stop()
    assert waiting_s[0] - waiting_s[1] == pytest.approx(4.25)
