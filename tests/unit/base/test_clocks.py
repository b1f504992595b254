"""Clocks by which others are judged: one that nobody can set, one that stands still while this process is stopped."""

from __future__ import annotations

from bottega.clocks import AwakeClock, SteadyClock
from tests.fakes.fake_time import FakeTime


def test_a_clock_that_is_set_back_or_forward_changes_no_age() -> None:
    machine = FakeTime(now=100.0)
    steady = SteadyClock(machine.clock())
    began = steady()
    assert began == machine.clock().wall()
    for wrong_s in (-7200.0, 7200.0, 0.0):
        machine.wrong_s = wrong_s
        machine.now += 5
    assert steady() - began == 15


def test_another_process_goes_on_from_what_the_one_before_has_left() -> None:
    machine = FakeTime(now=100.0)
    machine.wrong_s = -7200.0  # while the one before ended
    left, left_wall = 1e9 + machine.now, machine.clock().wall()
    machine.now += 30
    later = SteadyClock(machine.clock())
    later.go_on_from(left, wall=left_wall)
    assert later() == left + 30
    machine.now += 5
    machine.wrong_s = 0.0
    assert later() == left + 35


def test_a_clock_that_was_set_back_between_two_processes_takes_nothing_back() -> None:
    machine = FakeTime(now=100.0)
    left, left_wall = SteadyClock(machine.clock())(), machine.clock().wall()
    machine.now += 30
    machine.wrong_s = -7200.0
    later = SteadyClock(machine.clock())
    later.go_on_from(left, wall=left_wall)
    assert later() == left


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
