"""What a tally keeps of its parts, and when it is not well."""

from __future__ import annotations

from tests.chaos.tally import Tally


def _part(acknowledged: int, faults: int = 0) -> Tally:
    part = Tally(lost=1, client_errors=2)
    for _ in range(acknowledged):
        part.count("acknowledged")
    part.faults += ["too late"] * faults
    return part


def test_figures_of_two_parts_that_count_the_same_are_both_kept() -> None:
    whole = Tally()
    whole.add("kill-gateways", _part(3, faults=1))
    whole.add("full-disks", _part(2))
    assert whole.figures == {"kill_gateways_acknowledged": 3, "full_disks_acknowledged": 2}
    assert whole.zeros == {"lost": 2, "double": 0, "different_images": 0, "client_errors": 4}
    assert whole.faults == ["kill-gateways: too late"]


def test_a_part_in_which_nothing_happened_is_not_well() -> None:
    tally = Tally()
    tally.reached("kills", 1)
    assert not tally.well
    assert tally.faults == ["kills: 0, at least 1 were to be"]


def test_a_part_in_which_it_happened_often_enough_is_well() -> None:
    tally = _part(2)
    tally.lost = tally.client_errors = 0
    tally.reached("acknowledged", 2)
    assert tally.well
    tally.check("seconds", 2.0, 1.0)
    assert not tally.well


def test_a_request_that_ended_twice_is_counted() -> None:
    tally = Tally()
    tally.ended(["a", "b", "a"])
    assert (tally.double, tally.well) == (1, False)
