"""Leases and models, on a clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bottega import kinds
from bottega.addons.interface.views import Access, Member
from bottega.clocks import Clock
from bottega.errors import Draining, InvalidRequest, ModelMismatch, ModelNotFound, NoWorker, Unavailable
from bottega.gateway.fleet.registry import Fleet
from bottega.rpc.security.caller import Grants
from bottega.v1 import fleet_pb2, worker_pb2
from bottega.v1.hosted_pb2 import LeftOut
from tests.samples.controlnet_hosts import bounds, server, worker


@dataclass
class Watcher:
    """Writes down what the fleet tells, and is its clock."""

    now: float = 1000.0
    told: list[str] = field(default_factory=list)

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, wall=lambda: self.now)

    def member_joined(self, member: Member) -> None:
        self.told.append(f"joined {member.name}")

    def member_changed(self, member: Member) -> None:
        self.told.append(f"changed {member.name}")

    def member_lost(self, member: Member) -> None:
        self.told.append(f"lost {member.name}")


def _fleet(watcher: Watcher, *, model_grace_s: float = 30) -> Fleet:
    fleet = Fleet(lease_s=1.5, model_grace_s=model_grace_s, bounds=bounds(4), clock=watcher.clock())
    fleet.subscribe(watcher)
    return fleet


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def fleet(watcher: Watcher) -> Fleet:
    return _fleet(watcher)


def test_a_silent_member_is_lost_after_the_lease_and_a_talking_one_is_not(fleet: Fleet, watcher: Watcher) -> None:
    silent, talking = fleet.join(worker("w1")), fleet.join(worker("w2", port=2))
    watcher.now += 1.0
    fleet.report(talking, fleet_pb2.Load())
    fleet.expire()
    assert fleet.workers("m") == [silent, talking]
    watcher.now += 0.6
    fleet.expire()
    assert fleet.workers("m") == [talking]
    assert watcher.told[-1] == "lost w1"


def test_an_idle_member_that_says_the_same_again_keeps_its_lease_and_what_is_known_of_it(
    fleet: Fleet, watcher: Watcher
) -> None:
    member = fleet.join(worker("w1"))
    watcher.now += 1.0
    fleet.report_unchanged(member)
    assert (member.heard_at, member.has_reported) == (watcher.now, False)
    times = [fleet_pb2.StepTime(latent_height=16, latent_width=16, rows=1, seconds=0.1)]
    fleet.report(member, fleet_pb2.Load(step_times=times))
    known = member.times, member.load
    watcher.now += 1.0
    fleet.report(member, fleet_pb2.Load(step_times=times))
    assert (member.heard_at, member.times is known[0], member.load is known[1]) == (watcher.now, True, True)
    assert watcher.told[-1] == "changed w1"
    times[0].seconds = 0.2
    fleet.report(member, fleet_pb2.Load(step_times=times))
    assert member.times.seconds((16, 16), 1) == 0.2


def test_members_report_less_often_while_there_are_no_jobs_and_at_once_when_one_comes(
    fleet: Fleet, watcher: Watcher
) -> None:
    frozen, alive = fleet.join(worker("w1")), fleet.join(worker("w2", port=2))
    fleet.rest()
    assert fleet.report_every_s == 0.5, "there may have been a job just now"
    for _ in range(10):
        watcher.now += 1.0
        for member in (frozen, alive):
            fleet.report_unchanged(member)
    for member in (frozen, alive):
        member.wake.clear()
    fleet.rest()
    assert (fleet.report_every_s, frozen.wake.is_set(), alive.wake.is_set()) == (5.0, True, True)
    frozen.wake.clear()
    watcher.now += 10.0
    fleet.expire()
    assert fleet.workers("m") == [frozen, alive]
    fleet.wake_up()
    assert (fleet.report_every_s, frozen.wake.is_set()) == (0.5, True)
    fleet.report_unchanged(alive)
    watcher.now += 1.4
    fleet.expire()
    assert fleet.workers("m") == [frozen, alive]
    fleet.report_unchanged(alive)
    watcher.now += 0.1
    fleet.expire()
    assert (fleet.workers("m"), watcher.told[-1]) == ([alive], "lost w1")


def test_a_name_is_free_as_soon_while_the_fleet_rests_as_while_there_are_jobs(fleet: Fleet, watcher: Watcher) -> None:
    watcher.now += 10.0
    fleet.rest()
    older = fleet.join(worker(port=1))
    assert fleet.report_every_s == 5.0
    fleet.leave(older, older.stream)
    with pytest.raises(Unavailable) as caught:
        fleet.join(worker(port=2))
    assert caught.value.retry_after_s == pytest.approx(1.55)
    fleet.rest()
    watcher.now += 1.55
    assert fleet.join(worker(port=2)) is not older


def test_a_member_that_left_takes_nothing_and_is_lost_only_if_it_does_not_come_back(
    fleet: Fleet, watcher: Watcher
) -> None:
    member = fleet.join(worker())
    fleet.leave(member, member.stream)
    assert fleet.workers("m") == []
    watcher.now += 1
    replaced = member.stream
    assert fleet.join(worker()) is member
    fleet.join(worker())
    fleet.leave(member, replaced)
    assert fleet.workers("m") == [member]
    assert "lost w1" not in watcher.told
    fleet.leave(member, member.stream)
    watcher.now += 2
    fleet.expire()
    assert watcher.told[-1] == "lost w1"


def test_a_newcomer_of_a_name_that_is_in_use_is_refused_and_told_by_whom(fleet: Fleet, watcher: Watcher) -> None:
    older = fleet.join(worker(port=1))
    with pytest.raises(InvalidRequest, match=r"w1 is in use by a service at 127\.0\.0\.1:1") as caught:
        fleet.join(worker(port=2))
    assert [violation.field for violation in caught.value.violations] == ["registration.name"]
    assert (fleet.workers("m"), older.stream, watcher.told) == ([older], 1, ["joined w1"])


@pytest.mark.parametrize("gone", ["left", "silent"])
def test_another_process_of_a_name_gets_in_when_the_lease_of_the_older_one_has_passed(
    fleet: Fleet, watcher: Watcher, gone: str
) -> None:
    older = fleet.join(worker(port=1))
    older_stream = older.stream
    if gone == "left":
        fleet.leave(older, older_stream)
    watcher.now += fleet.lease_s - 0.1
    with pytest.raises(Unavailable if gone == "left" else InvalidRequest) as caught:
        fleet.join(worker(port=2))
    assert caught.value.retry_after_s is not None
    assert "lost w1" not in watcher.told, "it may come back, with its attempts"
    watcher.now += caught.value.retry_after_s
    watcher.told.clear()
    newer = fleet.join(worker(port=2))
    assert newer is not older
    assert watcher.told == ["lost w1", "joined w1"]
    assert not older.connected
    fleet.leave(older, older_stream)
    assert fleet.workers("m") == [newer]


@pytest.mark.parametrize("change", ["another instance", "other models"])
def test_who_comes_under_a_members_name_takes_nothing_from_it_not_even_at_its_address(
    fleet: Fleet, watcher: Watcher, change: str
) -> None:
    member = fleet.join(worker(port=1))
    rogue = worker(port=1)
    if change == "another instance":
        rogue.instance = "f" * 32
    else:
        rogue.models[0].max_pixels = 4096
    for gone in (False, True):
        if gone:
            fleet.leave(member, member.stream)
        for _ in range(5):
            with pytest.raises((InvalidRequest, Unavailable)):
                fleet.join(rogue)
    assert "lost w1" not in watcher.told
    assert fleet.join(worker(port=1)) is member


def test_a_worker_that_starts_is_listed_and_serves_as_soon_as_it_says_its_model(fleet: Fleet, watcher: Watcher) -> None:
    ready = worker()
    starting = fleet_pb2.Registration()
    starting.CopyFrom(ready)
    starting.ClearField("models")
    member = fleet.join(starting)
    fleet.report(member, fleet_pb2.Load(starting=fleet_pb2.StartProgress(stage="loading unet")))
    assert fleet.members() == [member]
    assert fleet.workers("m") == []
    with pytest.raises(NoWorker):
        fleet.resolve("m")
    stranger = worker(port=9)
    stranger.instance = "somebody else's, who has only its name"
    with pytest.raises(InvalidRequest, match="is in use"):
        fleet.join(stranger)
    served = fleet.join(ready)
    fleet.leave(member, member.stream)
    assert fleet.workers("m") == [served] == fleet.members()
    assert watcher.told == ["joined w1", "changed w1", "lost w1", "joined w1"]
    other = worker(model="another")
    with pytest.raises(InvalidRequest, match="must send the same registration as before"):
        fleet.join(other)


def test_a_draining_worker_gets_no_new_jobs_but_is_still_listed(fleet: Fleet) -> None:
    member = fleet.join(worker())
    fleet.report(member, fleet_pb2.Load(draining=True))
    assert fleet.workers("m") == []
    assert fleet.members() == [member]
    assert fleet.expected("m")


def test_the_limits_of_a_model_are_those_of_the_workers_that_are_here(fleet: Fleet) -> None:
    fleet.join(worker("large", max_pixels=4096))
    small = fleet.join(worker("small", port=2, max_pixels=64))
    # Whoever gets the job must be able to draw it.
    assert (fleet.resolve("m").max_pixels, fleet.models()[0].max_pixels) == (64, 64)
    fleet.leave(small, small.stream)
    assert (fleet.resolve("m").max_pixels, fleet.models()[0].max_pixels) == (4096, 4096)
    assert fleet.models()[0].workers == 1


def test_what_one_worker_of_a_model_refuses_is_refused(fleet: Fleet) -> None:
    for name, port, steps, reason in (("w1", 1, {61: "62 steps"}, ""), ("w2", 2, {103: "104 steps"}, "its VAE")):
        registration = worker(name, port=port)
        registration.models[0].edits_refused_because = reason
        registration.models[0].sampler_choices.add(sampler=1, is_default=True, refused_steps=steps)
        registration.models[0].sampler_choices.add(sampler=1, use_karras_sigmas=True, refused_because=reason)
        fleet.join(registration)
    model = fleet.resolve("m")
    assert model.edits_refused_because == "its VAE"
    assert dict(model.sampler_choices[0].refused_steps) == {61: "62 steps", 103: "104 steps"}
    assert [choice.refused_because for choice in model.sampler_choices] == ["", "its VAE"]


def _end_with(fleet: Fleet, name: str, reason: str) -> None:
    """A worker that cannot serve its model joins, says why, and leaves."""
    registration = worker(name)
    del registration.models[:]
    member = fleet.join(registration)
    fleet.report(member, fleet_pb2.Load(left_out=[LeftOut(kind=kinds.WORKER, name="m", reason=reason)]))
    fleet.leave(member, member.stream)


def test_a_worker_that_cannot_serve_its_model_is_remembered_until_one_of_its_name_joins(
    fleet: Fleet, watcher: Watcher
) -> None:
    _end_with(fleet, "b", "no scheduler")
    _end_with(fleet, "a", "no unet")
    assert [(member.name, member.load.left_out[0].reason) for member in fleet.refused] == [
        ("a", "no unet"),
        ("b", "no scheduler"),
    ]
    assert not fleet.members()
    watcher.now += 2.0
    fleet.expire()  # its name is free
    joined = fleet.join(worker("a"))
    assert [member.name for member in fleet.refused] == ["b"]
    fleet.leave(joined, joined.stream)
    assert [member.name for member in fleet.refused] == ["b"], "a worker that served is none of them"
    watcher.now += 600.0
    assert list(fleet.refused) == []


def test_only_workers_serve_models(fleet: Fleet) -> None:
    net = worker("edges", "edges")
    net.kind = kinds.CONTROLNET
    fleet.join(net)
    assert (fleet.models(), fleet.workers("edges"), fleet.expected("edges")) == ([], [], False)
    member = fleet.join(worker("w1", "m"))
    assert fleet.resolve(None).name == "m"
    assert fleet.workers("m") == [member]


def test_a_model_is_found_by_its_name_or_as_the_only_one(fleet: Fleet) -> None:
    for name in (None, "a"):
        with pytest.raises(NoWorker) as none:
            fleet.resolve(name)
        assert none.value.retry_after_s
    fleet.join(worker("w1", "b", 1))
    assert fleet.resolve(None).name == "b"
    for name, port in (("w2", 2), ("w3", 3)):
        fleet.join(worker(name, "a", port))
    assert [(model.name, model.workers) for model in fleet.models()] == [("a", 2), ("b", 1)]
    with pytest.raises(ModelNotFound, match="a, b") as unknown:
        fleet.resolve("c")
    assert unknown.value.metadata == {"served": "a,b"}
    with pytest.raises(InvalidRequest) as several:
        fleet.resolve(None)
    assert "a, b" in several.value.violations[0].description


def test_a_model_that_a_caller_may_not_have_is_as_none(fleet: Fleet) -> None:
    shop = Access(tenant="shop", grants=Grants(models=("a",)))
    fleet.join(worker("w1", "b", 1))
    for name in ("b", "c", None):  # as before anybody served anything
        with pytest.raises(NoWorker):
            fleet.resolve(name, shop)
    fleet.join(worker("w2", "a", 2))
    assert [model.name for model in fleet.models(shop)] == ["a"]
    assert fleet.resolve(None, shop).name == "a", "the only one for it"
    said = set()
    for name in ("b", "c"):
        with pytest.raises(ModelNotFound) as refused:
            fleet.resolve(name, shop)
        said.add((refused.value.message, *refused.value.metadata.items()))
    assert said == {("no such model; served models: a", ("served", "a"))}


def test_a_model_is_expected_for_its_grace_after_the_last_worker_left(fleet: Fleet, watcher: Watcher) -> None:
    member = fleet.join(worker())
    watcher.now += 100
    fleet.leave(member, member.stream)
    watcher.now += 29
    fleet.expire()
    assert fleet.resolve("m").name == "m"
    watcher.now += 2
    with pytest.raises(NoWorker):
        fleet.resolve("m")
    with pytest.raises(NoWorker):
        fleet.resolve(None)


def _started(fleet: Fleet, instance: str, start_s: float, model: str = "m") -> Member:
    """A worker of that instance joins, and says what it took to start."""
    registration = worker(instance, model)
    registration.instance = instance.ljust(16, ".")
    member = fleet.join(registration)
    fleet.report(member, fleet_pb2.Load(start_s=start_s))
    return member


def _lose(fleet: Fleet, watcher: Watcher, member: Member) -> None:
    fleet.leave(member, member.stream)
    watcher.now += fleet.lease_s
    fleet.expire()


def _expected_s(fleet: Fleet, watcher: Watcher, member: Member, *within: float) -> tuple[bool, ...]:
    """Whether its model is expected so many seconds after it has left."""
    fleet.leave(member, member.stream)
    left_at, found = watcher.now, []
    for seconds in within:
        watcher.now = left_at + seconds
        fleet.expire()
        found.append(fleet.expected("m"))
    return tuple(found)


@pytest.mark.parametrize(
    ("grace_s", "start_s", "last_s"),
    [(30, 10.0, 30), (30, 120.0, 240), (30, 86_400.0, 600), (900, 400.0, 900)],
    ids=["quick", "slow", "endless", "slow, with a longer grace"],
)
def test_a_model_is_expected_for_twice_its_start_within_bounds(
    watcher: Watcher, grace_s: float, start_s: float, last_s: float
) -> None:
    fleet = _fleet(watcher, model_grace_s=grace_s)
    member = _started(fleet, "w1", start_s)
    watcher.now += 1000
    assert _expected_s(fleet, watcher, member, last_s - 1, last_s + 1) == (True, False)


def test_the_longest_of_the_last_starts_of_a_model_counts_and_not_another_models(
    fleet: Fleet, watcher: Watcher
) -> None:
    _lose(fleet, watcher, _started(fleet, "other", 250, "another"))
    _lose(fleet, watcher, _started(fleet, "cold", 100))
    for _ in range(20):  # cut off from the gateway for longer than the lease, again and again: that is one start
        _lose(fleet, watcher, _started(fleet, "cut off", 5))
    for number in range(6):
        _lose(fleet, watcher, _started(fleet, f"warm {number}", 5))
    watcher.now += 190
    assert fleet.expected("m"), "the first is one of the last eight starts"
    _lose(fleet, watcher, _started(fleet, "one more", 5))
    watcher.now += 30
    assert not fleet.expected("m")


def test_what_a_member_hosts_is_expected_back_as_its_model_is_once_it_has_left(fleet: Fleet, watcher: Watcher) -> None:
    _lose(fleet, watcher, _started(fleet, "cold", 100))
    warm = _started(fleet, "warm", 5)
    net = fleet.join(server())
    fleet.report(net, fleet_pb2.Load(start_s=40))
    assert [fleet.grace_s(member) for member in (warm, net)] == [30, 30], "they are here, and start nothing"
    for member in (warm, net):
        fleet.leave(member, member.stream)
    assert [fleet.grace_s(member) for member in (warm, net)] == [200, 80]


def test_step_times_are_taken_with_those_to_try_again_and_nonsense_is_not(fleet: Fleet) -> None:
    member = fleet.join(worker())
    times = [
        fleet_pb2.StepTime(latent_height=4, latent_width=4, rows=rows, seconds=s, outdated=rows == 4)
        for rows, s in ((1, float("nan")), (2, 2.0), (3, -1.0), (4, 4.0))
    ]
    fleet.report(member, fleet_pb2.Load(step_times=times))
    assert list(member.times.entries()) == [((4, 4), 2, 2.0), ((4, 4), 4, 4.0)]
    assert [member.times.outdated((4, 4), rows) for rows in (2, 3, 4, 5)] == [False, True, True, False]


def test_what_a_worker_says_of_masked_rows_is_taken_and_nonsense_is_not(fleet: Fleet) -> None:
    member = fleet.join(worker())
    planned = [
        fleet_pb2.PlannedTime(rows=rows, seconds=s) for rows, s in ((1.0, 0.5), (float("nan"), 1.0), (2.0, -1.0))
    ]
    masked = [
        fleet_pb2.MaskedTimes(latent_height=4, latent_width=4, fixed_share=0.25, planned=planned),
        fleet_pb2.MaskedTimes(latent_height=8, latent_width=8),
        fleet_pb2.MaskedTimes(latent_height=9, latent_width=9, fixed_share=7.0),
    ]
    attempts = {"half": 0.5, "unknown": 0.0, "nonsense": float("nan"), "more": 1.5}
    running = [
        fleet_pb2.RunningAttempt(attempt=worker_pb2.AttemptId(job_id=job_id), computed_share=share)
        for job_id, share in attempts.items()
    ]
    fleet.report(member, fleet_pb2.Load(masked_times=masked, running=running))
    assert list(member.fractions.entries()) == [((4, 4), 0.25)]
    assert list(member.planned.entries()) == [((4, 4), 1.0, 0.5)]
    assert member.shares == {"half": 0.5}


def test_how_masks_become_tokens_is_what_some_worker_of_the_model_says(fleet: Fleet) -> None:
    silent, other, speaking = (fleet.join(worker(name, model, n)) for n, (name, model) in enumerate(_WORKERS, start=1))
    assert fleet.mask_tokens("m") is None
    tokens = fleet_pb2.MaskTokens(token_elements=2, margin_tokens=1)
    fleet.report(silent, fleet_pb2.Load())
    fleet.report(other, fleet_pb2.Load(mask_tokens=fleet_pb2.MaskTokens(token_elements=4)))
    assert fleet.mask_tokens("m") is None
    fleet.report(speaking, fleet_pb2.Load(mask_tokens=tokens))
    assert fleet.mask_tokens("m") == tokens


_WORKERS = (("w1", "m"), ("w2", "other"), ("w3", "m"))


def test_a_worker_with_another_model_under_a_name_that_is_served_is_refused(fleet: Fleet, watcher: Watcher) -> None:
    serving = fleet.join(worker("w1", model_hash="aa", dtype="float32"))
    for facts in ({"model_hash": "bb", "dtype": "float32"}, {"model_hash": "aa", "dtype": "bfloat16"}):
        with pytest.raises(ModelMismatch) as caught:
            fleet.join(worker("w2", port=2, **facts))
        for said in ("w1", "w2", "aa in float32", f"{facts['model_hash']} in {facts['dtype']}"):
            assert said in caught.value.message
    assert fleet.workers("m") == [serving]
    fleet.leave(serving, serving.stream)
    watcher.now += 2
    fleet.expire()
    assert fleet.join(worker("w2", port=2, model_hash="bb", dtype="float32")).connected


def test_nobody_joins_a_fleet_that_is_closed(fleet: Fleet, watcher: Watcher) -> None:
    fleet.join(worker())
    fleet.close()
    assert watcher.told[-1] == "lost w1"
    with pytest.raises(Draining):
        fleet.join(worker())
