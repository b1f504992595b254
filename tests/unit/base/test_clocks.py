"""Clocks by which others are judged: one that nobody can set, one that stands still while this process is stopped."""

from __future__ import annotations

import pytest

from bottega.clocks import AwakeClock, SteadyClock, seconds_until_tick
from tests.fakes.fake_time import FakeTime


@pytest.mark.parametrize(("now", "left_s"), [(10.0, 1.0), (10.25, 0.75), (10.5, 0.5), (10.75, 1.25)])
def test_timers_of_one_period_fire_together_but_not_at_once(now: float, left_s: float) -> None:
    assert seconds_until_tick(1.0, monotonic=lambda: now) == left_s
    assert seconds_until_tick(1.0, least_share=0.0, monotonic=lambda: now) == 1.0 - now % 1.0


def test_a_clock_that_is_set_back_or_forward_changes_no_age() -> None:
    machine = FakeTime(now=100.0)
    steady = SteadyClock(machine.clock())
    began = steady()
    assert began == machine.clock().wall()
    for wrong_s in (-7200.0, 7200.0, 0.0):
        machine.wrong_s = wrong_s
        machine.now += 5
    assert steady() - began == 15


@pytest.mark.parametrize("wrong_s", [-7200.0, 7200.0, 400 * 86_400.0])
def test_another_process_goes_on_whatever_the_clock_was_set_to(wrong_s: float) -> None:
    machine = FakeTime(now=100.0)
    mark = SteadyClock(machine.clock()).mark()
    machine.now, machine.wrong_s = machine.now + 30, wrong_s
    later = SteadyClock(machine.clock())
    later.resume(mark)
    assert later() == mark.steady + 30
    machine.now, machine.wrong_s = machine.now + 5, 0.0
    assert later() == mark.steady + 35


@pytest.mark.parametrize("wrong_s", [-7200.0, 7200.0, 400 * 86_400.0])
def test_nothing_has_passed_while_the_machine_was_restarted(wrong_s: float) -> None:
    machine = FakeTime(now=100.0)
    mark = SteadyClock(machine.clock()).mark()
    machine.restart_machine()
    machine.now, machine.wrong_s = 30, wrong_s
    later = SteadyClock(machine.clock())
    later.resume(mark)
    assert later() == mark.steady
    machine.now += 5
    assert later() == mark.steady + 5


def test_a_clock_that_was_never_noted_goes_on_from_what_is_known_and_never_back() -> None:
    machine = FakeTime(now=100.0)
    steady = SteadyClock(machine.clock())
    began = steady()
    steady.go_on_from(began + 50)
    steady.go_on_from(began - 50)
    assert steady() == began + 50


def test_time_in_which_this_process_was_stopped_counts_as_one_look() -> None:
    machine = FakeTime(now=100.0)
    awake = AwakeClock(0.25, monotonic=machine.clock().monotonic)
    for _ in range(4):
        machine.now += 0.25
        assert awake() == machine.now - 100
    machine.now += 3600
    assert awake() == 1.25
    machine.now += 0.5  # a busy machine is late, and no more
    assert awake() == 1.75
