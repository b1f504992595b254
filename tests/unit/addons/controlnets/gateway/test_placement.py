"""Jobs with ControlNets by the gateway's rules: where they go, what they are told, how long they wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from bottega.addons.controlnets.gateway import replicas as replicas_module
from bottega.addons.controlnets.gateway.hosts import ControlNetHosts
from bottega.addons.controlnets.gateway.ranking import ServerCandidate, best_first
from bottega.addons.controlnets.gateway.replicas import ReplicaPolicy
from bottega.addons.controlnets.gateway.server_loads import Copy, ServerLoads
from bottega.addons.interface.gateway_addon import PrefetchReason
from bottega.addons.interface.views import Member
from bottega.errors import NoControlNet, NoWorker, Unavailable, WorkerLost
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import JobCheckpoint
from bottega.v1 import image_pb2
from bottega.v1.hosted_pb2 import ForwardTime, Hosted, ResidualProfile
from tests.fakes.gateway_rules import FakeServer, Shop
from tests.samples.controlnet_hosts import LOADED, LOADING, ON_DISK, load, net, server
from tests.samples.jobs import sample_job
from tests.support.addon_messages import placements
from tests.support.waiting import eventually

QUEUED, RUNNING = image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    shop = Shop()
    yield shop
    await shop.stop()


def _server(shop: Shop, *nets: Hosted, name: str = "s1", budget_bytes: int = 0) -> Member:
    port = 100 + int(name.removeprefix("s"))
    member = shop.fleet.join(server(name, port=port))
    shop.fleet.report(member, load(*nets, budget_bytes=budget_bytes))
    return member


def _job(shop: Shop, *names: str) -> Job:
    return sample_job(shop.time, controlnets=names)


def _told(shop: Shop, job: Job) -> list[tuple[str, list[str]]]:
    """Of the newest attempt: for each ControlNet its version and servers."""
    request = shop.client(job.worker).requests[-1]
    assert request.attempt.job_id == job.job_id
    return [(hosts.digest, [server.name for server in hosts.servers]) for hosts in placements(request.addons)]


async def test_an_attempt_is_told_who_hosts_its_controlnets_the_best_first(shop: Shop) -> None:
    shop.worker()
    _server(shop, net("edges", state=ON_DISK), net("depth"), name="s1")
    _server(shop, net("edges"), name="s2")
    job = shop.take(_job(shop, "edges", "depth", "edges"))
    assert _told(shop, job) == [
        ("hash of edges", ["s2", "s1"]),
        ("hash of depth", ["s1"]),
        ("hash of edges", ["s2", "s1"]),
    ]
    (edges, *_) = placements(shop.client().requests[-1].addons)
    assert [one.address for one in edges.servers] == ["127.0.0.1:102", "127.0.0.1:101"]


@pytest.mark.parametrize(
    ("profiles", "listed", "said"),
    [
        ([("hash of m", 20, 0.995), ("hash of m", 10, 0.9)], False, 0.9),  # the least of what servers know
        ([("hash of m", 21, 0.995)], False, None),  # with fewer steps they are further apart
        ([("another model", 20, 0.995)], False, None),
        ([("hash of m", 2, 0.995)], True, None),  # nothing is known of steps that the request lists
    ],
)
async def test_an_attempt_is_told_the_profile_that_holds_for_its_model_and_steps(
    shop: Shop, profiles: list[tuple[str, int, float]], listed: bool, said: float | None
) -> None:
    shop.worker()
    for number, (model, steps, similarity) in enumerate(profiles, start=1):
        known = ResidualProfile(model_hash=model, num_inference_steps=steps, similarity=similarity)
        _server(shop, net("edges", profiles=[known]), name=f"s{number}")
    job = _job(shop, "edges")
    job.bare.num_inference_steps = 20
    if listed:
        job.bare.timesteps.extend(range(900, 0, -45))
    shop.take(job)
    (edges,) = placements(shop.client().requests[-1].addons)
    assert (edges.similarity if edges.HasField("similarity") else None) == said


async def test_controlnets_of_one_job_go_to_different_servers_where_they_can(shop: Shop) -> None:
    shop.worker()
    for name in ("s1", "s2"):
        _server(shop, net("edges"), net("depth"), name=name)
    for _ in range(8):
        job = shop.take(_job(shop, "edges", "depth"))
        firsts = {servers[0] for _, servers in _told(shop, job)}
        assert firsts == {"s1", "s2"}
        await shop.complete(job)


async def test_what_was_given_out_counts_before_it_is_reported_and_not_after_the_job(shop: Shop) -> None:
    for name in ("w1", "w2"):
        shop.worker(name)
    for name in ("s1", "s2"):
        _server(shop, net("edges"), name=name)
    one, other = shop.take(_job(shop, "edges")), shop.take(_job(shop, "edges"))
    assert one.servers != other.servers
    await shop.complete(one)
    third = shop.take(_job(shop, "edges"))
    assert third.servers == one.servers
    assert shop.controlnets._loads.assigned.total() == 2
    for job in (other, third):
        await shop.complete(job)
    assert not shop.controlnets._loads.assigned
    assert not shop.controlnets._loads._at


async def test_jobs_that_come_together_agree_on_the_server_that_loads_for_the_first_of_them(shop: Shop) -> None:
    for name in ("w1", "w2", "w3"):
        shop.worker(name)
    for name in ("s1", "s2", "s3"):
        _server(shop, net("edges", state=ON_DISK), name=name)
    jobs = [shop.take(_job(shop, "edges")) for _ in range(3)]
    assert len({job.servers for job in jobs}) == 1, "or each of them would load it"
    for job in jobs:
        await shop.complete(job)
    assert not shop.controlnets._loads.assigned


async def test_a_job_waits_for_its_controlnet_and_holds_up_nobody(shop: Shop) -> None:
    shop.worker()
    member = _server(shop, net("edges"))
    shop.fleet.leave(member, member.stream)
    waiting = [shop.take(_job(shop, "edges")) for _ in range(40)]  # more than are looked at in one go
    plain = shop.submit()
    assert plain.state == RUNNING
    assert {job.state for job in waiting} == {QUEUED}
    await shop.complete(plain)
    _server(shop, net("edges"), name="s2")
    await eventually(lambda: waiting[0].state == RUNNING)
    assert _told(shop, waiting[0]) == [("hash of edges", ["s2"])]


async def test_a_job_that_waits_in_vain_for_its_controlnet_fails_after_the_grace(shop: Shop) -> None:
    worker = shop.worker()
    member = _server(shop, net("edges"))
    shop.fleet.leave(member, member.stream)
    shop.time.now += 31  # beyond the patience with an earlier life's jobs
    shop.report(worker)
    late = _server(shop, net("edges"), name="s2")
    shop.fleet.leave(late, late.stream)
    job = shop.take(_job(shop, "edges"))
    assert shop.controlnets.unavailable(job) is None
    shop.time.now += 31
    shop.report(worker)
    shop.start()
    await eventually(job.ended.is_set)
    assert isinstance(job.error, NoControlNet)
    assert job.error.metadata == {"controlnets": "edges"}


async def test_an_attempt_that_reaches_no_server_is_taken_up_where_it_was_and_the_worker_is_not_blamed(
    shop: Shop,
) -> None:
    worker = shop.worker()
    _server(shop, net("edges"), name="s1")
    job = shop.take(_job(shop, "edges"))
    job.set_checkpoint(job.number, JobCheckpoint(steps_done=4, data=b"4"))
    await shop.fail(job, NoControlNet("s1 is gone", metadata={"controlnets": "edges", "servers": "s1"}))
    assert (job.state, job.losses.beside_others, job.losses.deaths) == (QUEUED, 0, 0)
    assert shop.submit().worker == worker.name, "others go on there"
    other = _server(shop, net("edges"), name="s2")
    shop.worker("w2")
    assert (job.state, job.servers) == (RUNNING, ("s2",))
    assert shop.client("w2").requests[-1].checkpoint == b"4"
    assert other.connected


async def test_a_server_that_cannot_be_reached_is_asked_again_after_a_rest_and_in_the_end_the_job_fails(
    shop: Shop,
) -> None:
    worker = shop.worker()
    _server(shop, net("edges"), name="s1")
    job = shop.take(_job(shop, "edges"))
    began = shop.time.now
    while job.live:
        await shop.fail(job, NoControlNet("no server answers"))
        assert job.state != RUNNING
        shop.time.now += 0.5
        shop.report(worker)
    assert 20 < shop.time.now - began < 60
    assert isinstance(job.error, NoControlNet)
    assert not isinstance(job.error, NoWorker)


async def test_a_checkpoint_of_another_version_is_not_taken_up(shop: Shop) -> None:
    shop.worker()
    old = _server(shop, net("edges", digest="1"), name="s1")
    job = shop.take(_job(shop, "edges"))
    job.set_checkpoint(job.number, JobCheckpoint(steps_done=4, data=b"4"))
    _server(shop, net("edges", digest="2"), name="s2")
    await shop.fail(job, WorkerLost("cut off"))
    shop.time.now += 1
    shop.report(shop.member("w1"))
    assert _told(shop, job) == [("1", ["s1"])]
    assert shop.client().requests[-1].checkpoint == b"4"
    shop.fleet.leave(old, old.stream)
    await shop.fail(job, WorkerLost("cut off"))
    shop.time.now += 1
    shop.report(shop.member("w1"))
    assert _told(shop, job) == [("2", ["s2"])]
    assert shop.client().requests[-1].checkpoint == b""


async def test_an_attempt_that_is_adopted_before_its_server_is_back_keeps_its_checkpoint(shop: Shop) -> None:
    shop.worker()
    _server(shop, net("edges"))
    assert shop.take(_job(shop, "edges")).state == RUNNING
    await shop.stop()
    shop.open()
    worker = shop.worker()
    job = next(shop.log.live())
    assert job.adopt_attempt(worker.name, job.number)
    shop.dispatcher.adopt_attempt(job, shop.dispatcher.connections[worker])
    assert _told(shop, job) == [("", [])]
    job.set_checkpoint(job.number, JobCheckpoint(steps_done=4, data=b"4"))
    _server(shop, net("edges"))
    await shop.fail(job, WorkerLost("cut off"))
    shop.time.now += 1
    shop.report(shop.member("w1"))
    assert _told(shop, job) == [("hash of edges", ["s1"])]
    assert shop.client().requests[-1].checkpoint == b"4"


async def test_a_queue_of_jobs_whose_controlnet_is_away_asks_for_its_costs_once(shop: Shop) -> None:
    for number in (1, 2):
        shop.worker(f"w{number}")
    member = _server(shop, net("edges"))
    shop.fleet.leave(member, member.stream)
    for _ in range(100):
        shop.take(_job(shop, "edges"))
    asked, hosts = list[str](), shop.controlnets._hosts

    class Counted(ControlNetHosts):
        def hosts(self, name: str, base: str) -> Iterator[tuple[Member, Hosted]]:
            asked.append(name)
            return hosts.hosts(name, base)

    shop.controlnets._hosts = Counted(grace_s=shop.fleet.grace_s, clock=shop.time.clock())
    shop.controller.scheduler.schedule("m")
    assert 0 < len(asked) < 10, "all jobs have the costs of the first one"


async def test_a_worker_with_the_weights_at_hand_takes_what_no_server_hosts(shop: Shop) -> None:
    shop.worker("w1")
    shop.worker("w2")
    shop.report(shop.member("w2"), controlnets=[net("edges")])
    job = shop.take(_job(shop, "edges"))
    assert job.worker == "w2"
    assert _told(shop, job) == [("hash of edges", [])]
    waits = shop.take(_job(shop, "edges"))
    plain = shop.submit()
    assert (waits.state, plain.worker) == (QUEUED, "w1"), "it holds up nobody"
    _server(shop, net("edges"))
    await shop.complete(plain)
    assert waits.worker == "w1"


@pytest.mark.parametrize(("size_bytes", "second"), [(400 << 20, "w1"), (5 << 30, "")])
async def test_loading_the_weights_counts_as_time_that_a_worker_takes(shop: Shop, size_bytes: int, second: str) -> None:
    shop.report(shop.worker("w1"), controlnets=[net("edges", size_bytes=size_bytes, state=ON_DISK)])
    shop.report(shop.worker("w2"), controlnets=[net("edges", size_bytes=size_bytes)])
    assert shop.take(_job(shop, "edges")).worker == "w2"
    # A second to load and draw at w1 is less than to wait for w2; five seconds more are not.
    assert shop.take(_job(shop, "edges")).worker == second


async def test_what_jobs_in_the_queue_will_need_is_loaded_ahead(shop: Shop) -> None:
    shop.worker()
    _server(shop, net("edges", state=ON_DISK), net("depth"), net("pose", state=ON_DISK))
    runs = shop.take(_job(shop, "depth"))
    assert runs.state == RUNNING
    shop.take(_job(shop, "edges", "depth"))
    shop.take(_job(shop, "edges", "pose"))
    await asyncio.sleep(0)
    (server,) = shop.servers.values()
    assert server.prefetched == [["edges", "pose"]]
    assert _prefetches(shop, "requested") == 1


async def test_a_server_that_does_not_answer_is_asked_until_it_says_that_it_loads(shop: Shop) -> None:
    shop.worker()
    member = _server(shop, net("edges", state=ON_DISK))
    shop.submit()
    shop.servers["127.0.0.1:101"] = fake = FakeServer(failure=Unavailable("nobody there"))
    job = shop.take(_job(shop, "edges"))
    assert job.state == QUEUED
    shop.start()
    await eventually(lambda: len(fake.prefetched) >= 2)
    assert _prefetches(shop, "failed")
    shop.fleet.report(member, load(net("edges", state=LOADING)))
    asked = len(fake.prefetched)
    shop.controlnets.prefetch([job], PrefetchReason.NEXT)
    await asyncio.sleep(0)
    assert len(fake.prefetched) == asked
    shop.time.now += 2
    shop.fleet.expire()
    await eventually(lambda: fake.closed, "it is lost")


async def test_a_fault_while_controlnets_are_prefetched_is_logged_and_the_server_is_asked_again(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.worker()
    _server(shop, net("edges", state=ON_DISK))
    shop.submit()
    shop.servers["127.0.0.1:101"] = fake = FakeServer(failure=ValueError("what no client should raise"))
    job = shop.take(_job(shop, "edges"))
    await eventually(lambda: [line.levelname for line in caplog.records if line.exc_info] == ["ERROR"])
    fake.failure = None
    shop.controlnets.prefetch([job], PrefetchReason.NEXT)
    await eventually(lambda: _prefetches(shop, "requested") == 1)


async def test_only_the_first_of_a_long_queue_have_their_controlnets_loaded_ahead(shop: Shop) -> None:
    shop.worker()
    _server(shop, *(net(f"net-{number}", state=ON_DISK) for number in range(20)))
    shop.submit()
    for number in range(20):
        shop.take(_job(shop, f"net-{number}"))
    expected = [f"net-{number}" for number in range(8)]
    await eventually(
        lambda: [name for each in shop.servers.values() for names in each.prefetched for name in names] == expected
    )


def _prefetches(shop: Shop, outcome: str) -> float | None:
    return shop.registry.get_sample_value("bottega_prefetches_total", {"kind": "controlnet", "outcome": outcome})


def _candidate(server: str, *, sessions: int = 0, **facts: Any) -> ServerCandidate:
    """Return a server with that many sessions of other jobs, whose forward passes take a tenth of a second each."""
    load_s = {LOADED: 0.0, LOADING: 1.25, ON_DISK: 2.5}[facts.get("state", LOADED)]
    defaults = {"digest": "d", "state": LOADED, "load_s": load_s, "own_s": 0.1, "others_s": 0.1 * sessions}
    return ServerCandidate(**{"server": server, **defaults, **facts})


def _names(
    *candidates: ServerCandidate, job_id: str = "j", digest: str = "", steps: int = 20, turn_s: float | None = 0.25
) -> list[str]:
    groups = [[candidate] for candidate in candidates]
    ranked = best_first(groups, name="edges", job_id=job_id, digest=digest, steps=steps, turn_s=turn_s)
    return [candidate.server for candidate in ranked]


def test_512_sessions_of_a_loaded_server_do_not_beat_an_idle_one() -> None:
    hot, idle = _candidate("hot", sessions=512), _candidate("idle", state=ON_DISK)
    assert _names(hot, idle) == ["idle", "hot"]
    for sessions in (0, 3):
        few = _candidate("hot", sessions=sessions)
        assert _names(few, idle) == ["hot", "idle"], "nobody loads it a second time before waiting would take longer"
    assert _names(hot, _candidate("loading", state=LOADING), idle)[0] == "loading"


def test_a_short_job_does_not_wait_for_a_load_that_a_long_one_waits_for() -> None:
    servers = _candidate("hot", sessions=6), _candidate("idle", state=ON_DISK)
    assert [_names(*servers, steps=steps)[0] for steps in (2, 50)] == ["hot", "idle"]


def test_one_that_has_it_loaded_goes_before_one_that_loads_it_and_that_before_one_that_has_it_on_the_disk() -> None:
    disk = _candidate("disk", state=ON_DISK)
    loading = _candidate("loading", state=LOADING, sessions=1)
    loaded = _candidate("loaded", sessions=2)
    assert _names(disk, loading, loaded) == ["loaded", "loading", "disk"]


def test_jobs_spread_over_servers_that_are_equally_ready() -> None:
    servers = [_candidate(name) for name in "abcd"]
    firsts = Counter(_names(*servers, job_id=f"job-{number}")[0] for number in range(400))
    assert set(firsts) == set("abcd")
    assert min(firsts.values()) > 50


async def test_a_server_without_room_comes_last_and_gets_no_copy(shop: Shop) -> None:
    shop.worker()
    _server(shop, net("edges", sessions=512, size_bytes=2000), name="s1", budget_bytes=2000)
    _server(shop, net("edges", state=ON_DISK, size_bytes=2000), name="s2", budget_bytes=1000)
    job = shop.take(_job(shop, "edges"))
    assert _told(shop, job) == [("hash of edges", ["s1", "s2"])]
    for _ in range(3):
        shop.controlnets._replicas.look()
        shop.time.now += 5.0
    await asyncio.sleep(0)
    assert not shop.servers


async def test_jobs_follow_what_servers_report(shop: Shop) -> None:
    shop.worker()
    first = _server(shop, net("edges", sessions=3), name="s1")
    second = _server(shop, net("edges"), name="s2")
    job = shop.take(_job(shop, "edges"))
    assert job.servers == ("s2",)
    await shop.complete(job)
    shop.fleet.report(first, load(net("edges")))
    shop.fleet.report(second, load(net("edges", sessions=3)))
    job = shop.take(_job(shop, "edges"))
    assert job.servers == ("s1",)
    await shop.complete(job)
    shop.fleet.report(first, load(net("edges", state=ON_DISK)))
    job = shop.take(_job(shop, "edges"))
    assert job.servers == ("s2",)
    await shop.complete(job)
    for member in (first, second):
        shop.fleet.report(member, load(net("edges"), draining=True))
    job = shop.take(_job(shop, "edges"))
    assert (job.state, job.servers) == (QUEUED, ())
    assert shop.controlnets.unavailable(job) is None, "they may be back soon"


async def test_sessions_count_at_a_server_from_when_they_are_given_out_to_their_end(shop: Shop) -> None:
    member = _server(shop, net("edges"))
    loads = ServerLoads(shop.controlnets._hosts)

    def others_s() -> float:
        (hosted,) = shop.controlnets._hosts.hosted_by(member)
        return loads.candidate(member, hosted, shape=(16, 16), rows=2).others_s

    alone_s = others_s()
    loads.assign([("s1", "edges")])
    beside_one_s = others_s()
    loads.release([("s1", "edges")])
    assert others_s() == alone_s < beside_one_s


async def test_measured_forward_passes_decide_between_servers(shop: Shop) -> None:
    shop.worker()
    slow, fast = ([ForwardTime(latent_height=64, latent_width=64, rows=2, seconds=seconds)] for seconds in (0.4, 0.1))
    _server(shop, net("edges", forward_times=slow), name="s1")
    _server(shop, net("edges", forward_times=fast, sessions=1), name="s2")
    assert shop.take(_job(shop, "edges")).servers == ("s2",)


async def test_a_hot_controlnet_is_loaded_by_another_server_and_given_up_when_idle(shop: Shop) -> None:
    shop.worker()
    hot = _server(shop, net("edges", sessions=20), name="s1")
    full = _server(shop, net("edges", state=ON_DISK, size_bytes=2 << 30), net("depth"), name="s2", budget_bytes=2 << 30)
    free = _server(shop, net("edges", state=ON_DISK, size_bytes=2 << 30), name="s3", budget_bytes=4 << 30)
    assert (full.name, free.name) == ("s2", "s3")
    replicas = shop.controlnets._replicas
    for _ in range(3):
        replicas.look()
        await asyncio.sleep(0)
        assert not shop.servers, "a burst is over before a load is"
        shop.time.now += 1.1
    replicas.look()
    await asyncio.sleep(0)
    assert {address: server.prefetched for address, server in shop.servers.items()} == {
        free.registration.address: [["edges"]]
    }
    shop.fleet.report(hot, load(net("edges")))
    shop.fleet.report(free, load(net("edges", size_bytes=2 << 30, copied=True), budget_bytes=4 << 30))
    replicas.look()
    shop.time.now += 61.0
    replicas.look()
    await asyncio.sleep(0)
    assert [server.prefetched for server in shop.evictors.values()] == [[["edges"]]]
    replicas.close()


def test_a_copy_that_is_used_or_pinned_or_that_a_job_has_made_stays(shop: Shop) -> None:
    policy = ReplicaPolicy()

    def copies(**facts: Any) -> dict[str, list[Copy]]:
        defaults: dict[str, Any] = {"loaded": True, "fits": True, "sessions": 0, "pinned": False, "copied": True}
        first = Copy(**{**defaults, "candidate": _candidate("s1", sessions=20), "sessions": 20, "copied": False})
        return {"edges": [first, Copy(**{**defaults, "candidate": _candidate("s2"), **facts})]}

    assert not policy.decide(copies(copied=False), 0.25, 0.0)
    assert not policy.decide(copies(copied=False), 0.25, 100.0), "not made because of the load"
    policy.decide(copies(loaded=False), 0.25, 200.0)
    (made,) = policy.decide(copies(loaded=False), 0.25, 204.0)
    assert (made.server, made.load) == ("s2", True)
    assert not policy.decide(copies(sessions=1), 0.25, 300.0)
    assert not policy.decide(copies(), 0.25, 350.0), "used a moment ago"
    (dropped,) = policy.decide(copies(), 0.25, 361.0)
    assert (dropped.server, dropped.load) == ("s2", False)
    policy.decide(copies(loaded=False), 0.25, 400.0)
    assert policy.decide(copies(loaded=False), 0.25, 404.0)
    assert not policy.decide(copies(pinned=True), 0.25, 500.0)
    assert not policy.decide(copies(copied=False), 0.25, 600.0)
    policy.decide(copies(loaded=False), 0.25, 700.0)
    assert policy.decide(copies(loaded=False), 0.25, 704.0)
    assert not policy.decide(copies(copied=False), 0.25, 705.0), "somebody else has asked for it"
    assert not policy.decide(copies(copied=False), 0.25, 800.0)


def test_a_controlnet_that_many_servers_have_gets_several_more_at_once() -> None:
    def copy(number: int, *, loaded: bool) -> Copy:
        sessions = 20 if loaded else number
        candidate = _candidate(f"s{number:02}", sessions=sessions)
        return Copy(candidate=candidate, loaded=loaded, fits=not loaded, sessions=sessions, pinned=False)

    policy = ReplicaPolicy()
    nets = {"edges": [copy(number, loaded=number < 12) for number in range(20)]}
    assert not policy.decide(nets, 0.25, 0.0)
    changes = list(policy.decide(nets, 0.25, 4.0))
    assert [(change.server, change.load) for change in changes] == [("s12", True), ("s13", True), ("s14", True)]
    assert not policy.decide(nets, 0.25, 5.0), "the next ones have to be needed as long again"


async def test_a_new_scheduler_gives_up_copies_without_a_job(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_SOON_S", 0.0)
    monkeypatch.setattr(replicas_module, "_LOOK_S", 0.0)
    _server(shop, net("edges"), name="s1")
    _server(shop, net("edges", copied=True), name="s2")
    await asyncio.sleep(0.01)
    assert not shop.controlnets._replicas._policy.pending, "another gateway is the scheduler"
    shop.controlnets.start()
    await eventually(lambda: shop.controlnets._replicas._policy.pending)
    shop.time.now += 61.0
    await eventually(lambda: [server.prefetched for server in shop.evictors.values()] == [[["edges"]]])
    await shop.controlnets.close()


async def test_the_second_half_of_a_pair_gets_a_server_of_its_own_where_that_is_sooner(shop: Shop) -> None:
    shop.worker()
    for name in ("s1", "s2"):
        _server(shop, net("edges"), name=name)
    job = _job(shop, "edges")
    job.rows = 2
    shop.take(job)
    (edges,) = placements(shop.client().requests[-1].addons)
    assert edges.pair_server == edges.servers[1].name
    await shop.complete(job)
    _server(shop, net("depth"), name="s3")
    alone = _job(shop, "depth")
    alone.rows = 2
    shop.take(alone)
    (depth,) = placements(shop.client().requests[-1].addons)
    assert depth.pair_server == ""


def test_servers_of_another_version_never_stand_in() -> None:
    old, new = _candidate("old", digest="1", sessions=5), _candidate("new", digest="2")
    assert _names(old, new) == ["new"]
    assert _names(old, new, digest="1") == ["old"]
    assert _names(new, digest="1") == ["new"], "nobody has the old one any more"
