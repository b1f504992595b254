"""Who takes which job and when: pure decisions from what waits, what runs and what turns cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bottega.gateway.scheduling.outcomes import forecast
from bottega.gateway.scheduling.policy import Assignment, PendingJob, RunningShares, assign
from bottega.gateway.scheduling.worker_plan import Findings, ResourceRequest, WorkerState
from bottega.gateway.tenants import TenantTerms
from bottega.planning import RowFractions, StepTimes
from tests.support.processor_speed import on_this_machine

_EQUAL = TenantTerms().weight

SHAPE = (16, 16)


def _times(fixed_s: float, per_row_s: float) -> StepTimes:
    return StepTimes.from_entries((SHAPE, rows, fixed_s + per_row_s * rows) for rows in (1, 2, 4, 8, 16))


# Doubling the rows doubles the turn, as with a large model; and a turn that is nearly all fixed cost.
PROPORTIONAL, GAINING = _times(0, 0.05), _times(0.02, 0.001)


def _worker(name: str, *running: ResourceRequest, times: StepTimes = PROPORTIONAL, max_rows: int = 16) -> WorkerState:
    return WorkerState(worker=name, running=running, times=times, fixed_s=0.1, max_rows=max_rows)


def _request(steps: int = 30, rows: int = 2) -> ResourceRequest:
    return ResourceRequest(rows=rows, steps=steps, shape=SHAPE)


def _line(count: int, **kwargs: int) -> list[PendingJob]:
    return [PendingJob(job_id=f"j{i}", request=_request(**kwargs)) for i in range(count)]


def _assign(pending: list[PendingJob], workers: list[WorkerState], *, contended: bool = False) -> list[Assignment]:
    """As many wait as there are."""
    return assign(pending, workers, waiting=len(pending), contended=contended)


def _pairs(pending: list[PendingJob], workers: list[WorkerState]) -> list[tuple[str, str]]:
    return [(a.job_id, a.worker) for a in _assign(pending, workers)]


# Fast: 5 steps to go and 30 of its own, .1 s each = 3.5 s. Slow and idle: 30 steps of 1 s.
_WAITED_FOR = [_worker("fast", _request(5)), _worker("slow", times=_times(0, 0.5))]
# Behind the first, the fast worker is free after 6.5 s and would end at 9.5 s; the slow one at 9 s.
_FOR_THE_SECOND = [_worker("fast", _request(35)), _worker("slow", times=_times(0, 0.15))]


@pytest.mark.parametrize(
    ("pending", "workers", "pairs"),
    [
        pytest.param(3, [], [], id="nothing without workers"),
        pytest.param(3, [_worker("w1")], [("j0", "w1")], id="the first to an idle worker, the rest waits"),
        pytest.param(3, [_worker("w1"), _worker("w2")], [("j0", "w1"), ("j1", "w2")], id="one to each idle worker"),
        pytest.param(
            1, [_worker("w1", times=_times(0, 0.1)), _worker("w2", times=_times(0, 0.02))], [("j0", "w2")], id="faster"
        ),
        pytest.param(1, [_worker("w1", _request(20))], [], id="none to a busy worker where sharing gains nothing"),
        pytest.param(
            2, [_worker("w1", _request(20), times=GAINING)], [("j0", "w1"), ("j1", "w1")], id="to a group that gains"
        ),
        pytest.param(
            1,
            [_worker("busy", _request(20), times=GAINING), _worker("idle", times=GAINING)],
            [("j0", "idle")],
            id="to an idle worker before joining a group",
        ),
        pytest.param(1, _WAITED_FOR, [], id="waits for a fast worker rather than taking a slow one"),
        pytest.param(2, _FOR_THE_SECOND, [("j1", "slow")], id="those behind one that waits may take the slow one"),
    ],
)
def test_jobs_go_where_they_end_first(pending: int, workers: list[WorkerState], pairs: list[tuple[str, str]]) -> None:
    assert _pairs(_line(pending), workers) == pairs


def test_a_group_is_never_wider_than_the_worker_takes() -> None:
    running = [_request(20) for _ in range(7)]
    assert len(_assign(_line(5), [_worker("w1", *running, times=GAINING)])) == 1
    assert len(_assign(_line(5), [_worker("w1", _request(20), times=GAINING, max_rows=4)])) == 1


def test_a_job_is_bound_while_the_last_turn_of_the_one_before_runs() -> None:
    assert _pairs(_line(2), [_worker("w1", _request(1))]) == [("j0", "w1")]
    assert _pairs(_line(2), [_worker("w1", _request(1), _request(30))]) == []
    assert _pairs(_line(1), [replace(_worker("w1", _request(1)), due_s=(-1.0,))]) == [("j0", "w1")], "it is late"


# A second's work beside two seconds' of another: together both take three, and the long one ends half a second later.
_LONG, _SHORT = _request(20), PendingJob(job_id="short", request=_request(10))


@pytest.mark.parametrize(("due_s", "joins"), [((), True), ((3.2,), True), ((3.0,), False), ((-1.0,), False)])
def test_a_short_job_shares_the_turns_of_a_long_one_that_is_done_before_it_is_due(
    due_s: tuple[float, ...], joins: bool
) -> None:
    worker = replace(_worker("w1", _LONG), due_s=due_s)
    assert _pairs([_SHORT], [worker]) == ([("short", "w1")] if joins else [])


def test_a_job_that_is_bound_in_the_same_round_is_not_made_late_either() -> None:
    for due_s, pairs in ((3.2, [("long", "w1"), ("short", "w1")]), (3.0, [("long", "w1")])):
        long = PendingJob(job_id="long", request=_LONG, due_s=due_s)
        assert _pairs([long, _SHORT], [_worker("w1")]) == pairs


def test_where_many_wait_a_job_begins_beside_one_that_is_late() -> None:
    late = replace(_worker("w1", _request(10), times=_times(0.02, 0.05)), due_s=(-1.0,))
    assert len(assign(_line(1), [late], waiting=6)) == 1


def test_where_turns_cost_the_same_for_more_rows_nobody_waits_for_a_job_that_is_late() -> None:
    worker = replace(_worker("w1", _LONG, times=GAINING), due_s=(-1.0,))
    assert _pairs([_SHORT], [worker]) == [("short", "w1")]


def test_a_job_takes_a_slower_worker_rather_than_wait_for_one_that_is_late() -> None:
    late = replace(_worker("late", _request(100)), due_s=(-1.0,))
    assert _pairs([_SHORT], [late, _worker("slow", times=_times(0, 0.15))]) == [("short", "slow")]


def test_a_job_that_waits_for_one_that_would_be_late_is_told_so() -> None:
    for due_s, end_s in ((3.2, 2.0), (3.0, 3.0)):
        assert forecast([_SHORT.request], [replace(_worker("w1", _LONG), due_s=(due_s,))]) == [
            pytest.approx(end_s + 0.1)
        ]


def test_the_worker_that_was_lost_with_a_job_does_not_get_it() -> None:
    job = PendingJob(job_id="j0", request=_request(), avoid="w1")
    assert _pairs([job], [_worker("w1"), _worker("w2", times=_times(0, 5))]) == [("j0", "w2")]
    other = PendingJob(job_id="j1", request=_request())
    assert _pairs([job, other], [_worker("w1")]) == [("j1", "w1")]


def test_a_job_within_its_tenants_share_begins_beside_a_full_group_but_not_beside_many_beyond_it() -> None:
    full = _worker("w1", _request(20))
    (job,) = _line(1)
    assert _pairs([job], [full]) == []
    within = replace(job, within_share=True)
    assert _pairs([within, *_line(2)[1:]], [full]) == [("j0", "w1")]
    assert _pairs([within], [_worker("w1", *[_request(20)] * 5)]) == [("j0", "w1")]
    assert _pairs([within], [_worker("w1", *[_request(20)] * 6)]) == []
    first = replace(within, none_runs=True)
    assert _pairs([first], [_worker("w1", *[_request(20)] * 9)]) == [("j0", "w1")], "none of its tenant's runs"
    many = [replace(within, job_id=f"j{number}") for number in range(9)]
    assert len(_pairs(many, [full])) == 5


def test_a_job_that_has_no_place_holds_up_none_within_its_tenants_share() -> None:
    full = _worker("w1", _request(20))
    stuck, within = _line(2)
    pending = [stuck, replace(within, within_share=True)]
    assert _assign(pending, [full]) == []
    assert [(each.job_id, each.worker) for each in _assign(pending, [full], contended=True)] == [("j1", "w1")]
    assert _assign([stuck, within], [full], contended=True) == []


def _exclusive(count: int, *, avoid: str = "") -> list[PendingJob]:
    return [PendingJob(job_id=f"s{i}", request=_request(), avoid=avoid, exclusive=True) for i in range(count)]


def test_an_exclusive_job_takes_an_idle_worker_and_nobody_joins_it() -> None:
    pending = [*_exclusive(2), *_line(2)]
    assert _pairs(pending, [_worker("w1", times=GAINING)]) == [("s0", "w1")]
    assert _pairs(pending, [replace(_worker("w1", _request(20), times=GAINING), exclusive=True)]) == []


def test_an_exclusive_job_does_not_join_a_group_nor_one_that_is_finishing() -> None:
    assert _pairs(_exclusive(1), [_worker("w1", _request(1), times=GAINING)]) == []
    assert _pairs(_exclusive(1), [replace(_worker("w1"), finishing=1)]) == []


def test_one_worker_is_cleared_for_exclusive_jobs_and_the_others_go_on() -> None:
    busy = [_worker("w1", _request(20), times=GAINING), _worker("w2", _request(2), times=GAINING)]
    assert _pairs([*_exclusive(2), *_line(2)], busy) == [("j0", "w1"), ("j1", "w1")]
    alone = [
        _worker("w1", _request(20), times=GAINING),
        replace(_worker("w2", _request(2), times=GAINING), exclusive=True),
    ]
    assert _pairs([*_exclusive(2), *_line(2)], alone) == [("j0", "w1"), ("j1", "w1")]


def test_no_worker_is_cleared_for_an_exclusive_job_that_must_not_get_it() -> None:
    workers = [_worker("w1", _request(20), times=GAINING)]
    assert _pairs([*_exclusive(1, avoid="w1"), *_line(1)], workers) == [("j0", "w1")]


def test_an_assignment_says_whether_it_has_the_worker_for_itself() -> None:
    assert [a.exclusive for a in _assign(_line(2), [_worker("w1", times=GAINING)])] == [True, False]
    assert [a.exclusive for a in _assign(_line(1), [replace(_worker("w1"), finishing=1)])] == [False]


def test_without_measurements_every_worker_gets_one_job_and_no_estimate() -> None:
    workers = [_worker("w1", times=StepTimes()), _worker("w2", times=StepTimes())]
    assignments = _assign(_line(3), workers)
    assert [(a.worker, a.estimate_s) for a in assignments] == [("w1", None), ("w2", None)]
    assert forecast([_request()] * 2, workers) == [None, None]


def test_a_larger_latent_counts_as_more_rows() -> None:
    large = ResourceRequest(rows=2, steps=10, shape=(32, 32))
    (on_top,) = forecast([_request()], [_worker("w1", large)])
    # 10 turns of 8 rows' worth, then 30 of 2 rows, and the fixed part.
    assert on_top == pytest.approx(10 * 0.4 + 30 * 0.1 + 0.1)


HALF_FIXED = RowFractions.from_entries([(SHAPE, 0.5)])


def _edit(share: float, steps: int = 30) -> ResourceRequest:
    return _request(steps)._replace(share=share)


def test_an_edit_counts_as_what_its_mask_leaves_to_compute() -> None:
    worker = replace(_worker("w1", _edit(0.2, steps=10)), fractions=HALF_FIXED, findings=Findings())
    (behind_it,) = forecast([_request()], [worker])
    # Two rows that cost .6 of plain ones each for 10 turns, then 30 turns of two plain ones, and the fixed part.
    assert behind_it == pytest.approx(10 * 0.06 + 30 * 0.1 + 0.1)
    (itself,) = forecast([_edit(0.6)], [replace(_worker("w1"), fractions=HALF_FIXED, findings=Findings())])
    assert itself == pytest.approx(30 * 0.08 + 0.1)


def test_of_two_workers_as_busy_the_one_gets_an_edit_at_which_it_computes_less() -> None:
    workers = [replace(_worker(name), fractions=HALF_FIXED, findings=Findings()) for name in ("w1", "w2")]
    job = PendingJob(job_id="e", request=_request(), reduced={"w2": _edit(0.2)})
    (assignment,) = _assign([job], workers)
    assert assignment.worker == "w2"
    assert assignment.estimate_s == pytest.approx(30 * 0.06 + 0.1)
    loads = PendingJob(job_id="e", request=_request(), reduced={"w2": _edit(0.2)}, load_s={"w2": 1.5})
    assert _pairs([loads], workers) == [("e", "w1")], "where loading takes longer than it saves"


def test_of_many_workers_the_idle_one_is_found() -> None:
    workers = [_worker(f"w{number}", _request(5 + number)) for number in range(40)]
    workers.insert(33, _worker("idle"))
    assert _pairs(_line(1), workers) == [("j0", "idle")]


def test_estimates_say_when_each_waiting_job_ends() -> None:
    assert forecast([_request()] * 2, [_worker("w1", _request(10))]) == pytest.approx([1 + 3 + 0.1, 1 + 6 + 0.1])
    assert forecast([_request()] * 2, [_worker("w1"), _worker("w2")]) == pytest.approx([3.1, 3.1])


def test_a_group_is_as_wide_as_pays_off_for_the_jobs_that_wait_behind_the_next_one() -> None:
    worker = _worker("w1", _request(10), times=_times(0.02, 0.05))
    assert [len(assign(_line(1), [worker], waiting=waiting)) for waiting in (1, 6)] == [0, 1]


def test_a_decision_over_a_full_queue_and_busy_workers_is_quick() -> None:
    workers = [_worker(f"w{i}", *(_request(7 + i + k) for k in range(6)), times=GAINING) for i in range(4)]
    pending = _line(64)
    costs = []
    for _ in range(5):
        began = time.thread_time()
        _assign(pending, workers)
        costs.append(time.thread_time() - began)
    assert min(costs) < on_this_machine(0.02)


def test_no_more_of_the_queue_is_looked_at_than_decides() -> None:
    looked_at: list[str] = []

    def pending() -> Iterator[PendingJob]:
        for job in _line(64):
            looked_at.append(job.job_id)
            yield job

    assert assign(pending(), [_worker("w1", _request(20))], waiting=64) == []
    assert len(looked_at) < 10


def test_another_look_at_workers_that_have_not_moved_costs_next_to_nothing() -> None:
    times = _times(0.02, 0.001)
    workers = [_worker(f"w{i}", *(_request(90 + i + k) for k in range(8)), times=times) for i in range(4)]
    costs = []
    for _ in range(6):
        began = time.thread_time()
        _assign(_line(8), workers)
        costs.append(time.thread_time() - began)
    assert min(costs[1:]) < costs[0] / 5


def test_new_step_times_count_at_once() -> None:
    line, running = _line(1), _request(20)
    assert _pairs(line, [_worker("w1", running, times=_times(0, 0.05))]) == []
    assert _pairs(line, [_worker("w1", running, times=_times(0.02, 0.001))]) == [("j0", "w1")]


def _outdated(times: StepTimes, *rows: int) -> StepTimes:
    return StepTimes.from_entries(times.entries(), outdated={(SHAPE, count) for count in rows})


def test_a_worker_that_would_try_a_wider_turn_gets_one_more_and_nobody_is_promised_anything_by_it() -> None:
    times = _outdated(PROPORTIONAL, 4, 8)
    (given,) = _assign(_line(3), [_worker("w1", _request(20), times=times)])
    assert given.job_id == "j0"
    assert given.estimate_s == pytest.approx(0.1 + 50 * 0.1)
    assert forecast([_request()], [_worker("w1", _request(20), times=times)]) == [pytest.approx(0.1 + 50 * 0.1)]


@pytest.mark.parametrize(
    "worker",
    [
        _worker("w1", _request(20), times=_outdated(PROPORTIONAL, 2, 8)),
        _worker("w1", _request(20), times=_outdated(PROPORTIONAL, 4, 8), max_rows=3),
        _worker("w1", _request(20), _request(20), times=_outdated(PROPORTIONAL, 4, 8)),
        _worker("w1", ResourceRequest(rows=2, steps=20, shape=(32, 32)), times=_outdated(PROPORTIONAL, 4, 8, 16)),
    ],
    ids=["measured lately", "more rows than it takes", "twice as many as pay off are there", "of another shape"],
)
def test_it_gets_none_that_it_could_not_try(worker: WorkerState) -> None:
    assert _pairs(_line(1), [worker]) == []


_WEIGHTS = {"heavy": 3.0, "light": 1.0}


def _claims(shares: RunningShares, tenant: str) -> int:
    """How many jobs it may have more."""
    return next(count for count in range(100) if not shares.claim(tenant))


def test_each_tenant_may_have_as_much_as_the_others_by_weight() -> None:
    assert _claims(RunningShares({}, ("",), _EQUAL), "") == 0, "alone it has no share to claim"
    assert _claims(RunningShares({"a": 3}, ("a",), _EQUAL), "a") == 0
    for running in (1, 10):
        shares = RunningShares({"flood": running}, ("flood", "one"), _EQUAL)
        assert not shares.claim("flood")
        assert _claims(shares, "one") == running
    assert _claims(RunningShares({"light": 2}, ("heavy",), _WEIGHTS.__getitem__), "heavy") == 6
    assert _claims(RunningShares({"heavy": 6}, ("light",), _WEIGHTS.__getitem__), "light") == 2
    assert _claims(RunningShares({"heavy": 2}, ("light",), _WEIGHTS.__getitem__), "light") == 0


def test_no_more_of_a_tenant_begins_than_may_run() -> None:
    left = {"bounded": 2, "full": 0}
    shares = RunningShares({}, ("bounded", "full", "free"), _EQUAL, left.get)
    assert [shares.begin("bounded") for _ in range(4)] == [True, True, False, False]
    assert not shares.begin("full")
    assert all(shares.begin("free") for _ in range(50))


def test_a_tenant_of_which_nothing_runs_is_told_apart_until_it_has_begun_one() -> None:
    shares = RunningShares({"flood": 3}, ("flood", "one"), _EQUAL)
    assert (shares.has_none("one"), shares.has_none("flood")) == (True, False)
    assert shares.claim("one")
    assert not shares.has_none("one")
    assert not RunningShares({}, ("one",), _EQUAL).has_none("one"), "nobody else has any"
