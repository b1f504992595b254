"""Of what `make chaos` does to workers whose edits reuse activations, one kill: on a suite that pads no rows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.masked_edits import kill_reusing_workers
from tests.chaos.scene import Scene

# Workers draw on all cores beside what kills.
pytestmark = pytest.mark.alone


def test_a_worker_killed_in_mid_edit_leaves_its_recording_to_the_next_one(tmp_path: Path) -> None:
    with Scene(tmp_path, ()) as scene:
        kill_reusing_workers(scene, times=1, rng=random.Random(5))
        scene.count_ends()
        assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)
        assert scene.tally.figures["resumed_edits_that_reused_blocks"] >= 1
