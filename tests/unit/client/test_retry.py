"""When the SDK tries again and when it gives up, on a clock that the test holds."""

from __future__ import annotations

import math

import pytest

from bottega.client.transport.calls import Backoff, CallDeadline, RetryPolicy
from bottega.errors import DeadlinePassed, InvalidRequest, NoWorker, Unavailable
from tests.fakes.fake_time import FakeTime

POLICY = RetryPolicy(patience_s=10.0, first_wait_s=0.1, longest_wait_s=1.0)
REACHING = RetryPolicy(patience_s=10.0, reach_s=1.0, first_wait_s=0.1)
GONE = Unavailable("gone")


def backoff(clock: FakeTime, deadline_s: float = 1000.0, policy: RetryPolicy = POLICY) -> Backoff:
    return Backoff(
        policy, CallDeadline(at_s=deadline_s, allowed_s=60.0), clock=clock.monotonic, draw=lambda least, most: most
    )


def test_waits_double_up_to_the_longest() -> None:
    waits = backoff(FakeTime(now=100.0))
    assert [waits.wait_s(GONE) for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_waits_are_drawn_between_half_and_all() -> None:
    waits = [Backoff(POLICY, CallDeadline.after(60)).wait_s(GONE) for _ in range(50)]
    assert all(0.05 <= wait <= 0.1 for wait in waits)
    assert len(set(waits)) > 1


def test_the_gateways_own_wish_is_waited_for() -> None:
    assert backoff(FakeTime(now=100.0)).wait_s(Unavailable("busy", retry_after_s=3.0)) == pytest.approx(3.1)


def test_patience_counts_from_the_last_answer() -> None:
    clock = FakeTime(now=100.0)
    waits = backoff(clock)
    clock.now += 9.5
    waits.wait_s(GONE)
    clock.now += 1.0
    with pytest.raises(Unavailable):
        waits.wait_s(GONE)
    waits.reset()
    assert waits.wait_s(GONE) == pytest.approx(0.1)


def test_a_gateway_that_answers_is_waited_for_longer_than_one_that_does_not() -> None:
    clock = FakeTime(now=100.0)
    waits = backoff(clock, policy=REACHING)
    clock.now += 2.0
    with pytest.raises(Unavailable):
        waits.wait_s(GONE)
    waits.wait_s(NoWorker("none yet"))
    waits.wait_s(GONE)
    clock.now += 8.0
    with pytest.raises(NoWorker):
        waits.wait_s(NoWorker("none yet"))


def test_no_wait_goes_past_the_deadline() -> None:
    with pytest.raises(Unavailable):
        backoff(FakeTime(now=100.0), deadline_s=102.0).wait_s(Unavailable("busy", retry_after_s=3.0))


def test_a_deadline_that_has_passed_says_so() -> None:
    with pytest.raises(DeadlinePassed, match="not done within 60 s"):
        CallDeadline(at_s=0.0, allowed_s=60.0).remaining_s()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_to_wait_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s must be a number of seconds above 0"):
        CallDeadline.after(seconds)
