"""Random requests of every kind: each picture is drawn again by its own parameters, or refused with a reason."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.like.replays import describe, draw_and_replay
from tests.like.requests import RandomRequests
from tests.like.suite import LATE_LORAS, LORAS, running_suite

REQUESTS = 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", [False, True], ids=["a worker", "a pair"])
def test_every_picture_is_drawn_again_by_its_parameters_or_refused(tmp_path: Path, pair: bool) -> None:
    requests = RandomRequests(random.Random(int(pair)), loras=LORAS, late_loras=LATE_LORAS)
    with running_suite(tmp_path / "suite", pair=pair) as client:
        tally = draw_and_replay(client, requests, REQUESTS, tmp_path)
    print("\n".join(tally.table()))
    assert not tally.faults, describe(tally.faults)
    assert not tally.refused, tally.refused
    techniques = {each.technique for each in tally.replays}
    assert techniques >= {"", "recording", "cached start", "late LoRAs"}, "what is approximate was hardly tried"
