"""In a simulated fleet, estimates of jobs with ControlNets become right, and more pictures are in time for it."""

from __future__ import annotations

from load.bench.addon_costs import simulate


def test_learned_costs_make_estimates_right_and_more_pictures_in_time() -> None:
    left_out, learned = (simulate(200, 2, learns=learns) for learns in (False, True))
    assert left_out["error"] > 0.3
    assert learned["error_p50"] < 0.02
    assert learned["error_p95"] < 0.1, "kinds that come for the first time are estimated by their number"
    assert learned["p95_over_alone"] <= left_out["p95_over_alone"]
    assert learned["in_time"] >= left_out["in_time"]
