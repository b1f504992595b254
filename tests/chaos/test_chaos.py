"""Of what `make chaos` does one part, once: a worker is killed while it draws, in a suite of real processes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.__main__ import Part, _play
from tests.chaos.scene import Scene
from tests.chaos.workers import kill_workers


def test_a_worker_killed_in_mid_request_leaves_the_same_picture(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a", "b")) as scene:
        kill_workers(scene, times=1, rng=random.Random(3), seeds=(3,), steps=60)
        scene.count_ends()
        assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)


def test_a_suite_that_does_not_start_is_a_fault_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(scene: Scene) -> None:
        raise TimeoutError

    monkeypatch.setattr(Scene, "start_gateway", late)
    tally = _play(Part(play=kill_workers, times=1), 1, random.Random(1))
    assert tally.faults == ["the part could not go on: TimeoutError"]
