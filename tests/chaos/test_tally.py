"""What a tally keeps of its parts, and when it is not well."""

from __future__ import annotations

from collections.abc import Callable

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


def test_a_tally_is_well_where_enough_happened_and_every_bound_held() -> None:
    tally = Tally()
    tally.reached("kills", 1)
    assert (tally.well, tally.faults) == (False, ["kills: 0, at least 1 were to be"])
    spoils: tuple[Callable[[Tally], None], ...] = (
        lambda tally: tally.check("seconds", 2.0, 1.0),
        lambda tally: tally.ended(["a", "b", "a"]),
    )
    for spoil in spoils:
        tally = Tally()
        tally.count("kills")
        tally.reached("kills", 1)
        assert tally.well
        spoil(tally)
        assert not tally.well
