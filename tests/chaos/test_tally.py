"""What a tally keeps of its parts, when it is not well, and what the record keeps of parts that do not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from load.bench import framework
from tests.chaos import results
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


def test_a_recorded_part_keeps_its_figures_and_date_when_others_run(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    results.record({"full-disks": _part(2), "restarts": _part(1)}, "beside tests", folder=tmp_path)
    text = path.read_text()
    earlier = json.loads(text)["parts"]["full-disks"]
    path.write_text(text.replace(framework.today(), "2026-01-31"))
    results.record({"restarts": Tally(faults=["too late"])}, "nothing beside", folder=tmp_path)
    run = json.loads(path.read_text())
    assert run["parts"]["full-disks"] == {**earlier, "date": "2026-01-31"}
    assert run["parts"]["restarts"]["conditions"] == "nothing beside"
    assert run["date"] == f"2026-01-31 to {framework.today()}"
    assert run["values"] == {
        "lost": 1,
        "double": 0,
        "different_images": 0,
        "client_errors": 2,
        "full_disks_acknowledged": 2,
        "faults": 1,
    }
