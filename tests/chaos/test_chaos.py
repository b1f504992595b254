"""Of what `make chaos` does, what no test of one service shows with less."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.gateways import kill_gateways
from tests.chaos.scene import Scene


# A worker draws on all cores, and losses are to be noticed in time.
@pytest.mark.alone
def test_a_gateway_killed_around_acknowledgement_loses_nothing(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a",)) as scene:
        kill_gateways(scene, times=2, rng=random.Random(7), ready_s=10.0)
        scene.count_ends()
        assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)
