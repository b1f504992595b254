"""Clocks by which others are judged: one that nobody can set, one that stands still while this process is stopped."""

from __future__ import annotations

from bottega.clocks import AwakeClock, SteadyClock


class Machine:
    """`now` passes; the clock on the wall shows what it was set to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wrong_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1e9 + self.now + self.wrong_s

    def steady(self) -> SteadyClock:
        return SteadyClock(wall=self.wall, monotonic=self.monotonic)


def test_a_clock_that_is_set_back_or_forward_changes_no_age() -> None:
    machine = Machine()
    steady = machine.steady()
    began = steady()
    assert began == machine.wall()
    for wrong_s in (-7200.0, 7200.0, 0.0):
        machine.wrong_s = wrong_s
        machine.now += 5
    assert steady() - began == 15


def test_another_process_goes_on_from_what_the_one_before_has_left() -> None:
    machine = Machine()
    machine.wrong_s = -7200.0  # while the one before ended
    left, left_wall = 1e9 + machine.now, machine.wall()
    machine.now += 30
    later = machine.steady()
    later.go_on_from(left, wall=left_wall)
    assert later() == left + 30
    machine.now += 5
    machine.wrong_s = 0.0
    assert later() == left + 35


def test_a_clock_that_was_set_back_between_two_processes_takes_nothing_back() -> None:
    machine = Machine()
    left, left_wall = machine.steady()(), machine.wall()
    machine.now += 30
    machine.wrong_s = -7200.0
    later = machine.steady()
    later.go_on_from(left, wall=left_wall)
    assert later() == left


def test_time_in_which_this_process_was_stopped_counts_as_one_look() -> None:
    machine = Machine()
    awake = AwakeClock(0.25, monotonic=machine.monotonic)
    for _ in range(4):
        machine.now += 0.25
        assert awake() == machine.now - 100
    machine.now += 3600
    assert awake() == 1.25
    machine.now += 0.5  # a busy machine is late, and no more
    assert awake() == 1.75
