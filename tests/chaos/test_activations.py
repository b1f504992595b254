"""Of what `make chaos` does to activation stores, and to workers whose edits reuse activations, one of each.

On one suite, which pads no rows. All of it is slow: tests/service/worker/test_activations.py kills real stores beside
engines without a suite, and test_activation_stores.py there shows what an attempt that goes on finds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.chaos.activation_stores import kill_loading_stores, kill_recording_stores
from tests.chaos.masked_edits import kill_reusing_workers
from tests.chaos.scene import Scene

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Scene(tmp_path_factory.mktemp("stores"), ()) as scene:
        yield scene


def test_an_edit_whose_store_is_killed_leaves_its_picture(scene: Scene) -> None:
    kill_loading_stores(scene, times=1, rng=random.Random(5))
    assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)


def test_a_recording_whose_store_is_killed_is_the_same_picture_and_no_half_template(scene: Scene) -> None:
    kill_recording_stores(scene, times=1, rng=random.Random(5))
    assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)


def test_a_worker_killed_in_mid_edit_leaves_its_recording_to_the_next_one(scene: Scene) -> None:
    kill_reusing_workers(scene, times=1, rng=random.Random(5))
    scene.count_ends()
    assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)
    assert scene.tally.figures["resumed_edits_that_reused_blocks"] >= 1
